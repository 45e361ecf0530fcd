"""The LightningDataModule: updates from memory-mapped trajectories, and problems to sample from."""

from collections import UserList
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import from_numpy
from torch.utils.data import DataLoader, Dataset

from topr.advantages import Advantage, Baseline, positive_share_of
from topr.batching import Batching, MicroBatch, Update, pack, partition, plan_batches
from topr.io import InputError, check_folder, lock
from topr.io.distributed import end_all_ranks_on_error, gather, rank, world_size
from topr.io.settings import save_hyperparameters
from topr.losses.base import Loss
from topr.run.identity import content_hash, source_hash
from topr.sampling.base import Sampling
from topr.tasks.task import Task
from topr.trajectories.training_set import TrainingSet, read_training_set

# the argument that each stage needs
NEEDED = {"fit": "train", "validate": "val", "test": "test", "predict": "problems"}


class ProblemBatch(NamedTuple):
    """Problems to sample responses to: a batch of validation, test and prediction."""

    job: Any  # the `SamplingJob`, which decides responses and grades
    numbers: list[int]  # of its problems; none where this rank only keeps the others company
    path: Path | None = None  # the file to write, if any
    microbatch_tokens: int = 0  # of the forward that scores log mu, in prediction
    sampled: Iterator = iter(())  # of the trajectories of this batch and the next, in prediction

    def to(self, device) -> "ProblemBatch":
        """Lightning moves batches to the device; nothing here goes there."""
        return self


class ProblemBatches(UserList):
    """A loader of this rank's batches. Not a DataLoader (Lightning would shard it again) and not a
    list (Lightning would treat it as several loaders)."""


class EpochPlan(NamedTuple):
    """The batches of an epoch, and the advantages by which they were planned."""

    batches: list[np.ndarray]  # see `plan_batches`
    advantage: np.ndarray  # of every trajectory, float32


@dataclass
class Updates(Dataset):
    """The updates of one epoch, by number: this rank's share of each."""

    data: TrainingSet
    plan: EpochPlan
    microbatch_tokens: int
    unit: int  # neighbours of a batch that stay in one micro-batch: 2 for pairs
    padded: bool  # whether the policy pads trajectories; see `batching.arrange`
    rank: int = field(default_factory=rank)
    ranks: int = field(default_factory=world_size)

    def __getitem__(self, number: int) -> Update:
        batch = self.plan.batches[number]
        rows = partition(
            self.data.sizes[:, batch], self.microbatch_tokens, self.ranks, self.unit, self.padded
        )
        micro_batches = []
        for row in rows[self.rank :: self.ranks]:
            # a filler if empty: the ranks of a sharded policy need each other in every forward
            chosen = row if len(row) else rows[0][-self.unit :]
            micro_batches.append(self.micro_batch(batch[chosen], real=len(row) > 0))
        return Update(micro_batches, len(batch))

    def micro_batch(self, chosen: np.ndarray, real: bool) -> MicroBatch:
        """The trajectories of these numbers, in one row of tokens."""
        table = self.data.rows[chosen.tolist()]
        sampled = table["sampled"].to_numpy() if "sampled" in table.column_names else ()
        tokens = pack(table["prompt_ids"].to_numpy(), table["response_ids"].to_numpy(), sampled)
        stored = zip(table["ref_logprobs"].to_numpy(), tokens.sampled, strict=True)
        ref_log_probs = [log_probs[places] for log_probs, places in stored]
        return MicroBatch(
            tokens=tokens if real else tokens._replace(nominal=0),
            ref_log_probs_N=from_numpy(np.concatenate(ref_log_probs)),
            advantage_B=from_numpy(self.plan.advantage[chosen]),
            reward_B=from_numpy(self.data.reward[chosen]),
            group_B=from_numpy(self.data.group[chosen]),
            trajectory_B=from_numpy(chosen),
            real_B=torch.full((len(chosen),), float(real)),
        )


def unchanged(update):
    """In place of the default, which makes tensors of arrays and lists of tuples."""
    return update


class UpdateLoader:
    """Iterates over the updates of an epoch, each computed when it is due.

    Lightning tells it the epoch through `sampler.set_epoch`, and stores its state, the number of
    updates that were taken, in every checkpoint. Not a DataLoader: Lightning would shard it.
    """

    def __init__(self, datamodule: "TrajectoryDataModule", epoch: int, padded: bool):
        self.datamodule = datamodule
        self.data = datamodule.data  # for PolicyModule.check_update, too
        self.epoch = epoch
        self.padded = padded
        self.start = 0  # updates to skip, after a resumption
        self.taken = 0  # updates of this epoch
        self.length = len(datamodule.plan(epoch).batches)

    @property
    def sampler(self) -> "UpdateLoader":
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int):
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.start = 0
        if len(self.datamodule.plan(epoch).batches) != self.length:  # which Lightning has read
            raise InputError(
                "epochs of these groups differ in their number of updates",
                "set Trainer(reload_dataloaders_every_n_epochs=1)",
            )

    def state_dict(self):
        return {"epoch": self.epoch, "updates": self.taken}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.start = state["updates"]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Update]:
        datamodule = self.datamodule
        updates = Updates(
            self.data,
            datamodule.plan(self.epoch),
            datamodule.microbatch_tokens,
            datamodule.unit,
            self.padded,
        )
        self.taken = self.start
        self.start = 0
        loader = DataLoader(
            updates,
            batch_size=None,
            sampler=range(self.taken, self.length),
            num_workers=datamodule.num_workers,
            collate_fn=unchanged,
            # a DataLoader draws a seed; the global generator must not notice
            generator=torch.Generator(),
        )
        for update in loader:
            self.taken += 1
            yield update


