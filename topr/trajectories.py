"""The trajectory file: a frozen Parquet schema, validated on load, written atomically.

python -m topr.trajectories import FILE --policy DIR --out FILE.parquet
python -m topr.trajectories inspect FILE.parquet
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import nn

from topr.io import ArgumentParser, InputError, atomic, check_counts, check_folder, command, first_line
from topr.logprobs import score
from topr.losses import LARGEST
from topr.rows import load_json, open_parquet, resolve_files

SCHEMA_VERSION = 1
ROW_GROUP = 4096
SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response", pa.string(), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("ref_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("finished", pa.bool_(), nullable=False),
        pa.field("valid", pa.bool_()),
        pa.field("answer", pa.string()),
        pa.field("gold", pa.string()),
    ]
)
METADATA_KEYS = {  # what each may hold beside null
    "schema": int,
    "task": str,
    "tokenizer": str,
    "policy": str,
    "precision": str,
    "sampling": dict,
    "iteration": int,
}
REMEDY = "python -m topr.trajectories import makes trajectory files from text"


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


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory], metadata: dict[str, Any]) -> None:
    """Write a Parquet file atomically, row group by row group.

    Args:
        path: the file.
        trajectories: the rows.
        metadata: values of `METADATA_KEYS` beside `schema`; absent ones become null.
    """
    rows = map(asdict, trajectories)
    parts = iter(lambda: list(islice(rows, ROW_GROUP)), [])
    write_tables(path, (pa.Table.from_pylist(part, SCHEMA) for part in parts), metadata)


def write_tables(path: str | Path, tables: Iterable[pa.Table], metadata: dict[str, Any]) -> None:
    """`write_trajectories` for rows that are tables in the columns of `SCHEMA`; small ones share a row group."""
    known = {key: metadata.get(key) for key in METADATA_KEYS} | {"schema": SCHEMA_VERSION}
    schema = SCHEMA.with_metadata({"topr": json.dumps(known)})
    how = {"compression": "zstd", "write_page_checksum": True}
    with atomic(path) as temporary, pq.ParquetWriter(temporary, schema, **how) as writer:
        waiting = [schema.empty_table()]
        for table in tables:
            waiting.append(pa.Table.from_arrays(table.columns, schema=schema))
            if sum(map(len, waiting)) >= ROW_GROUP:
                writer.write_table(pa.concat_tables(waiting))
                waiting = [schema.empty_table()]
        writer.write_table(pa.concat_tables(waiting))


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """All rows of a trajectory file, which must fit into memory; training maps files instead.

    Raises:
        InputError: see `read_metadata` and `batches`.
    """
    read_metadata(path)
    return [Trajectory(**row) for table in batches(path) for row in table.to_pylist()]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The file's metadata after a check of format, schema version and columns.

    Raises:
        InputError: the file is no Parquet file of this schema.
    """
    with open_parquet(path, REMEDY) as file:
        # the file keeps its metadata twice, beside the schema and within Arrow's own
        schema, texts = file.schema_arrow, (file.metadata.metadata, file.schema_arrow.metadata)
    for field in SCHEMA:
        if schema.names.count(field.name) != 1:
            raise InputError(
                f"{path}: column {field.name!r} {'stands twice' if field.name in schema.names else 'is missing'}; a "
                f"trajectory file has the columns {', '.join(SCHEMA.names)} ({REMEDY})"
            )
        if not _same_kind(schema.field(field.name).type, field.type):
            raise InputError(
                f"{path}: column {field.name!r} has type {schema.field(field.name).type}, expected {field.type}"
                + ("; write +1 and -1" if field.name == "reward" else "")
            )
    try:
        first, second = (load_json((text or {}).get(b"topr", b"{}").decode()) for text in texts)
        metadata = {key: first.get(key) for key in METADATA_KEYS}
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: the metadata key 'topr' holds no JSON object ({error})") from error
    if first != second:
        raise InputError(f"{path} is damaged: it keeps its metadata twice, and the two differ; take another copy of it")
    for key, value in metadata.items():
        if value is not None and type(value) is not METADATA_KEYS[key]:
            raise InputError(
                f"{path}: the metadata key 'topr' holds {key} = {value!r:.50}, expected {METADATA_KEYS[key].__name__}"
            )
    if metadata["schema"] not in (None, SCHEMA_VERSION):
        raise InputError(
            f"{path} has trajectory schema {metadata['schema']}, this version reads {SCHEMA_VERSION}; write it anew"
        )
    return metadata


def validate(path: str | Path, vocabulary: int, max_tokens: int) -> None:
    """Check every row of a trajectory file; arguments and errors as those of `batches`."""
    for _ in batches(path, vocabulary, max_tokens):
        pass


def batches(path: str | Path, vocabulary: int = 2**31 - 1, max_tokens: int = 2**31 - 1) -> Iterator[pa.Table]:
    """The rows of a trajectory file in the types of `SCHEMA`, a batch at a time, every row checked.

    Args:
        path: the file, whose columns `read_metadata` accepted.
        vocabulary: ids must lie in [0, vocabulary).
        max_tokens: bound on the prompt + response tokens of one trajectory.

    Raises:
        InputError: the first bad row, by number and prompt.
    """
    row = 0
    with open_parquet(path, REMEDY) as file:
        for batch in file.iter_batches(batch_size=8192, columns=SCHEMA.names):
            try:
                table = pa.Table.from_batches([batch]).cast(pa.schema([field.with_nullable(True) for field in SCHEMA]))
            except pa.ArrowException as error:
                raise InputError(f"{path}, rows {row} to {row + len(batch) - 1}: {first_line(error)}") from error
            for index, problem in _problems(table, vocabulary, max_tokens):
                prompt_id = table["prompt_id"][index].as_py()
                raise InputError(f"{path}, row {row + index} (prompt {prompt_id!r}): {problem}")
            yield table
            row += len(batch)
    if row == 0:
        raise InputError(f"{path} holds no trajectory; sample or import some first")


