"""The trajectory file: a fixed Parquet schema, validated when read, written atomically."""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topr.io import LARGEST, InputError, atomic, explained

REMEDY = "sample with `train.py predict` or convert with `topr.trajectories import`"


@dataclass
class Trajectory:
    """One sampled response with its reward: a row of the file."""

    prompt_id: str
    group: str  # trajectories of one prompt in one iteration
    prompt: str
    prompt_ids: list[int]
    response: str
    response_ids: list[int]  # all ids after the prompt, with the sampled end token
    ref_logprobs: list[float]  # log mu of each response id, temperature 1, full vocabulary
    reward: float
    finished: bool  # the end token was sampled
    valid: bool | None = None
    answer: str | None = None
    gold: str | None = None
    sampled: list[bool] | None = None  # false: a token of a user or a tool; None: all sampled


COLUMNS = {
    "prompt_id": pa.string(),
    "group": pa.string(),
    "prompt": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "response": pa.string(),
    "response_ids": pa.list_(pa.int32()),
    "ref_logprobs": pa.list_(pa.float32()),
    "reward": pa.float32(),
    "finished": pa.bool_(),
    "valid": pa.bool_(),
    "answer": pa.string(),
    "gold": pa.string(),
    "sampled": pa.list_(pa.bool_()),
}
NULLABLE = ("valid", "answer", "gold", "sampled")
SCHEMA = pa.schema([pa.field(name, COLUMNS[name], name in NULLABLE) for name in COLUMNS])
SCHEMA_VERSION = 1
METADATA_KEYS = ("schema", "task", "tokenizer", "policy", "precision", "sampling", "iteration")


def write_trajectories(
    path: str | Path, trajectories: Iterable[Trajectory], metadata: dict[str, Any]
) -> None:
    """Write a trajectory file atomically. Absent `METADATA_KEYS` become null."""
    rows = [vars(trajectory) for trajectory in trajectories]
    write_tables(path, [pa.Table.from_pylist(rows, SCHEMA)], metadata)


def write_tables(path: str | Path, tables: Iterable[pa.Table], metadata: dict[str, Any]) -> None:
    """`write_trajectories` for tables with the columns of `SCHEMA`."""
    known = {key: metadata.get(key) for key in METADATA_KEYS}
    known["schema"] = SCHEMA_VERSION
    table = _with_schema(pa.concat_tables(tables))
    if table["sampled"].null_count == len(table):  # the column is written for conversations only
        table = table.drop_columns("sampled")
    table = table.replace_schema_metadata({"topr": json.dumps(known)})
    with atomic(path) as temporary:
        pq.write_table(
            table, temporary, row_group_size=4096, compression="zstd", write_page_checksum=True
        )


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """All rows of a trajectory file. Raises an InputError as `read_metadata` and `batches` do."""
    read_metadata(path)
    return [Trajectory(**row) for table in batches(path) for row in table.to_pylist()]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Metadata by `METADATA_KEYS`. Raises an InputError unless it is a trajectory file."""
    with _open(path) as file:
        _with_schema(file.schema_arrow.empty_table())  # pyarrow names a missing or wrong column
        boolean = pa.types.is_boolean(file.schema_arrow.field("reward").type)
        metadata = json.loads((file.metadata.metadata or {}).get(b"topr", b"{}"))
    if boolean:  # false would become 0, which is no negative
        raise InputError(f"{path}: column 'reward' has type bool; write +1 and -1")
    version = metadata.get("schema")
    if version not in (None, SCHEMA_VERSION):
        raise InputError(f"{path} has schema {version}, expected {SCHEMA_VERSION}; import it again")
    return {key: metadata.get(key) for key in METADATA_KEYS}


def batches(
    path: str | Path, vocabulary: int = 2**31 - 1, max_tokens: int = 2**31 - 1
) -> Iterator[pa.Table]:
    """Read a trajectory file in tables of `SCHEMA`.

    Args:
        path: trajectory file.
        vocabulary: number of token ids of the policy.
        max_tokens: longest prompt and response together.

    Raises:
        InputError: for the first bad row, or if there is no row.
    """
    start = 0
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=8192, columns=SCHEMA.names):
            table = _with_schema(pa.Table.from_batches([batch]))
            _check_rows(table, path, start, vocabulary, max_tokens)
            yield table
            start += len(table)
    if start == 0:
        raise InputError(f"{path} holds no trajectory; {REMEDY}")


@contextmanager
def _open(path: str | Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; errors of pyarrow, also while its rows are read, become InputErrors."""
    errors = (OSError, ValueError, KeyError, pa.ArrowException)
    with explained(f"{path} cannot be read", errors, REMEDY):  # noqa: SIM117
        with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
            yield file


