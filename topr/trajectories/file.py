"""The trajectory file: a frozen Parquet schema, validated when it is read, written atomically."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topr.io import InputError, atomic
from topr.trajectories.rows import open_parquet


@dataclass
class Trajectory:
    """One sampled response with its reward: a row of the file."""

    prompt_id: str
    group: str  # trajectories of one prompt in one iteration
    prompt: str
    prompt_ids: list[int]
    response: str
    response_ids: list[int]  # the ids that were sampled, a sampled end token included; never re-tokenised
    ref_logprobs: list[float]  # log mu of each response id at temperature 1 over the full vocabulary
    reward: float
    finished: bool  # an end token was sampled
    valid: bool | None = None
    answer: str | None = None
    gold: str | None = None


COLUMN_TYPES: dict[Any, pa.DataType] = {str: pa.string(), float: pa.float32(), bool: pa.bool_()}
COLUMN_TYPES |= {list[int]: pa.list_(pa.int32()), list[float]: pa.list_(pa.float32())}
COLUMN_TYPES |= {bool | None: pa.bool_(), str | None: pa.string()}
SCHEMA = pa.schema([pa.field(f.name, COLUMN_TYPES[f.type], nullable=f.default is None) for f in fields(Trajectory)])
SCHEMA_VERSION = 1
METADATA_KEYS = ("schema", "task", "tokenizer", "policy", "precision", "sampling", "iteration")  # each may be null


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory], metadata: dict[str, Any]) -> None:
    """Write a Parquet file atomically; `metadata` holds values of `METADATA_KEYS`, absent ones become null."""
    write_tables(path, [pa.Table.from_pylist(list(map(vars, trajectories)), SCHEMA)], metadata)


def write_tables(path: str | Path, tables: Iterable[pa.Table], metadata: dict[str, Any]) -> None:
    """`write_trajectories` for tables in the columns of `SCHEMA`."""
    known = {key: metadata.get(key) for key in METADATA_KEYS} | {"schema": SCHEMA_VERSION}
    table = pa.concat_tables(tables).cast(SCHEMA.with_metadata({"topr": json.dumps(known)}))
    with atomic(path) as temporary:
        pq.write_table(table, temporary, row_group_size=4096, compression="zstd", write_page_checksum=True)


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """All rows of a trajectory file; raises as `read_metadata` and `batches` do."""
    read_metadata(path)
    return [Trajectory(**row) for table in batches(path) for row in table.to_pylist()]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a trajectory file; raises an InputError unless it is a Parquet file of this schema."""
    with open_parquet(path) as file:
        columns = file.schema_arrow.empty_table().select(SCHEMA.names)  # pyarrow names a missing column
        columns.cast(SCHEMA)  # and a wrong type
        content = json.loads((file.metadata.metadata or {}).get(b"topr", b"{}"))
    if pa.types.is_boolean(columns["reward"].type):
        raise InputError(f"{path}: column 'reward' has type bool; write +1 and -1")
    metadata = {key: content.get(key) for key in METADATA_KEYS}
    if metadata["schema"] not in (None, SCHEMA_VERSION):
        raise InputError(f"{path} has schema {metadata['schema']}, expected {SCHEMA_VERSION}; import it again")
    return metadata


def validate(path: str | Path, vocabulary: int, max_tokens: int) -> None:
    """Check every row of a trajectory file; arguments and errors as those of `batches`."""
    for _ in batches(path, vocabulary, max_tokens):
        pass


def batches(path: str | Path, vocabulary: int = 2**31 - 1, max_tokens: int = 2**31 - 1) -> Iterator[pa.Table]:
    """Read a trajectory file in batches, cast to `SCHEMA` and checked; raises InputError, naming the first bad row."""
    start = 0
    with open_parquet(path) as file:
        for batch in file.iter_batches(batch_size=8192, columns=SCHEMA.names):
            table = pa.Table.from_batches([batch]).select(SCHEMA.names).cast(SCHEMA)
            for bad, problem in _checks(table, vocabulary, max_tokens):
                if bad.any():
                    row = int(np.argmax(bad))
                    raise InputError(f"{path}, row {start + row} (prompt '{table['prompt_id'][row]}'): {problem}")
            yield table
            start += len(table)
    if start == 0:
        raise InputError(f"{path} holds no trajectory; sample or import some first")


def _checks(table: pa.Table, vocabulary: int, max_tokens: int) -> Iterator[tuple[np.ndarray, str]]:
    """Each kind of problem: which rows have it, and a sentence on it."""
    from topr.losses import LARGEST

    lists = {name: table[name].combine_chunks() for name in ("prompt_ids", "response_ids", "ref_logprobs")}
    prompt, response, scored = (pc.list_value_length(column).to_numpy() for column in lists.values())
    yield prompt == 0, "prompt_ids is empty; a response needs a prompt of one token at least"
    yield response == 0, "the response is empty; drop the row or store its end token"
    yield response != scored, "response_ids and ref_logprobs differ in length; store log mu of each response token"
    for name, column in lists.items():
        low, high = (-LARGEST, 0) if name == "ref_logprobs" else (0, vocabulary - 1)
        values = column.flatten().to_numpy(zero_copy_only=False)  # a null becomes NaN
        rows = pc.list_parent_indices(column).to_numpy()[~((values >= low) & (values <= high))]
        yield np.isin(np.arange(len(table)), rows), f"{name} holds a value that is null or outside [{low:.0f}, {high}]"
    yield ~(np.abs(table["reward"]) <= LARGEST), f"the reward is NaN or beyond +-{LARGEST:.0f}"
    tokens, limit = prompt + response, f"{max_tokens}, the policy's context or data.microbatch_tokens"
    problem = f"prompt and response have up to {tokens.max()} tokens, more than {limit}"
    yield tokens > max_tokens, f"{problem}; raise data.microbatch_tokens or drop the row"


def agreed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The items that all dictionaries share."""
    return {key: value for key, value in entries[0].items() if all(entry.get(key) == value for entry in entries)}


def add_log_probs(policy: Any, trajectories: list[Trajectory], microbatch_tokens: int) -> None:
    """Score log mu of trajectories in place by a `Policy`, with the forward that trains."""
    from topr.policy import score

    prompts, responses = ([np.array(getattr(t, name)) for t in trajectories] for name in ("prompt_ids", "response_ids"))
    for trajectory, log_probs in zip(trajectories, score(policy, prompts, responses, microbatch_tokens), strict=True):
        trajectory.ref_logprobs = log_probs.tolist()
