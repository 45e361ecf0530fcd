"""Broken and hostile trajectory files: each is refused in one sentence, or trains like the good one."""

import json
import math
import os
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_policy, make_trajectories, refused, write
from safetensors.numpy import load_file

import train
from topr import trajectories
from topr.trajectories import SCHEMA, read_metadata, read_trajectories

pytestmark = pytest.mark.timeout(30)  # nothing may hang
ROWS = 23


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "base")


@pytest.fixture(scope="module")
def good(policy) -> Path:
    return write(policy.parent / "good.parquet", policy, make_trajectories(policy, ROWS))


@pytest.fixture(scope="module")
def table(good) -> pa.Table:
    return pq.read_table(good)


def inspect(run, path, words: str = "") -> None:
    refused(run, words or str(path), "inspect", path, main=trajectories.main)


def fit(policy, path, *arguments) -> list:
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", "--data.val=null", "--data.test=null"]
    quiet = ["--trainer.enable_progress_bar=false", "--data.batch_size=8"]
    return ["fit", *config, f"--model.policy={policy}", f"--data.train={path}", *quiet, *arguments]


def trained(run, policy, path) -> dict[str, np.ndarray]:
    """Weights after a training that must succeed."""
    code, _, err = run(train.main, *fit(policy, path, f"--trainer.logger.init_args.name={path.stem}"))
    assert code == 0, err
    return load_file(run.folder / "runs" / path.stem / "version_0" / "policy" / "model.safetensors")


def replace(table: pa.Table, name: str, values, kind: pa.DataType | None = None) -> pa.Table:
    """The table with other values in a column, of another type if one is given."""
    index, kind = table.schema.get_field_index(name), kind or table.schema.field(name).type
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return table.set_column(index, pa.field(name, column.type), column)


def edit(table: pa.Table, name: str, row: int, value, kind: pa.DataType | None = None) -> pa.Table:
    values = table[name].to_pylist()
    values[row] = value(values[row]) if callable(value) else value
    return replace(table, name, values, kind)


@pytest.mark.parametrize("share", np.linspace(0, 0.999, 40).round(3))
def test_truncated_files(run, good, share):
    content = good.read_bytes()
    Path("cut.parquet").write_bytes(content[: int(share * len(content))])
    inspect(run, "cut.parquet")


FLIPS = 100


