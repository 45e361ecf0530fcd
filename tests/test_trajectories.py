"""The trajectory file: round trip, what is rejected and accepted; rows of users' files."""

import json
import math
import subprocess
import sys
from types import NoneType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_trajectories, write

from topr.io import InputError
from topr.run.identity import policy_hash
from topr.trajectories import read_metadata, read_trajectories
from topr.trajectories.file import SCHEMA, read_table, resolve_files
from topr.trajectories.rows import load_rows

ROWS = 23


@pytest.fixture(scope="module")
def good(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "good.parquet"
    return write(path, policy, make_trajectories(policy, ROWS))


@pytest.fixture(scope="module")
def table(good):
    return pq.read_table(good)


def test_round_trip(tmp_path, policy):
    rows = make_trajectories(policy)
    rows[3].answer = "7"
    metadata = {"task": "t", "sampling": {"top_k": 0}, "iteration": 2}
    path = write(tmp_path / "a.parquet", policy, rows, **metadata)
    for row in rows:
        row.ref_logprobs = np.float32(row.ref_logprobs).tolist()
    assert read_trajectories(path) == rows
    found = read_metadata(path)
    assert {key: found[key] for key in metadata} == metadata
    assert (found["schema"], found["policy"]) == (1, policy_hash(str(policy)))


def edit(table: pa.Table, name: str, row: int, value) -> pa.Table:
    """The table with another value in one row."""
    values = table[name].to_pylist()
    values[row] = value(values[row]) if callable(value) else value
    return replace(table, name, pa.array(values, table.schema.field(name).type))


def replace(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


def check(table: pa.Table, path) -> None:
    """Write a file and read it."""
    pq.write_table(table, path)
    read_table(path, vocabulary=20, max_tokens=64)


def test_rows_are_numbered_through_all_row_groups(tmp_path, table):
    bad = edit(table, "reward", 22, math.nan).cast(table.schema)
    bad = edit(bad, "ref_logprobs", 21, [0.5] * 3).cast(table.schema)
    pq.write_table(pa.concat_tables([table] * 10 + [bad]), tmp_path / "a.parquet", row_group_size=7)
    with pytest.raises(InputError, match=f"row {10 * ROWS + 21}: "):
        read_table(tmp_path / "a.parquet")


BAD_VALUES = {
    "empty response": ("response_ids", [], "the prompt or the response is empty"),
    "missing log-prob": ("ref_logprobs", lambda old: old[1:], "differ in length"),
    "NaN log-prob": ("ref_logprobs", lambda old: [*old[:-1], math.nan], "ref_logprobs must"),
    "positive log-prob": ("ref_logprobs", lambda old: [0.5, *old[1:]], "ref_logprobs must"),
    "null id": ("response_ids", lambda old: [*old[:-1], None], "an id is null or outside"),
    "unknown id": ("prompt_ids", lambda old: [20, *old[1:]], "an id is null or outside"),
    "missing mark": ("sampled", lambda old: old[1:], "differ in length"),
    "too many tokens": ("prompt_ids", [3] * 64, "more tokens than 64 .data.microbatch_tokens"),
    "NaN reward": ("reward", math.nan, "the reward is NaN"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_named_by_its_row(tmp_path, table, name):
    column, value, words = BAD_VALUES[name]
    marks = []
    for row, ids in enumerate(table["response_ids"].to_pylist()):
        marks.append(None if row == 1 else [True] * len(ids))
    marked = replace(table, "sampled", pa.array(marks))
    check(marked, tmp_path / "good.parquet")
    for row in (0, 11, ROWS - 1):
        with pytest.raises(InputError, match=f"bad.parquet, row {row}: .*{words}"):
            check(edit(marked, column, row, value), tmp_path / "bad.parquet")


def test_the_bounds_themselves_are_accepted(tmp_path, table):
    path = tmp_path / "a.parquet"
    for column, value in {
        "prompt_ids": [0, 19],
        "ref_logprobs": lambda old: [0.0, *old[1:]],
        "reward": -1e6,
    }.items():
        check(edit(table, column, 5, value), path)


@pytest.mark.parametrize("name", [field.name for field in SCHEMA if not field.nullable])
def test_a_missing_column_a_null_and_a_wrong_type_are_named(tmp_path, table, name):
    wrong_type = replace(table, name, pa.array([{"a": 1}] * ROWS))
    for bad in (table.drop_columns([name]), edit(table, name, 3, None), wrong_type):
        with pytest.raises(InputError, match="bad.parquet cannot be read"):
            check(bad, tmp_path / "bad.parquet")


def test_columns_in_another_order_and_width_hold_the_same_trajectories(tmp_path, good, table):
    mixed = table.select(table.column_names[::-1]).append_column("more", pa.array(range(ROWS)))
    for name, kind in {
        "reward": pa.int64(),
        "prompt_ids": pa.large_list(pa.int64()),
        "prompt": pa.large_string(),
        "ref_logprobs": pa.list_(pa.float64()),
    }.items():
        mixed = replace(mixed, name, table[name].cast(kind))
    pq.write_table(mixed, tmp_path / "mixed.parquet", row_group_size=5, compression="gzip")
    assert read_trajectories(tmp_path / "mixed.parquet") == read_trajectories(good)
    assert read_metadata(tmp_path / "mixed.parquet") == read_metadata(good)


def test_a_damaged_file_is_rejected(tmp_path, good):
    content = good.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.parquet").write_text('{"prompt": "1"}')
    column = pq.read_metadata(good).row_group(0).column(6)  # ref_logprobs
    damaged = bytearray(content)
    start = column.dictionary_page_offset or column.data_page_offset
    damaged[start + column.total_compressed_size - 9] ^= 1
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    for name, reason in {"cut": "", "text": "", "damaged": ".*CRC"}.items():
        with pytest.raises(InputError, match=f"{name}.parquet cannot be read {reason}"):
            read_table(tmp_path / f"{name}.parquet")


def test_missing_metadata_are_unknown_and_missing_rows_are_rejected(tmp_path, table):
    path = tmp_path / "a.parquet"
    check(table.replace_schema_metadata(None), path)
    assert set(read_metadata(path).values()) == {None}
    with pytest.raises(InputError, match="a.parquet cannot be read .* sample with"):
        check(table.replace_schema_metadata({"topr": "[1]"}), path)
        read_metadata(path)
    with pytest.raises(InputError, match="a.parquet holds no trajectory"):
        check(table.slice(0, 0), path)


def test_files_are_found_by_path_glob_and_list(tmp_path, good):
    a, b, c = (str(tmp_path / f"{name}.parquet") for name in "abc")
    for name in (b, a, c):
        (tmp_path / name).write_bytes(good.read_bytes())
    assert resolve_files(a) == [a]
    assert resolve_files([c, str(tmp_path / "[ab].parquet")]) == [c, a, b]
    for missing in (str(tmp_path / "x*"), "nowhere.parquet", "some-organisation/some-data", ""):
        with pytest.raises(InputError, match="^'.*' is no file, glob or hub data set"):
            resolve_files(missing)


TYPES = {"prompt": (str,), "id": (str, int, NoneType)}
GOOD = {"prompt": "1\u2028", "id": 1, "more": [1]}


def test_rows_come_from_json_lines_and_parquet(tmp_path):
    rows = [GOOD, {"prompt": "2", "id": None, "more": []}]
    text = "\ufeff" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8", newline="")
    assert load_rows(tmp_path / "a.jsonl", TYPES) == rows
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_rows(tmp_path / "a.parquet", TYPES) == rows


def test_a_key_has_the_first_of_its_names_that_a_row_holds(tmp_path):
    rows = [{"b": "1", "c": "2"}, {"c": "3", "a": "4"}, {"d": "5"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    types = {"a|b|c": (str, NoneType)}
    assert [row.get("a") for row in load_rows(tmp_path / "a.jsonl", types)] == ["1", "4", None]
    with pytest.raises(InputError, match=r"row 3: key 'a\|b\|c' holds None, expected str"):
        load_rows(tmp_path / "a.jsonl", {"a|b|c": (str,)})


@pytest.mark.parametrize(("suffix", "compression"), [("gz", "gzip"), ("zst", "zstd")])
def test_compressed_json_lines_are_read_whole_or_rejected(tmp_path, suffix, compression):
    path = tmp_path / f"a.jsonl.{suffix}"
    with pa.output_stream(path, compression=compression) as file:
        file.write(json.dumps(GOOD).encode())
    assert load_rows(path, TYPES) == [GOOD]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="cannot be read"):
        load_rows(path, TYPES)


BAD_LINES = {
    "cut off": (b'{"prompt": "1", "id"', "cannot be read"),
    "no UTF-8": (b'{"prompt": "\xff"}', "cannot be read"),
    "a list": (b"[1]", "cannot be read .*not a mapping"),
    "missing key": (b'{"id": 1}', "row 2: key 'prompt' holds None, expected str"),
    "boolean": (
        b'{"prompt": "1", "id": true}',
        "row 2: key 'id' holds True, expected str or int or NoneType",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, name):
    line, words = BAD_LINES[name]
    (tmp_path / "a.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + line)
    with pytest.raises(InputError, match=f"a.jsonl.* {words}"):
        load_rows(tmp_path / "a.jsonl", TYPES)


def test_sources_without_rows_are_rejected(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for source, words in {
        str(tmp_path / "empty.jsonl"): "holds no row",
        "nowhere.jsonl": r"cannot be read \(.*No such file",
        "owner/name:train": "cannot be read .*owner/name",
    }.items():
        with pytest.raises(InputError, match=f"{source}.*{words}"):
            load_rows(source, TYPES)


def test_help_needs_no_torch():
    code = "import sys, topr.trajectories.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
