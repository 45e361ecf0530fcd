"""All training files as one set, mapped into memory: it does not grow with the files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from topr.io import InputError, explained
from topr.io.distributed import rank
from topr.policy.files import load_tokenizer, vocabulary_and_context
from topr.run.identity import file_hash, tokenizer_hash
from topr.trajectories.file import SCHEMA, read_metadata, read_table, resolve_files

COLUMNS = ["prompt_ids", "response_ids", "ref_logprobs", "reward", "group", "sampled"]


@dataclass
class TrainingSet:
    """The trajectories of all training files, as one set."""

    files: list[str]
    hashes: list[str]  # of each file's content
    metadata: list[dict]  # of each file
    rows: Any  # the training columns, a memory-mapped `datasets.Dataset` in Arrow format

    def __post_init__(self):
        from pandas import MultiIndex  # here: `--help` needs no pandas

        table = self.rows.data.table
        lengths = [pc.list_value_length(table[name]) for name in ("prompt_ids", "response_ids")]
        hashes: list[int] = []
        for chunk in table["prompt_ids"].chunks:
            hashes += map(xxhash.xxh3_64_intdigest, chunk.to_numpy(zero_copy_only=False))
        # a number for each prompt, equal for equal ones, the same on every rank
        prompt = np.unique(np.array(hashes, dtype=np.uint64), return_inverse=True)[1]
        self.sizes = np.stack((prompt, *lengths)).astype(np.int32)  # see `batching.arrange`
        self.reward = table["reward"].to_numpy()
        counts = [pq.read_metadata(path).num_rows for path in self.files]
        self.file = np.repeat(range(len(counts)), counts)  # number of each row's
        # a group is one prompt, sampled by one policy in one iteration
        origins = [(entry["policy"], entry["iteration"]) for entry in self.metadata]
        origin = np.array([origins.index(one) for one in origins])[self.file]
        # combined first: otherwise each chunk would get a dictionary of its own
        name = table["group"].combine_chunks().dictionary_encode().indices.to_numpy()
        self.group = MultiIndex.from_arrays([origin, prompt, name]).factorize()[0]
        self.in_float32 = all(entry["precision"] == "32-true" for entry in self.metadata)

    def place(self, trajectory: int) -> str:
        """File and row number of a trajectory, for messages."""
        file = self.file[trajectory]
        return f"row {trajectory - np.argmax(self.file == file)} of {self.files[file]}"

    def sampled_by(self, policy_hash: str, trajectory: np.ndarray) -> np.ndarray:
        """Whether their files say that this policy sampled trajectories."""
        same_policy = np.array([entry["policy"] == policy_hash for entry in self.metadata])
        return same_policy[self.file[trajectory]]


def read_training_set(train: str | list[str], policy: str, longest: int) -> TrainingSet:
    """Check trajectory files row by row, and map them into memory.

    Args:
        train: paths, globs or hub data sets.
        policy: whose tokenizer the files must have.
        longest: bound on the tokens of a prompt with its response.

    Raises:
        InputError: a file or a row is not what it should be; only rank 0 checks rows.
    """
    files = resolve_files(train)
    metadata = [read_metadata(path) for path in files]
    expected = tokenizer_hash(load_tokenizer(policy))
    vocabulary, context = vocabulary_and_context(policy)
    for path, entry in zip(files, metadata, strict=True):
        if entry["tokenizer"] not in (None, expected):
            raise InputError(
                f"{path} has another tokenizer than policy {policy!r}",
                "train a policy with that tokenizer or import the text again",
            )
        if rank() == 0:
            table = read_table(path, vocabulary, min(longest, context))  # checks every row
            if pc.min(pc.list_value_length(table["ref_logprobs"])).as_py() == 0:
                raise InputError(
                    f"{path} holds responses without log-probs",
                    "let evaluate.py write it with --log_probs true",
                )
    hashes = list(map(file_hash, files))
    return TrainingSet(files, hashes, metadata, map_rows(files, hashes))


def map_rows(files: list[str], hashes: list[str]):
    """The training columns of Parquet files as one `datasets.Dataset` in Arrow format."""
    import datasets

    datasets.disable_progress_bars()
    cache = datasets.config.HF_DATASETS_CACHE
    parts = []
    for path, content in zip(files, hashes, strict=True):
        stored = pq.read_schema(path).names
        with explained(f"the cache of data.train in {cache} cannot be written"):
            parts.append(
                datasets.load_dataset(
                    "parquet",
                    data_files=path,
                    columns=[name for name in COLUMNS if name in stored],
                    features=datasets.Features.from_arrow_schema(SCHEMA),
                    split="train",
                    # its own cache would know a file by its path and time
                    cache_dir=Path(cache, content),
                )
            )
    return datasets.concatenate_datasets(parts).with_format("arrow")
