"""The trajectory file: a fixed Parquet schema, validated when read, written atomically."""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


IDS = pa.list_(pa.int32())
COLUMNS = {
    "prompt_id": "string",
    "group": "string",
    "prompt": "string",
    "prompt_ids": IDS,
    "response": "string",
    "response_ids": IDS,
    "ref_logprobs": pa.list_(pa.float32()),
    "reward": "float",
    "finished": "bool",
    "valid": "bool",
    "answer": "string",
    "gold": "string",
    "sampled": pa.list_(pa.bool_()),
}
NULLABLE = ("valid", "answer", "gold", "sampled")
SCHEMA = pa.schema([pa.field(name, kind, name in NULLABLE) for name, kind in COLUMNS.items()])
SCHEMA_VERSION = 1
METADATA_KEYS = ("schema", "task", "tokenizer", "policy", "precision", "sampling", "iteration")


def write_trajectories(
    path: str | Path, trajectories: Iterable[Trajectory], metadata: dict[str, Any]
) -> None:
    """Write a trajectory file atomically. Absent `METADATA_KEYS` become null."""
    rows = [vars(trajectory) for trajectory in trajectories]
    write_table(path, pa.Table.from_pylist(rows, SCHEMA), metadata)


def write_table(path: str | Path, table: pa.Table, metadata: dict[str, Any]) -> None:
    """`write_trajectories` for a table with the columns of `SCHEMA`."""
    known = {key: metadata.get(key) for key in METADATA_KEYS}
    known["schema"] = SCHEMA_VERSION
    table = _with_schema(table)
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
    path: str | Path, vocabulary: int = 2**31, max_tokens: int = 2**31
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
            for problem, good in _checks(table, vocabulary, max_tokens).items():
                if not good.all():
                    row = int(np.argmin(good))
                    prompt = table["prompt_id"][row]
                    raise InputError(f"{path}, row {start + row} (prompt '{prompt}'): {problem}")
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


def _checks(table: pa.Table, vocabulary: int, max_tokens: int) -> dict[str, np.ndarray]:
    """What may be wrong with a row, and for each row whether it is right."""
    prompt, response, scored = (
        pc.list_value_length(table[name]).to_numpy()
        for name in ("prompt_ids", "response_ids", "ref_logprobs")
    )
    prompt_known = _count_within(table["prompt_ids"], 0, vocabulary - 1)
    response_known = _count_within(table["response_ids"], 0, vocabulary - 1)
    sampled = table["sampled"]
    all_marked = _count_within(sampled, 0, 1) == response
    marks_fit = all_marked & (_count_within(sampled, 1, 1) > 0)
    ids = f"holds an id that is null or outside [0, {vocabulary - 1}]"
    limit = f"{max_tokens} (data.microbatch_tokens or the policy's context)"
    return {
        "prompt_ids is empty": prompt > 0,
        "the response is empty; drop the row or store its end token": response > 0,
        "response_ids and ref_logprobs differ in length": response == scored,
        f"prompt_ids {ids}": prompt_known == prompt,
        f"response_ids {ids}": response_known == response,
        f"ref_logprobs must be numbers from {-LARGEST:.0f} to 0": scored
        == _count_within(table["ref_logprobs"], -LARGEST, 0),
        "sampled must mark each response token, at least one as true": marks_fit
        | sampled.is_null().to_numpy(),
        f"the reward is NaN or beyond +-{LARGEST:.0f}": abs(table["reward"].to_numpy()) <= LARGEST,
        f"it holds more tokens than {limit}": prompt + response <= max_tokens,
    }


def _count_within(lists: pa.ChunkedArray, low: float, high: float) -> np.ndarray:
    """For each row, how many of its values lie in [low, high]; NaN and null do not."""
    lists = lists.combine_chunks()
    values = lists.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False)  # null becomes NaN
    rows = pc.list_parent_indices(lists).to_numpy()
    return np.bincount(rows, (values >= low) & (values <= high), len(lists))


def expand_globs(entries: list[str], key: str) -> list[str]:
    """Entries with globs expanded; an InputError, in which `key` names the argument, for one that
    is named twice."""
    files: list[str] = []
    for entry in entries:
        found = [] if os.path.exists(entry) else sorted(glob.glob(entry))
        files += found or [entry]
    if len(set(files)) < len(files):
        raise InputError(f"{key} names {max(files, key=files.count)} twice; give every file once")
    return files


def resolve_files(entries: str | list[str], key: str = "data.train") -> list[str]:
    """Trajectory files of paths, globs and hub data sets; `key` names the argument in errors."""
    files: list[str] = []
    for entry in expand_globs([entries] if isinstance(entries, str) else entries, key):
        files += [entry] if os.path.isfile(entry) else _download(entry, key)
    return files


def _download(name: str, key: str) -> list[str]:
    """The Parquet files of a hub data set."""
    files: list[str] = []
    what = f"{key}: {name!r} is no file, glob or hub data set"
    if re.fullmatch(r"[\w.-]+/[\w-]+", name):
        from huggingface_hub import snapshot_download

        with explained(what, (OSError, ValueError), REMEDY):
            folder = snapshot_download(name, repo_type="dataset", allow_patterns="*.parquet")
        files = sorted(map(str, Path(folder).rglob("*.parquet")))
    if not files:
        raise InputError(f"{what}; {REMEDY}")
    return files