class TrajectoryDataModule(LightningDataModule):
    """Trajectories to train on, problems to sample from.

    Args:
        policy: folder or hub name; train.py links it, task and batching from the model section.
        task: reads the problems.
        batching: what must lie in one batch; see `batching.plan_batches`. The loss states it.
        train: trajectory Parquet: a path, a glob, a hub data set, or a list of them.
        val: problems for validation: JSON lines, Parquet, or a hub data set
            `owner/name[/config]:split`.
        test: problems for `test`, and for the figures before and after training, as for `val`.
        problems: problems that `predict` samples, as for `val`.
        advantage: computes advantages from rewards, see `topr.advantages`; by default A = R.
        samples: responses per problem for `predict` and `test`.
        val_samples: responses per problem for validation.
        sampling: sampling parameters.
        out: folder for the trajectories that `predict` writes; none: they are only returned.
        batch_size: trajectories per update, over all devices.
        microbatch_tokens: bound on the tokens of one forward; a prompt counts once for its
            responses in it, unless the policy pads trajectories: then padding counts, too.
        whole_groups: keep a group's trajectories in one batch, so that their prompt is computed
            once. Faster, the more so the shorter the responses, but batches are less varied.
        num_workers: loader processes.
        seed: of the epoch plan and of sampling.
    """

    trainer: Any  # Lightning sets it

    def __init__(
        self,
        policy: str,
        task: Task,
        batching: Batching = "trajectories",
        train: str | list[str] | None = None,
        val: str | None = None,
        test: str | None = None,
        problems: str | None = None,
        advantage: Advantage | None = None,
        samples: PositiveInt = 16,
        val_samples: PositiveInt = 4,
        sampling: Sampling = Sampling(),
        out: str | None = None,
        batch_size: PositiveInt = 64,
        microbatch_tokens: PositiveInt = 16384,
        whole_groups: bool = False,
        num_workers: NonNegativeInt = 0,
        seed: NonNegativeInt = 0,
    ):
        super().__init__()
        save_hyperparameters(self, "policy", "task", "batching")  # which the module has
        if whole_groups and batching == "pairs":
            raise InputError("data.whole_groups is true, but this loss draws pairs; set it false")
        self.policy = policy
        self.task = task
        self.batching = "groups" if whole_groups else batching
        self.train = train
        self.val = val
        self.test = test
        self.problems = problems
        self.advantage = advantage or Baseline()
        self.samples = samples
        self.val_samples = val_samples
        self.sampling = sampling
        self.out = out
        self.batch_size = batch_size
        self.microbatch_tokens = microbatch_tokens
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str):
        """Check every file that a stage reads before anything is written. If a rank finds an error,
        rank 0 raises it, and the others exit."""
        self.job = cache(self._job)  # of this setup; a decorated method would keep the module alive
        with end_all_ranks_on_error():
            if getattr(self, NEEDED[stage]) is None:
                raise InputError(f"data.{NEEDED[stage]} is not set; {stage} needs it")
            for split in ("val", "test") if stage == "fit" else [NEEDED[stage]]:
                self.job(split)
            if stage == "fit":
                self._setup_training()
            elif stage == "predict" and self.out:
                check_folder("data.out:", self.out)
                if rank() == 0:
                    self.lock = lock(self.out)

    def teardown(self, stage: str):
        """When every rank has written its predictions, let other processes write to data.out."""
        if stage == "predict":
            gather(None)
            if hasattr(self, "lock"):
                self.lock.close()
                if not self.trainer.fast_dev_run:
                    print(f"trajectories are under {self.out}")

    def _setup_training(self):
        """Read the training set, plan the first epoch, and say what the data are like."""
        loss = self.trainer.lightning_module.loss if self.trainer else None
        if loss and loss.batching == "pairs" != self.batching:
            raise InputError('this loss needs pairs: give the data module batching="pairs"')
        self.data = read_training_set(
            self.train or [], self.policy, longest=self.microbatch_tokens // self.unit
        )
        self.plan = cache(self._plan)
        batches, advantage = self.plan(0)
        reward = self.data.reward
        check_signs(advantage, loss)
        rank_zero_info(
            f"{len(reward)} trajectories in {self.data.group.max() + 1} groups, "
            f"{len(batches)} updates an epoch: mean reward {reward.mean():.4g}, "
            f"effective positive share {positive_share_of(advantage):.3g}"
        )

    def decisive(self) -> dict:
        """What decides the plan and the figures of a run, by content."""
        return {
            "data.train": self.data.hashes,
            "data.advantage": source_hash(self.advantage),
            "data.batch_size": self.batch_size,
            "data.batching (data.whole_groups)": self.batching,
            "seed_everything": self.seed,
            "data.val, data.test, data.sampling or the task": content_hash(
                [job and job.metadata for job in map(self.job, ("val", "test"))]
            ),
        }

    @property
    def unit(self) -> int:
        """Neighbours of a batch that stay in one micro-batch."""
        return 2 if self.batching == "pairs" else 1

    def _plan(self, epoch: int) -> EpochPlan:
        """The batches and the advantages of an epoch: some advantages are drawn in each anew."""
        if self.trainer and self.trainer.overfit_batches:
            epoch = 0
        data = self.data
        rng = np.random.default_rng([self.seed, epoch, 1])  # 1: not the one of the batches
        advantage = np.asarray(self.advantage(data.reward, data.group, rng), dtype=np.float32)
        if advantage.shape != data.reward.shape or not np.isfinite(advantage).all():
            raise InputError(
                f"data.advantage: {type(self.advantage).__name__} must return a finite number per "
                "trajectory"
            )
        batches = plan_batches(
            data.group, advantage >= 0, self.batch_size, self.batching, self.seed, epoch
        )
        return EpochPlan(batches, advantage)

    def train_dataloader(self) -> UpdateLoader:
        """The updates of the trainer's current epoch."""
        epoch, padded = 0, False
        if self.trainer:
            epoch = self.trainer.current_epoch
            # it decides how many trajectories fit into a row; Lightning has loaded it by now
            padded = self.trainer.lightning_module.policy.padded
        return UpdateLoader(self, epoch, padded)

    def _job(self, split: str):
        """The `SamplingJob` of `val`, `test` or `problems`; None if the split is not set."""
        from topr.evaluation.pipeline import SamplingJob

        source = getattr(self, split)
        if source is None:
            return None
        samples = self.val_samples if split == "val" else self.samples
        precision = self.trainer.precision if self.trainer else "32-true"
        try:
            problems = self.task.problems(source)
        except InputError as error:
            raise InputError(f"data.{split}: {error}") from error
        if self.trainer and self.trainer.fast_dev_run:
            problems = problems[:2]
            samples = 2
        return SamplingJob(
            self.policy, self.task, problems, samples, self.sampling, self.seed, precision
        )

    def problem_batch(self, split: str) -> ProblemBatch:
        """All problems of this rank at once: the sampler refills its rows from them. Perhaps none,
        but every rank takes part."""
        job = self.job(split)
        return ProblemBatch(job, list(range(rank(), len(job.problems), world_size())))

    def val_dataloader(self):
        if self.val is None:
            return []  # Lightning then does not validate
        return ProblemBatches([self.problem_batch("val")])

    def test_dataloader(self) -> ProblemBatches:
        return ProblemBatches([self.problem_batch("test")])

    def predict_dataloader(self) -> ProblemBatches:
        """A batch for each file that this rank writes."""
        from topr.sampling.local import LocalSampler

        job = self.job("problems")
        module = self.trainer.lightning_module
        job.metadata["policy"] = module.policy_hash()  # it can hold other weights than the stored
        folder = None if self.trainer.fast_dev_run else self.out  # a trial run writes nothing
        parts = job.parts_to_write(folder and Path(folder))
        sampled = job.sample_parts(
            [numbers for _, numbers in parts if numbers],
            module.sampler or LocalSampler(),
            module.policy,
        )
        return ProblemBatches(
            ProblemBatch(job, numbers, path, self.microbatch_tokens, sampled)
            for path, numbers in parts
        )


def check_signs(advantage: np.ndarray, loss: Loss | None):
    """Say where a loss would misunderstand the signs of advantages, or learn from one sign only."""
    zeros = int((advantage == 0).sum())
    if loss and loss.refuses_zero_advantages and zeros:
        raise InputError(
            f"data.train: {zeros} of {len(advantage)} advantages are 0, but "
            f"{type(loss).__name__} sees their signs only",
            "for rewards 0 and 1 set data.advantage.c to 0.5",
        )
    if zeros == len(advantage):
        raise InputError(
            "data.train: every advantage is 0, so there is nothing to learn",
            "sample more, or change data.advantage",
        )
    if (advantage >= 0).all():
        rank_zero_warn(
            "only positives are learned; for rewards 0 and 1 set data.advantage.c to 0.5"
        )
    elif (advantage < 0).all():
        rank_zero_warn("every advantage is negative: nothing is learned from positives")