def _with_schema(table: pa.Table) -> pa.Table:
    """The table's columns cast to `SCHEMA`; only `sampled` may be missing."""
    if "sampled" not in table.column_names:
        table = table.append_column("sampled", pa.nulls(len(table)))
    return table.select(SCHEMA.names).cast(SCHEMA)


def _check_rows(
    table: pa.Table, path: str | Path, start: int, vocabulary: int, max_tokens: int
) -> None:
    """Raise an InputError for the first problem of a table, which begins at the row `start`."""

    def require(ok: np.ndarray, problem: str) -> None:
        if not ok.all():
            row = int(np.argmin(ok))
            prompt_id = table["prompt_id"][row]
            raise InputError(f"{path}, row {start + row} (prompt '{prompt_id}'): {problem}")

    prompt_length = pc.list_value_length(table["prompt_ids"]).to_numpy()
    response_length = pc.list_value_length(table["response_ids"]).to_numpy()
    scored_length = pc.list_value_length(table["ref_logprobs"]).to_numpy()
    require(prompt_length > 0, "prompt_ids is empty")
    require(response_length > 0, "the response is empty; drop the row or store its end token")
    require(
        response_length == scored_length,
        "response_ids and ref_logprobs differ in length; store log mu of each token",
    )
    for name, low, high in (
        ("prompt_ids", 0, vocabulary - 1),
        ("response_ids", 0, vocabulary - 1),
        ("ref_logprobs", -LARGEST, 0),
    ):
        ok = _all_within(table[name], low, high)
        require(ok, f"{name} holds a value that is null or outside [{low:.0f}, {high}]")
    ok = _marks_fit(table["sampled"], response_length)
    require(ok, "sampled must mark each response token, at least one as true")
    reward = table["reward"].to_numpy()
    require(np.abs(reward) <= LARGEST, f"the reward is NaN or beyond +-{LARGEST:.0f}")
    tokens = prompt_length + response_length
    limit = f"{max_tokens} (data.microbatch_tokens or the policy's context)"
    require(tokens <= max_tokens, f"holds up to {tokens.max()} tokens, more than {limit}")


def _all_within(lists: pa.ChunkedArray, low: float, high: float) -> np.ndarray:
    """For each row, whether its values all lie in [low, high]; NaN and null do not."""
    lists = lists.combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False)  # null becomes NaN
    bad = ~((values >= low) & (values <= high))
    rows_of_bad = pc.list_parent_indices(lists).to_numpy()[bad]
    return np.bincount(rows_of_bad, minlength=len(lists)) == 0


def _marks_fit(sampled: pa.ChunkedArray, length: np.ndarray) -> np.ndarray:
    """For each row, whether `sampled` is null, or holds `length` marks, at least one true."""
    sampled = sampled.combine_chunks()
    marks = sampled.flatten()
    rows = pc.list_parent_indices(sampled).to_numpy()
    known = np.bincount(rows, marks.is_valid().to_numpy(False), len(length))
    true = np.bincount(rows, marks.fill_null(False).to_numpy(False), len(length))
    return sampled.is_null().to_numpy(False) | ((known == length) & (true > 0))


def resolve_files(entries: str | list[str], key: str = "data.train") -> list[str]:
    """Trajectory files of paths, globs and hub data sets; `key` names the argument in errors."""
    files: list[str] = []
    for entry in [entries] if isinstance(entries, str) else entries:
        found = [entry] if os.path.isfile(entry) else sorted(glob.glob(entry))
        if not found and re.fullmatch(r"[\w.-]+/[\w-]+", entry):
            from huggingface_hub import snapshot_download

            with suppress(OSError, ValueError):  # reported below
                folder = snapshot_download(entry, repo_type="dataset", allow_patterns="*.parquet")
                found = sorted(str(path) for path in Path(folder).rglob("*.parquet"))
        if not found:
            raise InputError(f"{key}: {entry!r} is no file, glob or hub data set; {REMEDY}")
        files += found
    refuse_twice(files, key)
    return files


def refuse_twice(files: list[str], key: str) -> None:
    """Raise an InputError if a file is named twice."""
    if len(set(files)) < len(files):
        raise InputError(f"{key} names {max(files, key=files.count)} twice; give every file once")
