"""The trajectory file: round trip, what is rejected and accepted; rows of users' files."""

import json
import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_trajectories, write

from topr.io import InputError
from topr.policy import policy_fingerprint
from topr.trajectories import (
    SCHEMA,
    Trajectory,
    batches,
    read_metadata,
    read_trajectories,
    write_tables,
)
from topr.trajectories.file import resolve_files
from topr.trajectories.rows import load_rows

ROWS = 23


@pytest.fixture(scope="module")
def good(policy, tmp_path_factory):
    return write(
        tmp_path_factory.mktemp("file") / "good.parquet", policy, make_trajectories(policy, ROWS)
    )


@pytest.fixture(scope="module")
def table(good):
    return pq.read_table(good)


def test_the_columns_are_those_of_the_design():
    ids, text = pa.list_(pa.int32()), pa.string()
    expected = {
        "prompt_id": text, "group": text, "prompt": text, "prompt_ids": ids,
        "response": text, "response_ids": ids, "ref_logprobs": pa.list_(pa.float32()),
        "reward": pa.float32(), "finished": pa.bool_(), "valid": pa.bool_(), "answer": text,
        "gold": text, "sampled": pa.list_(pa.bool_()),
    }  # fmt: skip
    assert SCHEMA.names == list(expected) and SCHEMA.types == list(expected.values())
    assert {field.name for field in SCHEMA if field.nullable} == {
        "valid",
        "answer",
        "gold",
        "sampled",
    }


def test_round_trip(tmp_path, policy):
    rows = make_trajectories(policy)
    rows[3].valid, rows[3].answer, rows[3].gold = True, "7", "8"
    metadata = {"task": "t", "sampling": {"top_k": 0}, "iteration": 2}
    path = write(tmp_path / "a.parquet", policy, rows, **metadata)
    assert read_trajectories(path) == [
        Trajectory(**{**vars(row), "ref_logprobs": np.float32(row.ref_logprobs).tolist()})
        for row in rows
    ]
    assert pq.read_schema(path).remove_metadata() == pa.schema(
        list(SCHEMA)[:-1]
    )  # written for conversations only
    found = read_metadata(path)
    assert list(found) == [
        "schema",
        "task",
        "tokenizer",
        "policy",
        "precision",
        "sampling",
        "iteration",
    ]
    assert found["schema"] == 1 and {key: found[key] for key in metadata} == metadata
    assert found["policy"] == policy_fingerprint(str(policy))
    list(batches(path, 20, 64))


def edit(table: pa.Table, name: str, row: int, value) -> pa.Table:
    """The table with another value in one row."""
    values, index = table[name].to_pylist(), table.schema.get_field_index(name)
    values[row] = value(values[row]) if callable(value) else value
    field = table.schema.field(name).with_nullable(True)
    return table.set_column(
        index, field if None in values else table.schema.field(name), pa.array(values, field.type)
    )