@pytest.mark.parametrize("mask", [0x01, 0x80])
@pytest.mark.parametrize("place", range(FLIPS))
def test_flipped_bits(run, good, place, mask):
    content = bytearray(good.read_bytes())
    content[place * (len(content) - 1) // (FLIPS - 1)] ^= mask
    Path("flipped.parquet").write_bytes(content)
    code, _, _ = run(trajectories.main, "inspect", "flipped.parquet")
    if code == 0:  # in bytes that mean nothing, statistics say
        assert read_trajectories("flipped.parquet") == read_trajectories(good)
        known = read_metadata("flipped.parquet")  # at worst lost as a whole: a file of unknown origin
        assert known == read_metadata(good) or set(known.values()) == {None}
    else:
        inspect(run, "flipped.parquet")


@pytest.mark.parametrize("name", SCHEMA.names)
def test_missing_and_doubled_columns(run, table, name):
    pq.write_table(table.drop_columns([name]), "missing.parquet")
    inspect(run, "missing.parquet", f"column '{name}' is missing")
    pq.write_table(table.append_column(name, table[name]), "twice.parquet")
    inspect(run, "twice.parquet", f"column '{name}'")
    pq.write_table(
        table.rename_columns([old.upper() if old == name else old for old in table.column_names]), "A.parquet"
    )
    inspect(run, "A.parquet", f"column '{name}' is missing")


KINDS = {
    "text": pa.array(["x"] * ROWS),
    "number": pa.array([0.5] * ROWS),
    "bool": pa.array([True] * ROWS),
    "binary": pa.array([b"\xff\xfe"] * ROWS),
    "struct": pa.array([{"a": 1}] * ROWS),
    "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int32())),
    "texts": pa.array([["x"]] * ROWS),
    "bools": pa.array([[True]] * ROWS),
    "lists": pa.array([[[1]]] * ROWS),
    "fixed": pa.array([[1, 2]] * ROWS, pa.list_(pa.int32(), 2)),
    "dictionary": pa.array(["x"] * ROWS).dictionary_encode(),
    "date": pa.array([1] * ROWS, pa.int32()).cast(pa.date32()),
    "decimal": pa.array([1] * ROWS).cast(pa.decimal128(21, 2)),
    "null": pa.nulls(ROWS),
    "nulls": pa.array([[None]] * ROWS, pa.list_(pa.null())),
}
WELCOME = {
    *((field.name, "text") for field in SCHEMA if field.type == pa.string()),
    *((name, kind) for name in ("finished", "valid") for kind in ("bool",)),
    *((name, "null") for name in ("valid", "answer", "gold")),
    ("reward", "number"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEMA.names)
def test_columns_of_other_types(run, table, name, kind):
    pq.write_table(replace(table, name, KINDS[kind]), "kind.parquet")
    if (name, kind) in WELCOME:
        code, _, err = run(trajectories.main, "inspect", "kind.parquet")
        assert code == 0, err
    else:
        inspect(run, "kind.parquet", name)


@pytest.mark.parametrize("row", [0, 11, ROWS - 1])
@pytest.mark.parametrize("name", [field.name for field in SCHEMA if not field.nullable])
def test_nulls(run, table, name, row):
    pq.write_table(edit(table, name, row, None), "null.parquet")
    inspect(run, "null.parquet", f"row {row} ")


LISTS = {
    "prompt_ids": {
        "empty": (lambda old: [], None),
        "null": (lambda old: [*old[:-1], None], None),
        "negative": (lambda old: [-1, *old[1:]], None),
        "smallest": (lambda old: [-(2**31)], None),
        "beyond int32": (lambda old: [2**31], pa.list_(pa.int64())),
        "beyond uint32": (lambda old: [2**40], pa.list_(pa.int64())),
        "unsigned": (lambda old: [2**64 - 1], pa.list_(pa.uint64())),
        "float": (lambda old: [1.5], pa.list_(pa.float64())),
    },
    "ref_logprobs": {
        "empty": (lambda old: [], None),
        "short": (lambda old: old[1:], None),
        "long": (lambda old: [*old, -1.0], None),
        "null": (lambda old: [None, *old[1:]], None),
        "nan": (lambda old: [*old[:-1], math.nan], None),
        "infinite": (lambda old: [math.inf, *old[1:]], None),
        "minus infinite": (lambda old: [-math.inf, *old[1:]], None),
        "positive": (lambda old: [0.5, *old[1:]], None),
        "huge": (lambda old: [-3e38, *old[1:]], None),
        "beyond float32": (lambda old: [-1e300, *old[1:]], pa.list_(pa.float64())),
        "whole numbers": (lambda old: [-(2**40)] * len(old), pa.list_(pa.float64())),
    },
}
LISTS["response_ids"] = LISTS["prompt_ids"]


@pytest.mark.parametrize("row", [0, ROWS - 1])
@pytest.mark.parametrize(("name", "change"), [(name, change) for name in LISTS for change in LISTS[name]])
def test_bad_lists(run, table, name, change, row):
    value, kind = LISTS[name][change]
    pq.write_table(edit(table, name, row, value, kind), "bad.parquet")
    inspect(run, "bad.parquet", f"'{name}'" if change == "float" else "bad.parquet, row")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (3e38, None),
        (-1e30, None),
        (1e300, pa.float64()),
        (2.0**62, pa.float64()),
        (2**62, pa.int64()),
        (2**64 - 1, pa.uint64()),
    ],
)
def test_bad_rewards(run, table, value, kind):
    rewards = [int(old) if kind and pa.types.is_integer(kind) else old for old in table["reward"].to_pylist()]
    rewards = [abs(old) for old in rewards]
    rewards[7] = value
    pq.write_table(replace(table, "reward", rewards, kind), "bad.parquet")
    inspect(run, "bad.parquet", "bad.parquet, row")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_ids", [20]),
        ("response_ids", [20]),
        ("response_ids", [2**31 - 1]),
        ("prompt_ids", [3] * 200),
        ("response_ids", [3] * 65),
        ("response_ids", [3] * 1_000_000),
        ("ref_logprobs", [-0.5] * 1_000_000),
    ],
    ids=lambda value: f"{len(value)} times {value[0]}" if isinstance(value, list) else value,
)
def test_rows_that_do_not_fit_the_policy(run, policy, table, name, value):
    changed = edit(table, name, 5, value)
    if name == "response_ids":
        changed = edit(changed, "ref_logprobs", 5, [-0.5] * len(value))
    pq.write_table(changed, "bad.parquet")
    refused(run, "bad.parquet, row 5 ", *fit(policy, "bad.parquet"))


