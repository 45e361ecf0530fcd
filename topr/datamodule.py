"""The LightningDataModule: memory-mapped trajectories in the order of the epoch plan, and problems to sample from."""

import math
from collections import UserList
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from topr.batching import MicroBatches, TrainLoader, epoch_plan, microbatch_count
from topr.distributed import same_error_on_all_ranks
from topr.evaluation import SamplingJob, check_prompts
from topr.io import InputError, check_folder, first_line, lock
from topr.losses import Loss, advantage_share, positives, silent_groups
from topr.policy import load_tokenizer, tokenizer_fingerprint, vocabulary_and_context
from topr.sampling import Sampling
from topr.tasks import Problem, Task
from topr.trajectories import SCHEMA, batches, read_metadata
from topr.trajectories.file import resolve_files

ProblemBatches = (
    UserList  # Lightning would shard a DataLoader again, and take a list for several loaders
)
TRAINING_COLUMNS = ["prompt_ids", "response_ids", "ref_logprobs", "reward", "group"]
NEEDED = {
    "fit": ["train"],
    "validate": ["val"],
    "test": ["test"],
    "predict": ["problems", "out"],
}  # by command


class TrajectoryDataModule(LightningDataModule):
    """Trajectories to train on, problems to sample from.

    Args:
        policy: folder or hub name; train.py links policy, loss and task from the model section.
        loss: decides advantages and what a batch must hold.
        task: reads the problems.
        train: trajectory Parquet: a path, a glob, a hub data set, or a list of them.
        val: problems for validation, JSON lines.
        test: problems for `test`, and for the figures before and after training, JSON lines.
        problems: problems that `predict` samples, JSON lines.
        samples: responses per problem for `predict` and `test`.
        val_samples: responses per problem for validation.
        sampling: sampling parameters.
        out: folder for the trajectories that `predict` writes.
        batch_size: trajectories per optimiser step, over all devices.
        microbatch_tokens: bound on the tokens of one forward; a prompt counts once for its responses in it, unless the
            policy pads trajectories: then padding counts, too.
        whole_groups: keep a group's trajectories in one global batch, so that their prompt is computed once. Faster,
            the more so the shorter the responses, but batches are less varied than those of a plain shuffle.
        num_workers: loader processes.
        seed: of the epoch plan and of sampling.
    """

    trainer: Any  # Lightning sets it

    def __init__(
        self,
        policy: str,
        loss: Loss,
        task: Task,
        train: str | list[str] | None = None,
        val: str | None = None,
        test: str | None = None,
        problems: str | None = None,
        samples: PositiveInt = 16,
        val_samples: PositiveInt = 4,
        sampling: Sampling = Sampling(),
        out: str | None = None,
        batch_size: PositiveInt = 64,
        microbatch_tokens: PositiveInt = 16384,
        whole_groups: bool = False,
        num_workers: NonNegativeInt = 0,
        seed: int = 0,
    ):
        super().__init__()
        self.policy, self.loss, self.task = policy, loss, task
        self.train, self.val, self.test, self.problems, self.out = train, val, test, problems, out
        self.samples, self.val_samples, self.sampling, self.seed = (
            samples,
            val_samples,
            sampling,
            seed,
        )
        self.batch_size, self.microbatch_tokens, self.num_workers = (
            batch_size,
            microbatch_tokens,
            num_workers,
        )
        if whole_groups and loss.grouping == "pair":
            raise InputError(
                f"data.whole_groups is true, but {type(loss).__name__} draws pairs; set it to false"
            )
        self.grouping = "group" if whole_groups else loss.grouping
        self.unit = (
            2 if loss.grouping == "pair" else 1
        )  # neighbours of a global batch that share a micro-batch
        self.padded = False  # whether the policy pads trajectories; `Monitor` sets it

    def setup(self, stage: str) -> None:
        """Check every file that the command reads before anything is written; all ranks raise the first InputError."""
        command, trial = self.trainer.state.fn.value, self.trainer.fast_dev_run
        self.trial = (
            TemporaryDirectory(prefix=".trial-", dir=self.trainer.default_root_dir)
            if trial
            else None
        )
        self.__dict__.pop("sampling_job", None)
        for name in ("advantage", "plan", "microbatches", "read_problems"):  # anew for each command
            # a cache of the class would keep the trainer, and with it the weights, after this object has gone
            setattr(self, name, lru_cache(maxsize=2)(partial(getattr(type(self), name), self)))
        with same_error_on_all_ranks():
            for name in NEEDED[command]:
                if not getattr(self, name):
                    raise InputError(f"data.{name} is not set; {command} needs it")
            for split in ("val", "test") if command == "fit" else NEEDED[command][:1]:
                check_prompts(self.policy, self.task, self.read_problems(split), self.sampling)
            if command == "predict":
                check_folder("data.out:", str(self.out))
                if self.trainer.is_global_zero:
                    lock(self.output_folder(self.out))
                self.sampling_job.missing_parts(self.output_folder(self.out))
            if stage == "fit":
                self._prepare_training()

    def teardown(self, stage: str) -> None:
        if self.trial is not None:
            self.trial.cleanup()

    def output_folder(self, folder: Any) -> Path:
        """The folder to write to; in a trial run (fast_dev_run) a temporary one in its place."""
        return Path(self.trial.name if self.trial else folder)

    def _prepare_training(self) -> None:
        """Derive lengths, groups and advantages of the whole data set, and plan the first epoch."""
        table = self.rows.data.table
        self.reward = table["reward"].to_numpy()
        lengths = (
            pc.list_value_length(table[name]).to_numpy() for name in ("prompt_ids", "response_ids")
        )
        self.sizes = np.stack(
            (prompt_index(table["prompt_ids"]), *lengths), dtype=np.int32, casting="same_kind"
        )
        # combined first: otherwise each chunk would get a dictionary of its own
        self.group = table["group"].combine_chunks().dictionary_encode().indices.to_numpy()
        # the number of batches of whole groups, and of their micro-batches, can differ from epoch to epoch
        self.trainer.reload_dataloaders_every_n_epochs = 1
        if self.val is None:
            self.trainer.limit_val_batches = 0
        about = {
            "mean_reward": self.reward.mean(),
            **self.shares(),
            "updates_an_epoch": len(self.plan(0)),
        }
        about["groups_without_gradient"] = silent_groups(self.advantage(0), self.group)
        if len(self.plan(0)) < 10:
            rank_zero_warn(
                f"updates an epoch: only {len(self.plan(0))}; lower data.batch_size, now {self.batch_size}"
            )
        figures = ", ".join(
            f"{name.replace('_', ' ')} {value:.4g}" for name, value in about.items()
        )
        rank_zero_info(
            f"{len(self.reward)} trajectories in {self.group.max() + 1} groups: {figures}"
        )

    @cached_property
    def files(self) -> list[str]:
        """The training files."""
        return resolve_files(self.train or [])

    @cached_property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of each training file."""
        return [read_metadata(path) for path in self.files]

    @cached_property
    def rows(self) -> Any:
        """The training columns as a memory-mapped `datasets.Dataset`: memory does not grow with the files."""
        import datasets

        expected = tokenizer_fingerprint(load_tokenizer(self.policy))
        vocabulary, context = vocabulary_and_context(self.policy)
        for path, metadata in zip(self.files, self.metadata, strict=True):
            if metadata["tokenizer"] not in (None, expected):
                remedy = "train a policy with that tokenizer or import the text again"
                raise InputError(
                    f"{path} has another tokenizer than policy {self.policy!r}; {remedy}"
                )
            if (
                self.trainer.local_rank == 0
            ):  # once a node; the other ranks hear of errors in `setup`
                for _ in batches(path, vocabulary, min(self.microbatch_tokens, context)):
                    pass  # reading checks every row
        datasets.disable_progress_bars()
        features, parts = datasets.Features.from_arrow_schema(SCHEMA), []
        try:
            for conversations, files in groupby(
                self.files, key=lambda path: "sampled" in pq.read_schema(path).names
            ):
                columns = TRAINING_COLUMNS + ["sampled"] * conversations
                wanted: Any = {"data_files": list(files), "columns": columns, "features": features}
                parts.append(datasets.load_dataset("parquet", split="train", **wanted))
        except (OSError, datasets.exceptions.DatasetGenerationError) as error:
            message = f"the cache of data.train cannot be written ({first_line(error.__cause__ or error)})"
            remedy = f"make room in {datasets.config.HF_DATASETS_CACHE}, or set HF_DATASETS_CACHE"
            raise InputError(f"{message}; {remedy}") from error
        return datasets.concatenate_datasets(parts).with_format("arrow")

    def shares(self) -> dict[str, float]:
        """The share p of positives, the effective share, and the baseline of a loss that subtracts one everywhere."""
        advantage, of_group = self.advantage(0), self.loss.grouping == "group"
        shares = {"positive_share": float(positives(advantage, of_group).mean())}
        shares["effective_positive_share"] = advantage_share(advantage)
        return (
            shares
            if of_group
            else shares | {"baseline": float(np.mean(self.reward.astype(float) - advantage))}
        )

    def advantage(self, epoch: int) -> np.ndarray:
        """Advantages in an epoch: some losses draw them anew in each."""
        found = np.asarray(
            self.loss.advantages(self.reward, self.group, self.seed, epoch), dtype=np.float32
        )
        if found.shape != self.reward.shape:
            expected = f"one number per trajectory, {self.reward.shape}, but gave {found.shape}"
            raise InputError(
                f"model.loss: advantages of {type(self.loss).__name__} must return {expected}"
            )
        if not found.any():
            reason = (
                "no group holds rewards that differ"
                if self.loss.grouping == "group"
                else "every advantage is 0"
            )
            remedy = "sample more or change the loss"
            raise InputError(
                f"data.train: {reason}, so {type(self.loss).__name__} learns nothing; {remedy}"
            )
        return found

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The global batches of an epoch."""
        return epoch_plan(
            self.group, self.advantage(epoch) >= 0, self.batch_size, self.grouping, self.seed, epoch
        )

    def microbatches(self, epoch: int) -> int:
        """Micro-batches per rank and update: the smallest number that keeps each within `microbatch_tokens`."""
        settings: Any = {
            "microbatch_tokens": self.microbatch_tokens,
            "unit": self.unit,
            "padded": self.padded,
        }
        return microbatch_count(
            self.plan(epoch), self.sizes, ranks=self.trainer.world_size, **settings
        )

    def largest_microbatch(self) -> dict[str, int]:
        """Micro-batches per rank and update, and at most as many tokens as one of them has in the first epoch."""
        count = self.microbatches(0)
        most = max(self.sizes[1:, batch].sum() for batch in self.plan(0)) / (
            count * self.trainer.world_size
        )
        tokens = min(self.microbatch_tokens, math.ceil(most))
        share = self.sizes[2].sum() / self.sizes[1:].sum()
        return {
            "microbatches": count,
            "tokens": tokens,
            "response_tokens": math.ceil(share * tokens),
        }

    def train_dataloader(self) -> TrainLoader:
        """The micro-batches of the trainer's current epoch."""
        epoch = self.trainer.current_epoch
        batches = MicroBatches(
            rows=self.rows, sizes=self.sizes, advantage=self.advantage(epoch), plan=self.plan(epoch),
            count=self.microbatches(epoch), unit=self.unit, padded=self.padded,
            rank=self.trainer.global_rank, ranks=self.trainer.world_size,
        )  # fmt: skip
        return TrainLoader(batches, epoch, self.num_workers)

    def read_problems(self, split: str) -> list[Problem]:
        """Problems of `val`, `test` or `problems`; none if the split is not set."""
        path = getattr(self, split)
        few = 2 if self.trainer.fast_dev_run else None
        try:
            return self.task.problems(path)[:few] if path is not None else []
        except InputError as error:
            raise InputError(f"data.{split}: {error}") from error

    def val_dataloader(self) -> ProblemBatches:
        """One batch without content: `topr.callbacks.Evaluate` samples the problems of this rank."""
        return ProblemBatches([None])

    test_dataloader = val_dataloader

    @cached_property
    def sampling_job(self) -> SamplingJob:
        """What `predict` samples."""
        problems, precision = self.read_problems("problems"), str(self.trainer.precision)
        return SamplingJob(
            self.policy, self.task, problems, self.samples, self.sampling, self.seed, precision
        )

    def predict_dataloader(self) -> ProblemBatches:
        """The files that this rank writes and their problems; no rank has fewer: sharded policies need each other."""
        missing = (
            self.sampling_job.missing_parts(self.output_folder(self.out))
            if self.trainer.is_global_zero
            else []
        )
        missing = self.trainer.strategy.broadcast(missing)
        ranks = self.trainer.world_size
        missing += [(Path(), [])] * (-len(missing) % ranks if missing else ranks)
        return ProblemBatches(missing[self.trainer.global_rank :: ranks])

    def locate(self, trajectory: np.ndarray) -> list[tuple[int, int]]:
        """The index of the training file that holds each trajectory, and the row in it."""
        starts = np.cumsum([0] + [pq.read_metadata(path).num_rows for path in self.files])
        file = np.searchsorted(starts, trajectory, side="right") - 1
        return list(zip(file.tolist(), (trajectory - starts[file]).tolist(), strict=True))

    def place(self, trajectory: np.ndarray) -> list[str]:
        """File and row number of trajectories, for messages."""
        return [f"row {row} of {self.files[file]}" for file, row in self.locate(trajectory)]


def prompt_index(column: pa.ChunkedArray) -> np.ndarray:
    """An integer for each row of a column of lists, equal for equal lists, the same on every rank."""
    chunks = (chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks)
    digests = [b"".join(blake2b(ids, digest_size=8).digest() for ids in rows) for rows in chunks]
    return np.unique(np.frombuffer(b"".join(digests), dtype=np.uint64), return_inverse=True)[1]
