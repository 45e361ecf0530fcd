"""The trajectory file: a frozen Parquet schema, validated when it is read, written atomically; rows of other files."""

import glob
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topr.io import LARGEST, InputError, atomic, explained

REMEDY = (
    "train.py predict samples trajectory files, python -m topr.trajectories import converts text"
)
Types = dict[str, tuple[type, ...]]  # the accepted types of each key


@dataclass
class Trajectory:
    """One sampled response with its reward: a row of the file."""

    prompt_id: str
    group: str  # trajectories of one prompt in one iteration
    prompt: str
    prompt_ids: list[int]
    response: str
    response_ids: list[
        int
    ]  # all ids after the prompt, a sampled end token included; never re-tokenised
    ref_logprobs: list[
        float
    ]  # log mu of each id at temperature 1 over the full vocabulary; 0 where it was not sampled
    reward: float
    finished: bool  # an end token was sampled
    valid: bool | None = None
    answer: str | None = None
    gold: str | None = None
    sampled: list[bool] | None = (
        None  # which response ids were sampled, in a conversation of several turns; else all
    )


COLUMN_TYPES: dict[Any, pa.DataType] = {str: pa.string(), float: pa.float32(), bool: pa.bool_()}
COLUMN_TYPES |= {list[int]: pa.list_(pa.int32()), list[float]: pa.list_(pa.float32())}
COLUMN_TYPES |= {
    bool | None: pa.bool_(),
    str | None: pa.string(),
    list[bool] | None: pa.list_(pa.bool_()),
}
SCHEMA = pa.schema(
    [pa.field(f.name, COLUMN_TYPES[f.type], nullable=f.default is None) for f in fields(Trajectory)]
)
SCHEMA_VERSION = 1
METADATA_KEYS = (
    "schema",
    "task",
    "tokenizer",
    "policy",
    "precision",
    "sampling",
    "iteration",
)  # each may be null


def write_trajectories(
    path: str | Path, trajectories: Iterable[Trajectory], metadata: dict[str, Any]
) -> None:
    """Write a Parquet file atomically; `metadata` holds values of `METADATA_KEYS`, absent ones become null."""
    write_tables(path, [pa.Table.from_pylist(list(map(vars, trajectories)), SCHEMA)], metadata)


def write_tables(path: str | Path, tables: Iterable[pa.Table], metadata: dict[str, Any]) -> None:
    """`write_trajectories` for tables in the columns of `SCHEMA`."""
    known = {key: metadata.get(key) for key in METADATA_KEYS} | {"schema": SCHEMA_VERSION}
    table = _complete(pa.concat_tables(tables)).cast(
        SCHEMA.with_metadata({"topr": json.dumps(known)})
    )
    if table["sampled"].null_count == len(table):  # the one column that a file may lack
        table = table.drop_columns("sampled")
    with atomic(path) as temporary:
        pq.write_table(
            table, temporary, row_group_size=4096, compression="zstd", write_page_checksum=True
        )


