"""The trajectory file: a fixed Parquet schema, validated when read, written atomically."""

import glob
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topr.io import LARGEST, InputError, StrPath, atomic, explained

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
    ref_logprobs: list[float]  # log mu of each response id, temperature 1, full vocabulary; or []
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


def write_trajectories(path: StrPath, trajectories: Iterable[Trajectory], metadata: dict):
    """Write a trajectory file atomically, with metadata of `METADATA_KEYS`."""
    write_table(path, pa.Table.from_pylist([vars(t) for t in trajectories], SCHEMA), metadata)


def write_table(path: StrPath, table: pa.Table, metadata: dict):
    """`write_trajectories` for a table of `SCHEMA`."""
    described = table.replace_schema_metadata(
        {"topr": json.dumps(metadata | {"schema": SCHEMA_VERSION})}
    )
    with atomic(path) as temporary:
        pq.write_table(described, temporary, compression="zstd", write_page_checksum=True)


def read_trajectories(path: StrPath) -> list[Trajectory]:
    """All rows of a trajectory file. Raises an InputError as `read_table` does."""
    return [Trajectory(**row) for row in read_table(path).to_pylist()]


def read_metadata(path: StrPath) -> dict:
    """Metadata by `METADATA_KEYS`, None where unknown. Raises an InputError if the file is no
    Parquet file."""
    with explained(f"{path} cannot be read", remedy=REMEDY):
        stored = pq.read_schema(path).metadata or {}
        return dict.fromkeys(METADATA_KEYS) | json.loads(stored.get(b"topr", b"{}"))


def read_table(path: StrPath, vocabulary: int = 2**31, max_tokens: int = 2**31) -> pa.Table:
    """Read a trajectory file as a table of `SCHEMA`, and check every row.

    Args:
        path: trajectory file.
        vocabulary: number of token ids of the policy.
        max_tokens: longest prompt and response together.

    Raises:
        InputError: for the first bad row, or if there is no row.
    """
    nullable = pa.schema([field.with_nullable(True) for field in SCHEMA])
    with explained(f"{path} cannot be read", remedy=REMEDY):
        # null in the place of a missing column; the cast raises an error for a null
        table = pq.read_table(path, schema=nullable, page_checksum_verification=True)
        table = table.cast(SCHEMA)
    if len(table) == 0:
        raise InputError(f"{path} holds no trajectory", REMEDY)
    for problem, bad in _problems(table, vocabulary, max_tokens).items():
        if bad.any():
            raise InputError(f"{path}, row {np.argmax(bad)}: {problem}")
    return table


def _problems(table: pa.Table, vocabulary: int, max_tokens: int) -> dict:
    """What may be wrong with a row, and the rows with which it is."""
    prompt, response, scored, marked = (
        pc.list_value_length(table[name]).to_numpy()
        for name in ("prompt_ids", "response_ids", "ref_logprobs", "sampled")
    )
    conversation = marked >= 0  # NaN if all tokens were sampled
    uneven = (scored > 0) & (response != scored) | conversation & (response != marked)
    unknown_id = _outside(table["prompt_ids"], 0, vocabulary - 1)
    unknown_id |= _outside(table["response_ids"], 0, vocabulary - 1)
    unusable_reward = ~(abs(table["reward"].to_numpy()) <= LARGEST)
    limit = f"{max_tokens} (data.microbatch_tokens or the policy's context)"
    return {
        "the prompt or the response is empty; drop the row": (prompt == 0) | (response == 0),
        "response_ids, ref_logprobs and sampled differ in length": uneven,
        "no token is marked as sampled; drop the row": (
            conversation & ~_outside(table["sampled"], 0, 0)
        ),
        f"an id is null or outside [0, {vocabulary - 1}]": unknown_id,
        "ref_logprobs must be numbers from -1000000 to 0": _outside(
            table["ref_logprobs"], -LARGEST, 0
        ),
        f"the reward is NaN or beyond +-{LARGEST:.0f}": unusable_reward,
        f"it holds more tokens than {limit}": prompt + response > max_tokens,
    }


def _outside(lists: pa.ChunkedArray, low: float, high: float) -> np.ndarray:
    """Whether any value of a row is outside [low, high], NaN or null."""
    values = pc.list_flatten(lists).cast(pa.float64()).to_numpy()  # null becomes NaN
    row_of_value = pc.list_parent_indices(lists).to_numpy()
    inside = (values >= low) & (values <= high)
    return np.bincount(row_of_value, ~inside, len(lists)) > 0


def expand_globs(entries: list[str]) -> list[str]:
    """The files that globs match; other entries as they are."""
    files = []
    for entry in entries:
        files += sorted(glob.glob(entry)) or [entry]
    return files


def resolve_files(entries: str | list[str]) -> list[str]:
    """Trajectory files of paths, globs and hub data sets."""
    files = []
    for entry in expand_globs([entries] if isinstance(entries, str) else entries):
        if Path(entry).is_file():
            files.append(entry)
            continue
        from huggingface_hub import snapshot_download

        with explained(f"{entry!r} is no file, glob or hub data set", remedy=REMEDY):
            folder = snapshot_download(entry, repo_type="dataset", allow_patterns="*.parquet")
        files += sorted(map(str, Path(folder).rglob("*.parquet")))
    if not files:
        raise InputError(f"{entries} holds no Parquet file", REMEDY)
    return files
