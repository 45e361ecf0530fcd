"""From trajectories to batches: the epoch plan, its micro-batches, and the row of tokens that the policy computes.

A GLOBAL batch is one update. The epoch plan decides which trajectories form it, whatever the number of ranks, workers
and micro-batches. Each rank computes its share in `count` micro-batches, each of them one row of tokens.

Shapes: B trajectories, L tokens of the row that holds them, N response tokens laid end to end.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, from_numpy, tensor
from torch.utils.data import DataLoader, Dataset

from topr.io import InputError
from topr.losses.advantages import place_in_group
from topr.losses.base import Grouping

# Queries start:end see themselves, causally, and before them the tokens first:last of their prompt (none if equal).
# The spans of a row follow each other without a gap; a prompt's own span comes before those of its responses.
Span = tuple[int, int, int, int]


class Tokens(NamedTuple):
    """Trajectories in one row of tokens: a prompt, each of its responses, the next prompt, and so on. The positions of
    a response continue those of its prompt."""

    input_ids_L: Tensor
    position_ids_L: Tensor
    trajectories: tuple[Span, ...]  # start and end of each response, start and end of its prompt
    predicting: tuple[
        np.ndarray, ...
    ]  # within prompt and response, the tokens that predict the sampled ones
    position_N: Tensor  # where in the row the token stands that predicts each sampled token
    target_N: Tensor  # the sampled tokens: all of a response, but for what lies between the turns of a conversation
    length_B: Tensor  # sampled tokens of each trajectory
    nominal: int  # prompt + response tokens of all trajectories; shared prompts count once for each response

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens of each trajectory, on the host."""
        return list(map(len, self.predicting))

    @property
    def spans(self) -> tuple[Span, ...]:
        """What each token attends to."""
        spans, responses = [], Counter(first for *_, first, _ in self.trajectories)
        for start, end, first, last in self.trajectories:
            if responses[first] == 1:  # prompt and response are one sequence
                spans.append((first, end, first, first))
            else:
                spans += [(first, last, first, first)] * (start == last) + [
                    (start, end, first, last)
                ]
        return tuple(spans)

    def to(self, device: torch.device) -> "Tokens":
        # a GPU goes on computing meanwhile
        return Tokens._make(
            v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for v in self
        )


class MicroBatch(NamedTuple):
    """A rank's share of a global batch, or a part of it."""

    tokens: Tokens
    ref_log_probs_N: Tensor  # log mu
    reward_B: Tensor
    advantage_B: Tensor
    real_B: Tensor  # 1; 0 for a filler, which a rank computes when a global batch is too small for all ranks
    divisor: Tensor  # scalar: the trajectories (or pairs) of the GLOBAL batch
    microbatches: int  # per rank and update
    trajectory_B: Tensor  # row numbers in the data


def epoch_plan(
    group: np.ndarray,
    positive: np.ndarray,
    batch_size: int,
    grouping: Grouping,
    seed: int,
    epoch: int,
) -> list[np.ndarray]:
    """Global batches of one epoch, each an array of trajectory indices; a pure function of its arguments.

    Args:
        group: integer id of each trajectory's group, [trajectories].
        positive: whether its advantage is positive, [trajectories].
        batch_size: largest number of trajectories in a batch; the last batch of an epoch may be smaller.
        grouping: `none` shuffles trajectories; `group` shuffles groups and fills batches with whole ones; `pair` draws
            min(n+, n-) disjoint pairs from each group and shuffles them, a positive and its negative side by side.
        seed, epoch: of the shuffle and the pairs; epochs count from 0.
    """
    rng = np.random.default_rng([seed, epoch])
    if grouping == "none":
        order = rng.permutation(len(group))
        return np.split(order, range(batch_size, len(order), batch_size))
    if grouping == "pair":
        pairs, size = rng.permutation(_pairs(group, positive, rng)), batch_size // 2
        if not size:
            raise InputError(
                "data.batch_size is 1, but this loss needs pairs; set it to at least 2"
            )
        return [part.ravel() for part in np.split(pairs, range(size, len(pairs), size))]
    shuffled = rng.permutation(group.max() + 1)[group]
    sizes = np.bincount(shuffled)
    if sizes.max() > batch_size:
        message = f"data.batch_size is {batch_size} but a group has {sizes.max()} trajectories"
        raise InputError(f"{message}, which must share a batch; raise data.batch_size")
    starts = [0]
    for start, end in pairwise([0, *sizes.cumsum()]):
        if end - starts[-1] > batch_size:
            starts.append(start)
    return np.split(np.argsort(shuffled, kind="stable"), starts[1:])


