"""What the trainer iterates over: micro-batches of trajectories, batches of problems."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from torch import Tensor, from_numpy, tensor
from torch.utils.data import DataLoader, Dataset

from topr.packing import Tokens, pack, partition


class MicroBatch(NamedTuple):
    """A rank's share of a global batch, or a part of it."""

    tokens: Tokens
    ref_log_probs_N: Tensor
    reward_B: Tensor
    advantage_B: Tensor
    real_B: Tensor  # 1; 0 for the filler that a rank runs when a global batch is too small for all
    divisor: Tensor  # scalar: the trajectories (or pairs) of the GLOBAL batch
    trajectory_B: Tensor  # row numbers in the data


class ProblemLoader:
    """Batches as they are: a `DataLoader` would be sharded a second time, a list be taken for several loaders."""

    def __init__(self, batches: list):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        return iter(self.batches)


class TrainLoader:
    """Micro-batches of this rank in one epoch; its state is the number of global batches that the trainer consumed.

    Args:
        data: the `TrajectoryDataModule`, set up.
        epoch: whose plan is followed.
    """

    def __init__(self, data, epoch: int):
        self.batches, self.workers = _MicroBatches(data, epoch), data.num_workers
        self.epoch, self.start, self.consumed = epoch, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "global_batches": self.consumed // self.batches.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # a checkpoint from the end of an epoch is resumed by the loader of the next
        self.start = state["global_batches"] if state["epoch"] == self.epoch else 0

    def __iter__(self) -> Iterator[MicroBatch]:
        self.consumed, self.start = self.start * self.batches.count, 0
        order = range(self.consumed, len(self.batches))  # a map over a range: workers prefetch, the order stays
        for batch in DataLoader(self.batches, batch_size=None, sampler=order, num_workers=self.workers):
            self.consumed += 1
            yield batch


class _MicroBatches(Dataset):
    """Every micro-batch of one rank in one epoch, by number; `count` of them make a global batch."""

    def __init__(self, data, epoch: int):
        self.rows, self.sizes, self.advantage, self.unit = data.rows, data.sizes, data.advantage(epoch), data.unit
        self.plan, self.count = data.plan(epoch), data.microbatches(epoch)
        self.rank, self.ranks = data.trainer.global_rank, data.trainer.world_size

    def __len__(self) -> int:
        return len(self.plan) * self.count

    def __getitem__(self, number: int) -> MicroBatch:
        batch, part = self.plan[number // self.count], number % self.count
        shares = partition(self.sizes[:, batch], parts=self.count * self.ranks, unit=self.unit)
        share = shares[part * self.ranks + self.rank]
        filler = not len(share)
        chosen = batch[shares[0][-self.unit :] if filler else share]
        table = self.rows[chosen.tolist()]
        tokens = pack(table["prompt_ids"].to_numpy(), table["response_ids"].to_numpy())
        return MicroBatch(
            tokens=tokens._replace(count=0) if filler else tokens,
            ref_log_probs_N=from_numpy(np.concatenate(table["ref_logprobs"].to_numpy())),
            reward_B=from_numpy(table["reward"].to_numpy().copy()),
            advantage_B=from_numpy(self.advantage[chosen]),
            real_B=tensor([0.0 if filler else 1.0]).expand(len(chosen)),
            divisor=tensor(len(batch) / self.unit),
            trajectory_B=from_numpy(chosen),
        )


def numbered(column: pa.ChunkedArray) -> np.ndarray:
    """An integer for each row of a column of lists, equal for equal lists, the same on every rank."""
    chunks = (chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks)
    digests = [b"".join(blake2b(ids, digest_size=8).digest() for ids in rows) for rows in chunks]
    return np.unique(np.frombuffer(b"".join(digests), dtype=np.uint64), return_inverse=True)[1]