def _problems(table: pa.Table, vocabulary: int, max_tokens: int) -> Iterator[tuple[int, str]]:
    """(row, problem) of the first bad row for each kind of problem."""

    def first(bad: np.ndarray, problem: str) -> Iterator[tuple[int, str]]:
        if bad.any():
            yield int(np.argmax(bad)), problem

    for field in SCHEMA:
        if not field.nullable:
            yield from first(table[field.name].is_null().to_numpy(), f"{field.name} is null")
    columns = {name: table[name].combine_chunks() for name in ("prompt_ids", "response_ids", "ref_logprobs")}
    length = {name: pc.list_value_length(column).to_numpy() for name, column in columns.items()}
    yield from first(length["prompt_ids"] == 0, "prompt_ids is empty; a response needs a prompt of one token at least")
    yield from first(length["response_ids"] == 0, "the response is empty; drop the row or store its end token")
    yield from first(
        length["response_ids"] != length["ref_logprobs"],
        "response_ids and ref_logprobs differ in length; each response token needs its log-prob under mu",
    )
    for name, column in columns.items():
        flat = column.flatten()
        null = flat.is_null().to_numpy(zero_copy_only=False)
        values = flat.fill_null(0).to_numpy(zero_copy_only=False)
        if name == "ref_logprobs":
            wrong = null | ~((values <= 0) & (values >= -LARGEST))
            expected = f"a log-prob that is null, NaN, positive or below {-LARGEST:.0f}; score the responses again"
        else:
            wrong = null | (values < 0) | (values >= vocabulary)
            expected = f"an id that is null or outside the policy's vocabulary of {vocabulary}"
        if wrong.any():
            yield int(np.searchsorted(np.cumsum(length[name]), np.argmax(wrong), "right")), f"{name} holds {expected}"
    yield from first(
        ~(np.abs(table["reward"].to_numpy()) <= LARGEST), f"the reward is NaN or infinite, or beyond +-{LARGEST:.0f}"
    )
    tokens = length["prompt_ids"] + length["response_ids"]
    if (tokens > max_tokens).any():
        index = int(np.argmax(tokens > max_tokens))
        yield (
            index,
            f"prompt and response are {tokens[index]} tokens long, more than data.microbatch_tokens or the policy's "
            f"context allow ({max_tokens}); raise data.microbatch_tokens or drop the row",
        )


def _same_kind(found: pa.DataType, expected: pa.DataType) -> bool:
    """Whether a column can be cast without changing its meaning: another width of integer or float is welcome."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    if pa.types.is_floating(expected) and pa.types.is_integer(found):
        return True
    if pa.types.is_list(expected):
        return (pa.types.is_list(found) or pa.types.is_large_list(found)) and _same_kind(
            found.value_type, expected.value_type
        )
    if pa.types.is_string(expected):
        return pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_null(found)
    return any(kind(found) and kind(expected) for kind in kinds) or pa.types.is_null(found)


def add_log_probs(model: nn.Module, trajectories: list[Trajectory], microbatch_tokens: int) -> None:
    """Score log mu of trajectories in place, by the forward that trains."""
    prompts, responses = ([np.array(getattr(t, name)) for t in trajectories] for name in ("prompt_ids", "response_ids"))
    for trajectory, log_probs in zip(trajectories, score(model, prompts, responses, microbatch_tokens), strict=True):
        trajectory.ref_logprobs = log_probs.tolist()


def main() -> None:
    parser = ArgumentParser(prog="python -m topr.trajectories", description="Make and read trajectory files.")
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("import", help="tokenise and score responses that have rewards")
    convert.add_argument("file", help="JSON lines, Parquet, or a hub data set owner/name[/config]:split")
    convert.add_argument("--policy", required=True, help="folder or hub name: its tokenizer and its log-probs as mu")
    convert.add_argument("--out", required=True, help="Parquet file to write")
    convert.add_argument("--microbatch-tokens", type=int, default=16384, help="tokens of one forward")
    convert.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true", help="of the scoring")
    inspect = commands.add_parser("inspect", help="report on trajectory files and show samples")
    inspect.add_argument("files", nargs="+", help="trajectory files, taken as one; globs are welcome")
    inspect.add_argument("--samples", type=int, default=1, help="trajectories to show of each sign")
    with command():
        args = parser.parse_args()
        from topr.report import report, samples  # these need what this file defines

        if args.command == "inspect":
            check_counts("--", 0, samples=args.samples)
            files = resolve_files(args.files, "inspect")
            print(report(files), *samples(files, args.samples), sep="\n\n")
            return
        from topr.importing import import_file

        same = os.path.exists(args.out) and os.path.exists(args.file) and os.path.samefile(args.out, args.file)
        if os.path.isdir(args.out or ".") or same:
            raise InputError(f"--out {args.out} is a folder or the input itself; name a Parquet file of its own")
        check_folder("--out: the folder", Path(args.out).parent)
        check_counts("--", microbatch_tokens=args.microbatch_tokens)
        left_out = import_file(args.file, args.policy, args.out, args.microbatch_tokens, args.precision)
        print(report([args.out]))
        print(f"wrote {args.out}" + (f"; left out as too long: {left_out:,}" if left_out else ""))


if __name__ == "__main__":
    main()