METADATA = {
    "a list": b"[]",
    "text": b'"topr"',
    "a number": b"3",
    "null": b"null",
    "true": b"true",
    "nothing": b"",
    "no JSON": b"{schema: 1}",
    "half of it": b'{"schema": 1',
    "no UTF-8": b'{"task": "\xff"}',
    "UTF-16": '{"schema": 1}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "a huge number": b'{"schema": ' + b"9" * 5000 + b"}",
    "NaN": b'{"schema": NaN}',
    "a key twice": b'{"schema": 9, "schema": 1}',
    **{
        f"{key} {value}": json.dumps({"schema": 1, key: value}).encode()
        for key, values in {
            "schema": (0, 2, -1, 1.0, True, "1", [1], {}),
            "task": (1, True, ["a"], {}),
            "tokenizer": (1, "another", ["a"], {}),
            "policy": (1, ["a"], {}),
            "precision": (32, ["32-true"], {}),
            "sampling": (1, "greedy", ["a"]),
            "iteration": ("1", 1.5, [1], {}),
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(run, policy, table, name):
    path = Path("metadata.parquet")
    pq.write_table(table.replace_schema_metadata({"topr": METADATA[name]}), path)
    if name == "tokenizer another":
        refused(run, "another tokenizer", *fit(policy, path))
    else:
        inspect(run, path)


def test_every_door_checks_metadata(run, policy, table):
    pq.write_table(table.replace_schema_metadata({"topr": '{"precision": ["32-true"]}'}), "metadata.parquet")
    refused(run, "metadata.parquet", *fit(policy, "metadata.parquet"))


def sparse(path: str, head: bytes = b"", tail: bytes = b"") -> None:
    """A terabyte that takes no room."""
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(2**40)
        file.seek(0, os.SEEK_END)
        file.write(tail)


def special(path: str) -> None:
    socket.socket(socket.AF_UNIX).bind(path)


def unreadable(path: str) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    Path(path).touch(0)


FILES = {
    "missing": lambda path: None,
    "empty": lambda path: Path(path).touch(),
    "text": lambda path: Path(path).write_text("prompt,response\n1,2\n"),
    "JSON": lambda path: Path(path).write_text('{"prompt": "1"}\n'),
    "zeros": lambda path: Path(path).write_bytes(bytes(4096)),
    "only magic": lambda path: Path(path).write_bytes(b"PAR1"),
    "only magics": lambda path: Path(path).write_bytes(b"PAR1PAR1"),
    "footer of no length": lambda path: Path(path).write_bytes(b"PAR1\0\0\0\0PAR1"),
    "footer too long": lambda path: Path(path).write_bytes(b"PAR1" + b"x" * 40 + b"\xff\xff\xff\xffPAR1"),
    "footer of noise": lambda path: Path(path).write_bytes(b"PAR1" + b"\x15\x02\x19" * 40 + b"\x78\0\0\0PAR1"),
    "encrypted": lambda path: Path(path).write_bytes(b"PARE" + b"x" * 40 + b"\x28\0\0\0PARE"),
    "folder": lambda path: Path(path).mkdir(),
    "FIFO": os.mkfifo,
    "socket": special,
    "/dev/zero": lambda path: Path(path).symlink_to("/dev/zero"),
    "/dev/null": lambda path: Path(path).symlink_to("/dev/null"),
    "/dev/stdin": lambda path: Path(path).symlink_to("/dev/stdin"),
    "broken link": lambda path: Path(path).symlink_to("nowhere"),
    "link to itself": lambda path: Path(path).symlink_to(path),
    "link to a folder": lambda path: Path(path).symlink_to("."),
    "unreadable": unreadable,
    "terabyte": sparse,
    "terabyte with magics": lambda path: sparse(path, b"PAR1", b"\xff\xff\xff\x0fPAR1"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file(run, name):
    FILES[name]("bad.parquet")
    inspect(run, "bad.parquet")


@pytest.mark.parametrize("name", ["FIFO", "/dev/zero", "terabyte", "link to itself", "folder"])
def test_what_is_no_file_to_fit(run, policy, name):
    FILES[name]("bad.parquet")
    refused(run, "bad.parquet", *fit(policy, "bad.parquet"))


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "/",
        "*.parquet",
        "**",
        "[",
        "x" * 300,
        "x/" * 3000,
        "a\0b.parquet",
        "\udcff.parquet",
        "~",
        "-1",
        "a/b",
        "\x1b[31m",
        "a\nb",
    ],
)
def test_paths(run, path):
    refused(run, "inspect", "inspect", path, main=trajectories.main)


def test_empty_file_of_the_right_columns(run, table):
    pq.write_table(table.slice(0, 0), "none.parquet")
    inspect(run, "none.parquet")


def test_what_is_welcome_trains_alike(run, policy, good, table):
    """Columns of ours in another order and width, more columns, row groups, pages: the same weights."""
    expected = trained(run, policy, good)
    mixed = table.select(SCHEMA.names[::-1]).append_column("more", pa.array(range(ROWS)))
    mixed = replace(mixed, "reward", table["reward"].cast(pa.float64()).combine_chunks())
    pq.write_table(mixed, "mixed.parquet", row_group_size=5, data_page_version="2.0", compression="gzip")
    (links := Path("linked.parquet")).symlink_to(good)
    for path in (Path("mixed.parquet"), links):
        found = trained(run, policy, path)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