def _pairs(group: np.ndarray, positive: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Disjoint (positive, negative) pairs within groups, [pairs, 2]."""
    sign = group * 2 + positive  # one number for each group and sign
    order = np.lexsort((rng.random(len(group)), sign))
    count = np.bincount(sign, minlength=2 * (group.max() + 1)).reshape(-1, 2).min(axis=1)
    kept = order[place_in_group(sign[order]) < count[group[order]]]
    if not len(kept):
        raise InputError(
            "data.train: no group holds both a positive and a negative; this loss needs such pairs"
        )
    return np.stack((kept[positive[kept]], kept[~positive[kept]]), axis=1)


def microbatch_count(
    plan: list[np.ndarray],
    sizes: np.ndarray,
    *,
    microbatch_tokens: int,
    ranks: int,
    unit: int,
    padded: bool = False,
) -> int:
    """The smallest number of micro-batches per rank and update that keeps each of them within `microbatch_tokens`.
    `sizes`, `unit` and `padded` are those of `partition`."""
    longest = int(np.add(*_unit_tokens(sizes[:, np.concatenate(plan)], unit, padded)).max())
    if longest > microbatch_tokens:
        what = "a pair" if unit == 2 else "a trajectory"
        raise InputError(
            f"data.microbatch_tokens is {microbatch_tokens} but {what} takes up to {longest}; raise it"
        )
    rows = (
        len(partition(sizes[:, batch], microbatch_tokens, unit=unit, padded=padded))
        for batch in plan
    )
    return max(math.ceil(count / ranks) for count in rows)


def _unit_tokens(sizes: np.ndarray, unit: int, padded: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each unit but its first prompt, and those of its first prompt (0 where padding counts)."""
    prompt, prompt_length, length = sizes.reshape(3, -1, unit)
    if padded:
        tokens = unit * (prompt_length + length).max(axis=1)
        return tokens, np.zeros_like(tokens)
    other_prompts = (prompt[:, 1:] != prompt[:, :-1]) * prompt_length[:, 1:]
    return length.sum(axis=1) + other_prompts.sum(axis=1), prompt_length[:, 0]


def partition(
    sizes: np.ndarray, tokens: int = 0, parts: int = 0, unit: int = 1, padded: bool = False
) -> list[np.ndarray]:
    """Indices of the trajectories of each row: as few rows as `tokens` allows or `parts` balanced ones.

    Args:
        sizes: [3, B]: a number that is equal for equal prompts, the prompt's tokens, the response's tokens.
        tokens: bound on the tokens of a row.
        parts: number of rows; the bound is then the smallest that this number allows, and empty rows fill up.
        unit: this many neighbours stay together (the two of a pair).
        padded: the trajectories of a row are padded to its longest; otherwise it holds each of their prompts once.
    """
    prompt, unit_tokens = sizes[0].reshape(-1, unit), _unit_tokens(sizes, unit, padded)
    order = np.argsort(unit_tokens[0] if padded else prompt[:, 0], kind="stable")
    # what a unit's first prompt adds to a new row, and to one where it follows another unit
    own, leading = (tokens_of[order].tolist() for tokens_of in unit_tokens)
    shared = prompt[order[1:], 0] == prompt[order[:-1], -1]
    following = [0, *np.where(shared, 0, leading[1:]).tolist()]

    def row_starts(bound: int) -> list[int]:
        found, used = [0], own[0] + leading[0]
        for i in range(1, len(own)):
            used = (i + 1 - found[-1]) * own[i] if padded else used + own[i] + following[i]
            if used > bound:
                found.append(i)
                used = own[i] + leading[i]
        return found

    if parts:
        least, most = (
            max(map(sum, zip(own, leading, strict=True))),
            len(own) * max(own) + sum(leading),
        )
        tokens = bisect_left(
            range(most), True, least, key=lambda bound: len(row_starts(bound)) <= parts
        )
    rows = [
        (row[:, None] * unit + np.arange(unit)).ravel()
        for row in np.split(order, row_starts(tokens)[1:])
    ]
    return rows + [np.empty(0, dtype=np.int64)] * (parts - len(rows))


def pack(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    sampled: Sequence[np.ndarray | None] = (),
) -> Tokens:
    """Lay B prompts and their responses, non-empty arrays of token ids, out in one row. Neighbours with equal prompts
    share one. `sampled` tells which tokens of a response were sampled; None, or nothing at all: every one."""
    ids, positions, trajectories, predicting, places, targets = [], [], [], [], [], []
    first = last = end = 0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not i or not np.array_equal(prompt, prompts[i - 1]):
            first, end = end, end + len(prompt)
            last = end
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
        start, end = end, end + len(response)
        trajectories.append((start, end, first, last))
        ids.append(response)
        positions.append(np.arange(len(prompt), len(prompt) + len(response)))
        chosen = slice(None) if not len(sampled) or sampled[i] is None else sampled[i]
        # the prompt's last token predicts the first response token, each response token the next one
        predicting.append(np.arange(len(prompt) - 1, len(prompt) + len(response) - 1)[chosen])
        places.append(np.r_[last - 1, start : end - 1][chosen])
        targets.append(response[chosen])
    return Tokens(
        input_ids_L=from_numpy(np.concatenate(ids).astype(np.int64)), trajectories=tuple(trajectories),
        position_ids_L=from_numpy(np.concatenate(positions)), predicting=tuple(predicting),
        position_N=from_numpy(np.concatenate(places)), target_N=from_numpy(np.concatenate(targets).astype(np.int64)),
        length_B=tensor(list(map(len, targets))),
        nominal=sum(map(len, prompts)) + sum(map(len, responses)),
    )  # fmt: skip


@dataclass(eq=False)
class MicroBatches(Dataset):
    """Every micro-batch of one rank in one epoch, by number; `count` of them make an update."""

    rows: Any  # the training columns, a `datasets.Dataset` in Arrow format
    sizes: np.ndarray  # see `partition`
    advantage: np.ndarray  # of each trajectory, float32
    plan: list[np.ndarray]  # the global batches
    count: int  # micro-batches per rank and update
    unit: int  # neighbours that stay in one micro-batch
    rank: int
    ranks: int
    padded: bool = False  # see `partition`

    def __len__(self) -> int:
        return len(self.plan) * self.count

    @lru_cache(maxsize=2)  # noqa: B019 - one data set an epoch; the micro-batches of an update follow each other
    def _shares(self, update: int) -> list[np.ndarray]:
        """The rows of all ranks of a global batch."""
        parts = self.count * self.ranks
        return partition(
            self.sizes[:, self.plan[update]], parts=parts, unit=self.unit, padded=self.padded
        )

    def __getitem__(self, number: int) -> MicroBatch:
        update, part = divmod(number, self.count)
        batch, shares = self.plan[update], self._shares(update)
        share = shares[part * self.ranks + self.rank]
        filler = not len(share)
        chosen = batch[shares[0][-self.unit :] if filler else share]
        table = self.rows[chosen.tolist()]
        sampled = table["sampled"].to_numpy() if "sampled" in table.column_names else ()
        prompts, scores = table["prompt_ids"].to_numpy(), table["ref_logprobs"].to_numpy()
        tokens = pack(prompts, table["response_ids"].to_numpy(), sampled)
        places = (
            place - len(prompt) + 1
            for place, prompt in zip(tokens.predicting, prompts, strict=True)
        )
        ref_log_probs = [log_probs[place] for log_probs, place in zip(scores, places, strict=True)]
        return MicroBatch(
            tokens=tokens._replace(nominal=0) if filler else tokens,
            ref_log_probs_N=from_numpy(np.concatenate(ref_log_probs)),
            reward_B=from_numpy(table["reward"].to_numpy().copy()), advantage_B=from_numpy(self.advantage[chosen]),
            real_B=tensor([0.0 if filler else 1.0]).expand(len(chosen)), divisor=tensor(len(batch) / self.unit),
            microbatches=self.count, trajectory_B=from_numpy(chosen),
        )  # fmt: skip


class TrainLoader:
    """Iterates over the micro-batches of one epoch; its state is the number of global batches that were consumed."""

    def __init__(self, batches: MicroBatches, epoch: int, workers: int):
        self.batches, self.epoch, self.workers = batches, epoch, workers
        self.start = self.consumed = 0

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "global_batches": self.consumed // self.batches.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # a checkpoint from the end of an epoch is loaded by the loader of the next epoch, which starts at its beginning
        self.start = state["global_batches"] if state["epoch"] == self.epoch else 0

    def __iter__(self) -> Iterator[MicroBatch]:
        self.consumed, self.start = self.start * self.batches.count, 0
        numbers = range(self.consumed, len(self.batches))
        # its own generator: a DataLoader draws a seed, and a resumed run has restored the global generator by now
        own: Any = {"generator": torch.Generator(), "num_workers": self.workers}
        for batch in DataLoader(self.batches, batch_size=None, sampler=numbers, **own):
            self.consumed += 1
            yield batch