@contextmanager
def open_parquet(path: str | Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file, not buffered ahead, checksums verified; raises InputError if pyarrow rejects it or its rows."""
    errors = OSError, ValueError, KeyError, OverflowError, pa.ArrowException
    with explained(f"{path} cannot be read", errors, REMEDY):  # noqa: SIM117 - too long for one line
        with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
            yield file


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """All rows of a trajectory file; raises as `read_metadata` and `batches` do."""
    read_metadata(path)
    return [Trajectory(**row) for table in batches(path) for row in table.to_pylist()]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a trajectory file; raises an InputError unless it is a Parquet file of this schema."""
    with open_parquet(path) as file:
        columns = _complete(file.schema_arrow.empty_table()).select(
            SCHEMA.names
        )  # pyarrow names a missing column
        columns.cast(SCHEMA)  # and a wrong type
        content = json.loads((file.metadata.metadata or {}).get(b"topr", b"{}"))
    if pa.types.is_boolean(columns["reward"].type):
        raise InputError(f"{path}: column 'reward' has type bool; write +1 and -1")
    if content.get("schema") not in (None, SCHEMA_VERSION):
        raise InputError(
            f"{path} has schema {content['schema']}, expected {SCHEMA_VERSION}; import it again"
        )
    return {key: content.get(key) for key in METADATA_KEYS}


def _complete(table: pa.Table) -> pa.Table:
    """The table, with the column that a file may lack."""
    return (
        table
        if "sampled" in table.column_names
        else table.append_column("sampled", pa.nulls(len(table)))
    )


def batches(
    path: str | Path, vocabulary: int = 2**31 - 1, max_tokens: int = 2**31 - 1
) -> Iterator[pa.Table]:
    """Read a trajectory file in batches, cast to `SCHEMA` and checked; raises InputError, naming the first bad row."""
    start = 0
    with open_parquet(path) as file:
        for batch in file.iter_batches(batch_size=8192, columns=SCHEMA.names):
            table = _complete(pa.Table.from_batches([batch])).select(SCHEMA.names).cast(SCHEMA)
            for bad, problem in _checks(table, vocabulary, max_tokens):
                if bad.any():
                    row = int(np.argmax(bad))
                    raise InputError(
                        f"{path}, row {start + row} (prompt '{table['prompt_id'][row]}'): {problem}"
                    )
            yield table
            start += len(table)
    if start == 0:
        raise InputError(f"{path} holds no trajectory; sample or import some first")


def _checks(table: pa.Table, vocabulary: int, max_tokens: int) -> Iterator[tuple[np.ndarray, str]]:
    lists = {
        name: table[name].combine_chunks()
        for name in ("prompt_ids", "response_ids", "ref_logprobs")
    }
    prompt, response, scored = (
        pc.list_value_length(column).to_numpy() for column in lists.values()
    )
    yield prompt == 0, "prompt_ids is empty; a response needs a prompt of one token at least"
    yield response == 0, "the response is empty; drop the row or store its end token"
    sampled = table["sampled"].combine_chunks()
    marks, rows = sampled.flatten(), pc.list_parent_indices(sampled)
    known, true = (flags.to_numpy(False) for flags in (marks.is_valid(), marks.fill_null(False)))
    marked, chosen = (np.bincount(rows, flags, len(table)) for flags in (known, true))
    some = sampled.is_valid().to_numpy(False)
    yield (
        some & ((marked != response) | (chosen == 0)),
        "sampled must mark each response token, at least one as true",
    )
    yield (
        response != scored,
        "response_ids and ref_logprobs differ in length; store log mu of each token",
    )
    for name, column in lists.items():
        low, high = (-LARGEST, 0) if name == "ref_logprobs" else (0, vocabulary - 1)
        values = column.flatten().to_numpy(zero_copy_only=False)  # a null becomes NaN
        rows = pc.list_parent_indices(column).to_numpy()[~((values >= low) & (values <= high))]
        bad = np.isin(np.arange(len(table)), rows)
        yield bad, f"{name} holds a value that is null or outside [{low:.0f}, {high}]"
    yield ~(np.abs(table["reward"]) <= LARGEST), f"the reward is NaN or beyond +-{LARGEST:.0f}"
    tokens, limit = (
        prompt + response,
        f"{max_tokens}, the policy's context or data.microbatch_tokens",
    )
    problem = f"prompt and response have up to {tokens.max()} tokens, more than {limit}"
    yield tokens > max_tokens, f"{problem}; raise data.microbatch_tokens or drop the row"


def agreed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The items that all dictionaries share."""
    return {
        key: value
        for key, value in entries[0].items()
        if all(entry.get(key) == value for entry in entries)
    }


def add_log_probs(policy: Any, trajectories: list[Trajectory], microbatch_tokens: int) -> None:
    """Score log mu of trajectories in place by a `Policy`, with the forward that trains."""
    from topr.policy import score

    prompts, responses = (
        [np.array(getattr(t, name)) for t in trajectories]
        for name in ("prompt_ids", "response_ids")
    )
    sampled = [None if t.sampled is None else np.array(t.sampled) for t in trajectories]
    found = score(policy, prompts, responses, microbatch_tokens, sampled)
    for trajectory, log_probs in zip(trajectories, found, strict=True):
        scores = np.zeros(len(trajectory.response_ids), dtype=np.float32)
        scores[slice(None) if trajectory.sampled is None else trajectory.sampled] = log_probs
        trajectory.ref_logprobs = scores.tolist()


def resolve_files(train: str | list[str], key: str = "data.train", rows: bool = False) -> list[str]:
    """Parquet files (with `rows`, sources of `load_rows`) of paths, globs, hub data sets, which errors call `key`."""
    files: list[str] = []
    for entry in [train] if isinstance(train, str) else train:
        # with `rows`, what is left is a hub data set, or load_rows reports it
        found = [entry] if os.path.isfile(entry) else sorted(glob.glob(entry)) or [entry] * rows
        if not found and re.fullmatch(r"[\w.-]+/[\w-]+", entry):
            from huggingface_hub import snapshot_download

            with suppress(OSError, ValueError):  # reported below
                folder = snapshot_download(entry, repo_type="dataset", allow_patterns="*.parquet")
                found = sorted(map(str, Path(folder).rglob("*.parquet")))
        if not found:
            raise InputError(
                f"{key}: {entry!r} is no file, glob or hub data set that can be read; {REMEDY}"
            )
        files += found
    if len(set(files)) < len(files):
        raise InputError(f"{key} names {max(files, key=files.count)} twice; give every file once")
    return files


def load_rows(
    source: str | Path, required: Types, optional: Types | None = None
) -> list[dict[str, Any]]:
    """Rows of JSON lines (.gz and .zst too), Parquet, or a hub data set written `owner/name[/config]:split`.
    Optional keys may be absent or null. Raises InputError for a row that lacks a key or holds another type."""
    hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?:(\w+(?:\[.*\])?)", str(source))
    expected = "JSON lines in UTF-8 (.gz and .zst too), Parquet, or a hub data set owner/name[/config]:split"
    with explained(f"{source} cannot be read", remedy=f"give {expected}"):
        if hub and not os.path.exists(source):
            import datasets

            rows = datasets.load_dataset(hub[1], hub[2], split=hub[3]).to_list()
        elif Path(source).suffix == ".parquet":
            rows = pq.read_table(source, page_checksum_verification=True).to_pylist()
        else:
            compression = {".gz": "gzip", ".zst": "zstd"}.get(Path(source).suffix)
            stream = pa.input_stream(pa.py_buffer(Path(source).read_bytes()), compression)
            lines = (
                io.TextIOWrapper(stream, encoding="utf-8-sig").read().split("\n")
            )  # a string may hold U+2028
            rows = json.loads("[" + ",\n".join(line for line in lines if line.strip()) + "]")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(
                f"{source}, row {number}: expected a JSON object, found {type(row).__name__}"
            )
        for key, types in (required | (optional or {})).items():
            if type(row.get(key)) not in types and (key in required or row.get(key) is not None):
                expected = " or ".join(accepted.__name__ for accepted in types)
                raise InputError(
                    f"{source}, row {number}: key {key!r} holds {row.get(key)!r:.40}, expected {expected}"
                )
    if not rows:
        raise InputError(f"{source} holds no row")
    return rows
