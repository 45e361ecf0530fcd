"""Trajectories and problems for the trainer: memory-mapped, in the order of the epoch plan, resumable in mid-epoch."""

from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from topr.evaluation import check_prompts, missing_parts
from topr.io import InputError, check_counts, check_folder, first_line
from topr.loaders import ProblemLoader, TrainLoader, numbered
from topr.losses import advantage_share, positives, silent_groups
from topr.plan import epoch_plan, microbatch_count
from topr.policy_files import vocabulary_and_context
from topr.ranks import refuse
from topr.rows import resolve_files
from topr.sampling import Sampling
from topr.tasks.task import Problem
from topr.tokenizer import load_tokenizer, tokenizer_fingerprint
from topr.trajectories import SCHEMA, read_metadata, validate

TRAINING_COLUMNS = ["prompt_ids", "response_ids", "ref_logprobs", "reward", "group"]


class TrajectoryDataModule(LightningDataModule):
    """Trajectories to train on, problems to sample from.

    Args:
        train: trajectory Parquet: a path, a glob, a hub data set, or a list of them.
        val: problems for validation, JSON lines.
        test: problems for the figures before and after training, JSON lines.
        problems: problems that `predict` samples, JSON lines.
        samples: responses per problem for `predict` and `test`.
        val_samples: responses per problem for validation.
        sampling: how responses are sampled.
        out: folder for the trajectories that `predict` writes.
        batch_size: trajectories per optimiser step, over all devices.
        microbatch_tokens: bound on the tokens of one forward; a prompt counts once for its responses in it.
        whole_groups: keep a group's trajectories in one global batch, so that their prompt is computed once. Other
            batches than those of a plain shuffle: faster, the more so the shorter the responses, but less varied.
        num_workers: loader processes.
        seed: of the epoch plan and of sampling.
    """

    def __init__(
        self,
        train: str | list[str] | None = None,
        val: str | None = None,
        test: str | None = None,
        problems: str | None = None,
        samples: int = 16,
        val_samples: int = 4,
        sampling: Sampling = Sampling(),
        out: str | None = None,
        batch_size: int = 64,
        microbatch_tokens: int = 16384,
        whole_groups: bool = False,
        num_workers: int = 0,
        seed: int = 0,
    ):
        super().__init__()
        check_counts("data.", samples=samples, val_samples=val_samples, batch_size=batch_size)
        check_counts("data.", least=0, most=1024, num_workers=num_workers)
        self.train, self.val, self.test, self.problems, self.out = train, val, test, problems, out
        self.samples, self.val_samples, self.sampling, self.seed = samples, val_samples, sampling, seed
        self.batch_size, self.microbatch_tokens, self.num_workers = batch_size, microbatch_tokens, num_workers
        self.whole_groups = whole_groups
        self.refusal: InputError | None = None

    def prepare_data(self) -> None:
        """Check every file that this command reads before anything is written or put on a device.

        This runs on one rank of a node, so that `setup`, which runs on all, tells what was found.
        """
        try:
            self._check()
        except InputError as error:
            self.refusal = error

    def _check(self) -> None:
        stage, policy = self.trainer.state.fn, self.trainer.lightning_module.policy_path
        needed = {"fit": ["train"], "validate": ["val"], "test": ["test"], "predict": ["problems", "out"]}[stage]
        for name in needed:
            if not getattr(self, name):
                raise InputError(f"data.{name} is not set; {stage.value} needs it")
        tokenizer = load_tokenizer(policy)
        for split in ("val", "test") if stage == "fit" else needed[:1]:
            if problems := self.read_problems(split):
                check_prompts(policy, tokenizer, self.trainer.lightning_module.task, problems, self.sampling)
        if stage == "predict":
            check_folder("data.out:", self.out)
            self.missing()
        expected = tokenizer_fingerprint(tokenizer)
        vocabulary, context = vocabulary_and_context(policy)
        for path, metadata in zip(self.files, self.metadata, strict=True) if stage == "fit" else ():
            if metadata["tokenizer"] not in (None, expected):
                raise InputError(
                    f"{path} was tokenised with another tokenizer than that of policy {policy!r}; train a policy with "
                    "that tokenizer or import the text again for this one"
                )
            validate(path, vocabulary, min(self.microbatch_tokens, context))
        if stage == "fit":
            self.rows  # noqa: B018 - fills the memory-mapped cache once, before the other ranks open it

    @cached_property
    def files(self) -> list[str]:
        """The training files."""
        return resolve_files(self.train)

    @cached_property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of each training file."""
        return [read_metadata(path) for path in self.files]

    @cached_property
    def rows(self):
        """The training columns as a memory-mapped `datasets.Dataset`: resident memory does not grow with the files."""
        import datasets

        datasets.disable_progress_bars()
        features = datasets.Features.from_arrow_schema(pa.schema([SCHEMA.field(name) for name in TRAINING_COLUMNS]))
        try:
            rows = datasets.load_dataset(
                "parquet", data_files=self.files, split="train", columns=TRAINING_COLUMNS, features=features
            )
        except (OSError, datasets.exceptions.DatasetGenerationError) as error:  # the latter from one of the former
            raise InputError(
                f"the cache of data.train cannot be written to {datasets.config.HF_DATASETS_CACHE} "
                f"({first_line(error.__cause__ or error)}); make room there, or set HF_DATASETS_CACHE to another folder"
            ) from error
        return rows.with_format("arrow")

    def setup(self, stage: str) -> None:
        """Derive lengths and advantages from the whole data set.

        Raises:
            InputError: what `prepare_data` found, or the loss, or the plan of the first epoch.
        """
        refuse(self.refusal)
        if stage == "fit":
            try:
                self._plan()
            except InputError as error:
                self.refusal = error
            refuse(self.refusal)

    def _plan(self) -> None:
        table, loss = self.rows.data.table, self.trainer.lightning_module.loss
        self.reward = table["reward"].to_numpy()
        lengths = (pc.list_value_length(table[name]).to_numpy() for name in ("prompt_ids", "response_ids"))
        self.sizes = np.stack((numbered(table["prompt_ids"]), *lengths), dtype=np.int32, casting="same_kind")
        # a dictionary of each of its chunks would be made anew for all of them
        self.group = table["group"].combine_chunks().dictionary_encode().indices.to_numpy()
        if self.whole_groups and loss.grouping == "pair":
            raise InputError(
                f"data.whole_groups is true, but {type(loss).__name__} draws pairs, which are shuffled one by one; set "
                "it to false"
            )
        self.grouping = "group" if self.whole_groups else loss.grouping
        # batches of whole groups, and with them micro-batches, can differ in number from epoch to epoch
        self.trainer.reload_dataloaders_every_n_epochs = 1
        if self.val is None:
            self.trainer.limit_val_batches = 0
        shares, silent = self.shares(), silent_groups(self.advantage(0), self.group)
        told = f", {silent} of them without a gradient" if loss.grouping == "group" else ""
        baseline = f" at baseline {shares['baseline']:.3g}" if "baseline" in shares else ""
        rank_zero_info(
            f"{len(self.reward)} trajectories in {self.group.max() + 1} groups{told}, {self.sizes[2].sum()} response "
            f"tokens, mean reward {self.reward.mean():.3f}, {shares['positive_share']:.1%} positive, effective share "
            f"{shares['effective_positive_share']:.1%}{baseline}; {len(self.plan(0))} updates an epoch "
            f"of {self.microbatches(0)} micro-batch(es)"
        )

    def shares(self) -> dict[str, float]:
        """The share p of positives, the effective share, and the baseline of a loss that subtracts one everywhere."""
        advantage, of_group = self.advantage(0), self.trainer.lightning_module.loss.grouping == "group"
        shares = {
            "positive_share": float(positives(advantage, of_group).mean()),
            "effective_positive_share": advantage_share(advantage),
        }
        baseline = {"baseline": float(np.mean(self.reward.astype(np.float64) - advantage))}
        return shares if of_group else shares | baseline

    @property
    def unit(self) -> int:
        """Neighbours of a global batch that share a micro-batch."""
        return 2 if self.grouping == "pair" else 1

    @lru_cache(maxsize=1)  # noqa: B019 - a data module lives as long as its process
    def advantage(self, epoch: int) -> np.ndarray:
        """Advantages in an epoch: some losses draw other ones in each."""
        return self.trainer.lightning_module.loss.advantages(self.reward, self.group, self.seed, epoch)

    @lru_cache(maxsize=1)  # noqa: B019
    def plan(self, epoch: int) -> list[np.ndarray]:
        """The global batches of an epoch."""
        return epoch_plan(
            self.group,
            self.advantage(epoch) >= 0,
            batch_size=self.batch_size,
            grouping=self.grouping,
            seed=self.seed,
            epoch=epoch,
        )

    def microbatches(self, epoch: int) -> int:
        """Micro-batches of each update, K: the least for which none of any rank exceeds `microbatch_tokens`."""
        return microbatch_count(
            self.plan(epoch),
            self.sizes,
            microbatch_tokens=self.microbatch_tokens,
            ranks=self.trainer.world_size,
            unit=self.unit,
        )

    def train_dataloader(self) -> TrainLoader:
        """The micro-batches of the trainer's current epoch; sets the trainer's accumulation to their number a step."""
        loader = TrainLoader(self, self.trainer.current_epoch)
        self.trainer.accumulate_grad_batches = loader.batches.count
        return loader

    def read_problems(self, split: str) -> list[Problem]:
        """Problems of `val`, `test` or `problems`; none where the split is not set."""
        path = getattr(self, split)
        try:
            return self.trainer.lightning_module.task.problems(path) if path is not None else []
        except InputError as error:
            raise InputError(f"data.{split}: {error}") from error

    def share(self, split: str) -> list[Problem]:
        """This rank's problems of a split."""
        return self.read_problems(split)[self.trainer.global_rank :: self.trainer.world_size]

    def val_dataloader(self) -> ProblemLoader:
        return ProblemLoader([self.share("val")])  # one batch, empty where a rank has no problem: all take part

    def test_dataloader(self) -> ProblemLoader:
        return ProblemLoader([self.share("test")])

    def predict_dataloader(self) -> ProblemLoader:
        """The files that this rank is to sample, as many as any other rank: sharded ones need each other."""
        missing = self.trainer.strategy.broadcast(self.missing() if self.trainer.is_global_zero else None)
        missing += [(Path(), [])] * (-len(missing) % self.trainer.world_size or not missing)
        return ProblemLoader(missing[self.trainer.global_rank :: self.trainer.world_size])

    def missing(self) -> list[tuple[Path, list[Problem]]]:
        """The files of data.out that are still to be sampled, with their problems."""
        problems = self.read_problems("problems")
        return missing_parts(Path(self.out), problems, self.trainer.lightning_module.describe(problems))

    def place(self, trajectory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number of the training file that each row number lies in, and the row's number there."""
        ends = np.cumsum([0] + [pq.read_metadata(path).num_rows for path in self.files])
        file = np.searchsorted(ends, trajectory, side="right") - 1
        return file, trajectory - ends[file]
