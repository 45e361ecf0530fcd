"""The trajectory file: a frozen Parquet schema, validated on load, written atomically; import of users' files.

    python -m topr.trajectories import FILE.jsonl --policy DIR --out FILE.parquet
"""

import argparse
import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topr.io import InputError, atomic, command
from topr.losses import advantage_share

SCHEMA_VERSION = 1
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
METADATA_KEYS = ("schema", "task", "tokenizer", "policy", "precision", "sampling", "iteration")


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
    known = {key: metadata.get(key) for key in METADATA_KEYS} | {"schema": SCHEMA_VERSION}
    schema = SCHEMA.with_metadata({"topr": json.dumps(known)})
    with atomic(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        rows: list[dict] = []
        for trajectory in trajectories:
            rows.append(asdict(trajectory))
            if len(rows) == 4096:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema))


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The file's metadata after a check of format, schema version and columns.

    Raises:
        InputError: the file is no Parquet file of this schema.
    """
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} is no readable Parquet file ({str(error).splitlines()[0]})") from error
    for field in SCHEMA:
        if field.name not in schema.names:
            raise InputError(
                f"{path}: column {field.name!r} is missing; a trajectory file has the columns {', '.join(SCHEMA.names)}"
                " (python -m topr.trajectories import makes one from text)"
            )
        if not _same_kind(schema.field(field.name).type, field.type):
            raise InputError(
                f"{path}: column {field.name!r} has type {schema.field(field.name).type}, expected {field.type}"
            )
    try:
        metadata = json.loads((schema.metadata or {}).get(b"topr", b"{}"))
        metadata = {key: metadata.get(key) for key in METADATA_KEYS}
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: the metadata key 'topr' holds no JSON object ({error})") from error
    if metadata["schema"] not in (None, SCHEMA_VERSION):
        raise InputError(
            f"{path} has trajectory schema {metadata['schema']}, this version reads {SCHEMA_VERSION}; write it anew"
        )
    return metadata


def validate(path: str | Path, vocabulary: int, max_tokens: int) -> None:
    """Check every row of a trajectory file, a batch at a time.

    Args:
        path: the file, whose columns `read_metadata` accepted.
        vocabulary: ids must lie in [0, vocabulary).
        max_tokens: bound on the prompt + response tokens of one trajectory.

    Raises:
        InputError: the first bad row, by number and prompt.
    """
    row = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=8192, columns=SCHEMA.names):
        try:
            table = pa.Table.from_batches([batch]).cast(pa.schema([field.with_nullable(True) for field in SCHEMA]))
        except pa.ArrowException as error:
            raise InputError(f"{path}, rows {row} to {row + len(batch) - 1}: {str(error).splitlines()[0]}") from error
        for index, problem in _problems(table, vocabulary, max_tokens):
            prompt_id = table["prompt_id"][index].as_py()
            raise InputError(f"{path}, row {row + index} (prompt {prompt_id!r}): {problem}")
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
        owner, flat = np.repeat(np.arange(len(table)), length[name]), column.flatten()
        null = flat.is_null().to_numpy(zero_copy_only=False)
        values = flat.fill_null(0).to_numpy(zero_copy_only=False)
        if name == "ref_logprobs":
            wrong = null | ~np.isfinite(values) | (values > 0)
            expected = "a log-prob that is null, NaN, infinite or positive; score the responses again"
        else:
            wrong = null | (values < 0) | (values >= vocabulary)
            expected = f"an id that is null or outside the policy's vocabulary of {vocabulary}"
        if wrong.any():
            yield int(owner[np.argmax(wrong)]), f"{name} holds {expected}"
    yield from first(~np.isfinite(table["reward"].to_numpy()), "the reward is NaN or infinite")
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
    if pa.types.is_list(expected):
        return (pa.types.is_list(found) or pa.types.is_large_list(found)) and _same_kind(
            found.value_type, expected.value_type
        )
    if pa.types.is_string(expected):
        return pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_null(found)
    return any(kind(found) and kind(expected) for kind in kinds) or pa.types.is_null(found)


def resolve_files(train: str | list[str]) -> list[str]:
    """Parquet files from a path, a glob, a hub data set's name, or a list of them, sorted within each entry.

    Raises:
        InputError: an entry names no file.
    """
    files: list[str] = []
    for entry in [train] if isinstance(train, str) else train:
        found = sorted(glob.glob(entry)) if glob.has_magic(entry) else [entry] if Path(entry).is_file() else []
        if not found and entry.count("/") == 1 and not Path(entry).suffix and not glob.has_magic(entry):
            from huggingface_hub import snapshot_download

            try:
                folder = snapshot_download(entry, repo_type="dataset", allow_patterns="*.parquet")
                found = sorted(map(str, Path(folder).rglob("*.parquet")))
            except (OSError, ValueError):
                found = []  # told below, like any other name that leads nowhere
        if not found:
            raise InputError(
                f"data.train: {entry!r} is no file, glob or hub data set that can be read; give trajectory Parquet "
                "files (train.py predict samples them, python -m topr.trajectories import converts text)"
            )
        files += found
    return files


def load_jsonl(path: str | Path, required: dict[str, tuple[type, ...]]) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, each an object whose `required` keys have one of the given types.

    Raises:
        InputError: the file or a line is not that, named by its number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as JSON lines: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
        for key, types in required.items():
            if not isinstance(row.get(key), types):
                names = " or ".join(kind.__name__ for kind in types)
                found = f"{type(row[key]).__name__}" if key in row else "nothing"
                raise InputError(f"{path}, line {number}: key {key!r} must hold {names}, found {found}")
        rows.append(row)
    if not rows:
        raise InputError(f"{path} holds no line")
    return rows


def import_jsonl(path: str | Path, policy: str, out: str | Path, microbatch_tokens: int) -> list[Trajectory]:
    """Tokenise `{prompt, response, reward}` lines with the policy's tokenizer and score log mu with its forward.

    The prompt is tokenised with special tokens, the response without; `finished` (default true) appends the end
    token and trains it. Boolean rewards become +-1. `prompt_id`, `group`, `valid`, `answer` and `gold` are kept.

    Raises:
        InputError: a line is malformed, empty, or longer than the policy's context.
    """
    from topr.logprobs import score
    from topr.policy import load_policy, load_tokenizer, policy_fingerprint, tokenizer_fingerprint

    rows = load_jsonl(path, {"prompt": (str,), "response": (str,), "reward": (bool, int, float)})
    tokenizer, trajectories = load_tokenizer(policy), []
    ids: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        prompt_ids = tokenizer(row["prompt"])["input_ids"]
        finished = row.get("finished", True)
        response_ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        response_ids += [tokenizer.eos_token_id] if finished else []
        reward = float(row["reward"]) if not isinstance(row["reward"], bool) else 2.0 * row["reward"] - 1
        if not (prompt_ids and response_ids and np.isfinite(reward)):
            raise InputError(f"{path}, entry {number}: prompt, response or reward is empty or not finite")
        prompt_id = str(row.get("prompt_id", ids.setdefault(row["prompt"], str(len(ids)))))
        trajectories.append(
            Trajectory(
                prompt_id=prompt_id,
                group=str(row.get("group", prompt_id)),
                prompt=row["prompt"],
                prompt_ids=prompt_ids,
                response=row["response"],
                response_ids=response_ids,
                ref_logprobs=[],
                reward=reward,
                finished=finished,
                **{key: row.get(key) for key in ("valid", "answer", "gold")},
            )
        )
    model = load_policy(policy)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", microbatch_tokens)
    for number, trajectory in enumerate(trajectories, start=1):
        length = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        if length > min(context, microbatch_tokens):
            raise InputError(
                f"{path}, entry {number}: {length} tokens are more than the policy's context of {context} or "
                f"--microbatch-tokens {microbatch_tokens}; drop the entry or raise the bound"
            )
    prompts, responses = ([np.array(getattr(t, name)) for t in trajectories] for name in ("prompt_ids", "response_ids"))
    for trajectory, log_probs in zip(trajectories, score(model, prompts, responses, microbatch_tokens), strict=True):
        trajectory.ref_logprobs = log_probs.tolist()
    metadata = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "policy": policy_fingerprint(policy),
        "precision": "32-true",
    }
    write_trajectories(out, trajectories, metadata)
    return trajectories


def report(trajectories: list[Trajectory]) -> str:
    """Counts, lengths, rewards and log-probs of trajectories, one line each."""
    reward = np.array([t.reward for t in trajectories])
    log_mu = np.array([sum(t.ref_logprobs) for t in trajectories])
    lines = [
        f"trajectories      {len(trajectories)} of {len({t.prompt_id for t in trajectories})} prompts, "
        f"{np.mean([t.finished for t in trajectories]):.1%} finished"
    ]
    for name in ("prompt_ids", "response_ids"):
        low, middle, high = np.quantile([len(getattr(t, name)) for t in trajectories], [0, 0.5, 1]).astype(int)
        lines.append(f"{name.removesuffix('_ids'):8}tokens    min {low}, median {middle}, max {high}")
    lines.append(
        f"reward            mean {reward.mean():.3f}; share >= 0: p = {(reward >= 0).mean():.3f}, "
        f"effective share at baseline 0: {advantage_share(reward):.3f}"
    )
    lines.append(f"log mu            mean {log_mu.mean():.1f}, min {log_mu.min():.1f}, max {log_mu.max():.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m topr.trajectories", description="Make trajectory files.")
    commands = parser.add_subparsers(required=True)
    convert = commands.add_parser("import", help="tokenise and score {prompt, response, reward} lines")
    convert.add_argument("file", help="JSON lines with prompt, response, reward")
    convert.add_argument("--policy", required=True, help="folder or hub name: its tokenizer and its log-probs as mu")
    convert.add_argument("--out", required=True, help="Parquet file to write")
    convert.add_argument("--microbatch-tokens", type=int, default=16384, help="tokens of one forward")
    args = parser.parse_args()
    with command():
        print(report(import_jsonl(args.file, args.policy, args.out, args.microbatch_tokens)))
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