def test_a_large_file_is_read_in_batches_with_global_row_numbers(tmp_path, table):
    tables = [table] * (10_000 // ROWS)
    write_tables(tmp_path / "large.parquet", tables, {})
    found = pa.concat_tables(batches(tmp_path / "large.parquet"))
    assert found.drop_columns("sampled").equals(pa.concat_tables(tables))
    write_tables(tmp_path / "large.parquet", [*tables, edit(table, "reward", 22, math.nan)], {})
    with pytest.raises(
        InputError, match=rf"row {len(tables) * ROWS + 22} \(prompt '5'\): the reward is NaN"
    ):
        list(batches(tmp_path / "large.parquet", 20, 64))


BAD_VALUES = {
    "empty prompt": ("prompt_ids", [], "prompt_ids is empty"),
    "empty response": ("response_ids", [], "the response is empty"),
    "missing log-prob": ("ref_logprobs", lambda old: old[1:], "differ in length"),
    "NaN log-prob": ("ref_logprobs", lambda old: [*old[:-1], math.nan], "ref_logprobs holds"),
    "infinite log-prob": ("ref_logprobs", lambda old: [-math.inf, *old[1:]], "ref_logprobs holds"),
    "positive log-prob": ("ref_logprobs", lambda old: [0.5, *old[1:]], "ref_logprobs holds"),
    "null log-prob": ("ref_logprobs", lambda old: [None, *old[1:]], "ref_logprobs holds"),
    "null id": ("response_ids", lambda old: [*old[:-1], None], "response_ids holds"),
    "negative id": ("prompt_ids", lambda old: [-1, *old[1:]], "prompt_ids holds"),
    "id outside the vocabulary": (
        "response_ids",
        lambda old: [*old[:-1], 20],
        "response_ids holds",
    ),
    "too many tokens": ("prompt_ids", [3] * 64, "more than 64 .data.microbatch_tokens"),
    "NaN reward": ("reward", math.nan, "the reward is NaN"),
    "huge reward": ("reward", -1e30, "the reward is NaN or beyond"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_named_by_row_and_prompt(tmp_path, table, name):
    column, value, words = BAD_VALUES[name]
    for row in (0, 11, ROWS - 1):
        pq.write_table(edit(table, column, row, value), tmp_path / "bad.parquet")
        with pytest.raises(
            InputError, match=rf"bad.parquet, row {row} \(prompt '{row // 4}'\): .*{words}"
        ):
            list(batches(tmp_path / "bad.parquet", 20, 64))
    list(batches(write_again(tmp_path, table), 20, 64))


def test_marks_of_sampled_tokens_must_fit_the_response(tmp_path, table):
    responses = table["response_ids"].to_pylist()
    marks = [
        [i > 0 or len(ids) == 1 for i in range(len(ids))] if row % 2 else None
        for row, ids in enumerate(responses)
    ]
    good = table.append_column("sampled", pa.array(marks))
    list(batches(write_again(tmp_path, good), 20, 64))
    for value in (
        lambda old: old[1:],
        lambda old: [*old, True],
        lambda old: [*old[:-1], None],
        lambda old: [False] * len(old),
    ):
        pq.write_table(edit(good, "sampled", 11, value), tmp_path / "bad.parquet")
        with pytest.raises(
            InputError, match=r"row 11 \(prompt '2'\): sampled must mark each response token"
        ):
            list(batches(tmp_path / "bad.parquet", 20, 64))


def write_again(tmp_path, table):
    pq.write_table(table, tmp_path / "good.parquet")
    return tmp_path / "good.parquet"


def test_the_bounds_themselves_are_accepted(tmp_path, table):
    for column, value in {
        "prompt_ids": [0, 19],
        "ref_logprobs": lambda old: [0.0, *old[1:]],
        "reward": -1e6,
    }.items():
        list(batches(write_again(tmp_path, edit(table, column, 5, value)), 20, 64))
    row = table.slice(5, 1).to_pylist()[0]
    tokens = len(row["prompt_ids"]) + len(row["response_ids"])
    write_tables(tmp_path / "one.parquet", [table.slice(5, 1)], {})
    list(batches(tmp_path / "one.parquet", 20, tokens))
    with pytest.raises(InputError, match=f"up to {tokens} tokens"):
        list(batches(tmp_path / "one.parquet", 20, tokens - 1))


def read(path) -> None:
    read_metadata(path)
    list(batches(path, 20, 64))


@pytest.mark.parametrize("name", [field.name for field in SCHEMA if not field.nullable])
def test_a_missing_column_and_a_null_are_named(tmp_path, table, name):
    for bad in (table.drop_columns([name]), edit(table, name, 3, None)):
        pq.write_table(bad, tmp_path / "bad.parquet")
        with pytest.raises(InputError, match=f"bad.parquet .*{name}"):
            read(tmp_path / "bad.parquet")


def replace(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


@pytest.mark.parametrize(
    ("name", "value"), [("reward", "good"), ("prompt_ids", [2**40]), ("answer", {"a": 1})]
)
def test_a_column_of_a_wrong_type_is_rejected(tmp_path, table, name, value):
    pq.write_table(replace(table, name, pa.array([value] * ROWS)), tmp_path / "bad.parquet")
    with pytest.raises(InputError, match="bad.parquet"):
        read(tmp_path / "bad.parquet")


def test_columns_in_another_order_and_width_hold_the_same_trajectories(tmp_path, good, table):
    mixed = table.select(table.column_names[::-1]).append_column("more", pa.array(range(ROWS)))
    for name, kind in (
        ("reward", pa.int64()),
        ("prompt_ids", pa.large_list(pa.int64())),
        ("prompt", pa.large_string()),
    ):
        mixed = replace(mixed, name, table[name].cast(kind))
    mixed = replace(
        replace(mixed, "gold", pa.nulls(ROWS)),
        "ref_logprobs",
        table["ref_logprobs"].cast(pa.list_(pa.float64())),
    )
    pq.write_table(mixed, tmp_path / "mixed.parquet", row_group_size=5, compression="gzip")
    assert read_trajectories(tmp_path / "mixed.parquet") == read_trajectories(good)
    assert read_metadata(tmp_path / "mixed.parquet") == read_metadata(good)


def test_a_truncated_file_is_rejected(tmp_path, good):
    content = good.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cut.parquet cannot be read"):
        read(tmp_path / "cut.parquet")


def test_a_damaged_page_is_rejected(tmp_path, good):
    group = pq.read_metadata(good).row_group(0)
    column = group.column(6)  # ref_logprobs
    content = bytearray(good.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    (tmp_path / "damaged.parquet").write_bytes(content)
    with pytest.raises(InputError, match="damaged.parquet cannot be read .*CRC"):
        read(tmp_path / "damaged.parquet")


def test_another_schema_is_rejected_and_missing_metadata_is_unknown(tmp_path, table):
    path = tmp_path / "a.parquet"
    pq.write_table(table.replace_schema_metadata({"topr": '{"schema": 2}'}), path)
    with pytest.raises(InputError, match="a.parquet has schema 2"):
        read_metadata(path)
    pq.write_table(table.replace_schema_metadata(None), path)
    assert set(read_metadata(path).values()) == {None}


def test_files_without_trajectories_are_rejected(tmp_path, table):
    write_tables(tmp_path / "empty.parquet", [table.slice(0, 0)], {})
    (tmp_path / "text.parquet").write_text('{"prompt": "1"}')
    for name, words in (("empty", "holds no trajectory"), ("text", "cannot be read")):
        with pytest.raises(InputError, match=f"{name}.parquet.*{words}"):
            read(tmp_path / f"{name}.parquet")


def test_files_are_found_by_path_glob_and_list(tmp_path, good):
    a, b, c = (str(tmp_path / f"{name}.parquet") for name in "abc")
    for name in (b, a, c):
        (tmp_path / name).write_bytes(good.read_bytes())
    assert resolve_files(a) == [a]
    assert resolve_files(str(tmp_path / "*.parquet")) == [a, b, c]
    assert resolve_files([b, str(tmp_path / "[a]*")]) == [b, a]
    for missing in (str(tmp_path / "x*"), "nowhere.parquet", "some-organisation/some-data", ""):
        with pytest.raises(InputError, match="^inspect: '.*' is no file, glob or hub data set"):
            resolve_files(missing, "inspect")
    with pytest.raises(InputError, match="a.parquet twice"):
        resolve_files([a, str(tmp_path / "*.parquet")])


REQUIRED, OPTIONAL = {"prompt": (str,)}, {"id": (str, int)}
GOOD = {"prompt": "1\u2028", "id": 1, "more": [1]}


def test_rows_come_from_json_lines_and_parquet(tmp_path):
    rows = [GOOD, {"prompt": "2", "id": None, "more": []}]
    text = "\ufeff" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8", newline="")
    assert load_rows(tmp_path / "a.jsonl", REQUIRED, OPTIONAL) == rows
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_rows(tmp_path / "a.parquet", REQUIRED, OPTIONAL) == rows


@pytest.mark.parametrize(("suffix", "compression"), [("gz", "gzip"), ("zst", "zstd")])
def test_compressed_json_lines_are_read_whole_or_rejected(tmp_path, suffix, compression):
    rows, path = [GOOD | {"id": i} for i in range(9)], tmp_path / f"a.jsonl.{suffix}"
    with pa.output_stream(path, compression=compression) as file:
        file.write("\n".join(map(json.dumps, rows)).encode())
    assert load_rows(path, REQUIRED, OPTIONAL) == rows
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="cannot be read"):
        load_rows(path, REQUIRED, OPTIONAL)


BAD_LINES = {
    "cut off": (b'{"prompt": "1", "id"', "cannot be read"),
    "no UTF-8": (b'{"prompt": "\xff"}', "cannot be read"),
    "a list": (b"[1]", "row 2: expected a JSON object, found list"),
    "missing key": (b'{"id": 1}', "row 2: key 'prompt' holds None, expected str"),
    "boolean": (b'{"prompt": "1", "id": true}', "row 2: key 'id' holds True, expected str or int"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, name):
    line, words = BAD_LINES[name]
    (tmp_path / "a.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + line)
    with pytest.raises(InputError, match=f"a.jsonl.* {words}"):
        load_rows(tmp_path / "a.jsonl", REQUIRED, OPTIONAL)


def test_sources_without_rows_are_rejected(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for source, words in {
        str(tmp_path / "empty.jsonl"): "holds no row",
        "nowhere.jsonl": r"cannot be read \(.*No such file",
        "owner/name:train": "cannot be read .*owner/name",
    }.items():
        with pytest.raises(InputError, match=f"{source}.*{words}"):
            load_rows(source, REQUIRED, OPTIONAL)


def test_help_needs_no_heavy_library():
    code = "import sys, topr.trajectories.__main__; print({'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
