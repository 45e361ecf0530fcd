"""From trajectories to updates: the epoch plan, micro-batches, and the row of tokens of each.

A BATCH is one update, over all ranks. The epoch plan decides which trajectories form it, whatever
the number of ranks, workers and micro-batches. Each rank computes its share in micro-batches, each
of them one row of tokens, equally many on every rank.

Shapes: B trajectories, L tokens of the row that holds them, N sampled tokens laid end to end,
U units: trajectories, or pairs, that stay together.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, from_numpy, tensor

from topr.io import InputError

Batching = Literal["trajectories", "groups", "pairs"]

# Queries start:end see themselves, causally, and before them the tokens first:last of their prompt
# (none if equal). Spans follow each other without a gap; a prompt's comes before its responses'.
Span = tuple[int, int, int, int]
Spans = tuple[Span, ...]


def seen_by(span: Span) -> np.ndarray:
    """The places in the row that a span sees: its prompt and itself."""
    start, end, first, last = span
    return np.concatenate((np.arange(first, last), np.arange(start, end)))


class Tokens(NamedTuple):
    """Trajectories in one row: a prompt, each of its responses, the next prompt, and so on. The
    positions of a response continue those of its prompt."""

    input_ids_L: Tensor
    position_ids_L: Tensor
    trajectories: Spans  # start and end of each response, start and end of its prompt
    sampled: tuple[np.ndarray, ...]  # of each response, the places of its sampled tokens
    position_N: Tensor  # where in the row the token stands that predicts each sampled token
    target_N: Tensor  # the sampled tokens
    length_B: Tensor  # T, the sampled tokens of each trajectory
    nominal: int  # tokens of all prompts and responses; a shared prompt counts for each response

    @property
    def spans(self) -> Spans:
        """What each token attends to."""
        spans = []
        responses = Counter(first for _, _, first, _ in self.trajectories)
        for start, end, first, last in self.trajectories:
            if responses[first] == 1:  # prompt and response are one sequence
                spans.append((first, end, first, first))
                continue
            if start == last:  # the first response: its prompt comes before it
                spans.append((first, last, first, first))
            spans.append((start, end, first, last))
        return tuple(spans)

    def to(self, device: torch.device) -> "Tokens":
        """A copy on a device; does not wait for it."""
        return Tokens._make(
            value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for value in self
        )


class MicroBatch(NamedTuple):
    """A part of a rank's share of an update, small enough for one forward and backward.

    Lightning moves named tuples to the device field by field, and `Tokens` by its `to`.
    """

    tokens: Tokens
    ref_log_probs_N: Tensor  # log mu
    advantage_B: Tensor
    reward_B: Tensor
    group_B: Tensor
    trajectory_B: Tensor  # row numbers in the data
    real_B: Tensor  # 1; 0 of a filler, which a rank computes where there is too little for all


class Update(NamedTuple):
    """A rank's share of one update: what `training_step` gets as its batch."""

    micro_batches: list[MicroBatch]  # equally many on every rank
    trajectories: int  # of the whole update, over all ranks


def plan_batches(
    group: np.ndarray, positive: np.ndarray, batch_size: int, batching: Batching, *seeds: int
) -> list[np.ndarray]:
    """The batches of one epoch, arrays of trajectory numbers; a pure function of its arguments.

    Args:
        group: number of each trajectory's group, [trajectories].
        positive: whether A >= 0, [trajectories].
        batch_size: largest number of trajectories in a batch; the last one, or with `groups` any,
            may be smaller.
        batching: `trajectories` shuffles them; `groups` shuffles groups and fills batches with
            whole ones; `pairs` draws min(n+, n-) disjoint pairs from each group and shuffles them,
            a positive and its negative side by side.
        seeds: of the shuffle and the pairs, usually the run's and the number of the epoch.

    Raises:
        InputError: a group or a pair does not fit into a batch, or no group holds a pair.
    """
    rng = np.random.default_rng(seeds)
    if batching == "trajectories":
        order = rng.permutation(len(group))
        return np.split(order, range(batch_size, len(order), batch_size))
    if batching == "pairs":
        pairs = rng.permutation(draw_pairs(group, positive, rng))
        size = batch_size // 2
        if size == 0:
            raise InputError("data.batch_size is 1, but this loss needs pairs; set at least 2")
        return [part.ravel() for part in np.split(pairs, range(size, len(pairs), size))]
    place = rng.permutation(group.max() + 1)[group]  # of each trajectory's group in the epoch
    sizes = np.bincount(place)
    if sizes.max() > batch_size:
        raise InputError(
            f"a group has {sizes.max()} trajectories, which must share a batch",
            f"raise data.batch_size, now {batch_size}",
        )
    starts = [0]
    end = 0
    for size in sizes.tolist():
        if end + size - starts[-1] > batch_size:
            starts.append(end)
        end += size
    return np.split(np.argsort(place, kind="stable"), starts[1:])


def draw_pairs(group: np.ndarray, positive: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Disjoint (positive, negative) pairs within groups, [pairs, 2]."""
    sign = group * 2 + positive  # one number for each group and sign
    order = np.lexsort((rng.random(len(group)), sign))
    ordered = sign[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)  # in its group and sign
    count = np.bincount(sign, minlength=2 * (group.max() + 1)).reshape(-1, 2).min(axis=1)
    kept = order[place < count[group[order]]]
    if len(kept) == 0:
        raise InputError(
            "data.train: no group holds both a positive and a negative",
            "this loss needs such pairs; import rewards 0 and 1 with --scale 0 1",
        )
    return np.stack((kept[positive[kept]], kept[~positive[kept]]), axis=1)


def arrange(
    sizes: np.ndarray, unit: int, padded: bool
) -> tuple[np.ndarray, Callable[[int, int], int]]:
    """Order units so that neighbours share prompts, or with padding have similar lengths.

    Args:
        sizes: [3, B]: a number that is equal for equal prompts, tokens of prompt and of response.
        unit: this many neighbours stay together: 2 for pairs.
        padded: the trajectories of a row are padded to its longest; otherwise it holds each of
            their prompts once.

    Returns:
        The order [U], and a function: the tokens of a row that holds the units start:end of it.
    """
    prompt, prompt_length, length = sizes.reshape(3, -1, unit)
    if padded:
        longest = unit * (prompt_length + length).max(axis=1)
        order = np.argsort(longest, kind="stable")
        longest_U = longest[order].tolist()
        return order, lambda start, end: (end - start) * longest_U[end - 1]
    order = np.argsort(prompt[:, 0], kind="stable")
    is_new = np.diff(prompt[order].ravel(), prepend=-1) != 0  # unlike the prompt before it
    tokens = length[order].ravel() + is_new * prompt_length[order].ravel()
    end_U = [0, *tokens.cumsum()[unit - 1 :: unit].tolist()]
    # a row that starts with a unit computes its first prompt again
    again_U = np.where(is_new[::unit], 0, prompt_length[order, 0]).tolist()
    return order, lambda start, end: end_U[end] - end_U[start] + again_U[start]


def partition(
    sizes: np.ndarray, bound: int, multiple: int = 1, unit: int = 1, padded: bool = False
) -> list[np.ndarray]:
    """Split a batch into balanced rows: as few as keep each within `bound` tokens, a unit that
    exceeds it alone.

    Returns, for each row, the places of its trajectories in the columns of `sizes`. The number of
    rows is rounded up to a multiple of `multiple`; empty rows fill up. The other arguments are
    those of `arrange`."""
    order, tokens = arrange(sizes, unit, padded)
    units = len(order)

    def row_starts(largest):
        """The places at which a new row must begin so that each holds at most so many tokens."""
        starts = [0]
        for i in range(1, units):
            if tokens(starts[-1], i + 1) > largest:
                starts.append(i)
        return starts

    parts = math.ceil(len(row_starts(bound)) / multiple) * multiple
    largest_unit = max(tokens(i, i + 1) for i in range(units))
    # the smallest bound with which there are so few rows
    smallest = bisect_left(
        range(tokens(0, units)),
        True,
        largest_unit,
        key=lambda largest: len(row_starts(largest)) <= parts,
    )
    rows = np.split(order, row_starts(smallest)[1:])
    rows = [(row[:, None] * unit + np.arange(unit)).ravel() for row in rows]
    return rows + [np.empty(0, dtype=np.int64)] * (parts - len(rows))


def pack(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    sampled: Sequence[np.ndarray | None] = (),
) -> Tokens:
    """Lay B prompts and their responses out in one row; neighbours with equal prompts share one.

    Args:
        prompts, responses: token ids, non-empty arrays.
        sampled: which tokens of a response were sampled; None, or nothing at all: every one.
    """
    ids, positions, targets, places = [], [], [], []
    trajectories = []
    sampled_places = []
    first = last = end = 0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if i == 0 or not np.array_equal(prompt, prompts[i - 1]):
            first = end
            last = end = first + len(prompt)
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
        start = end
        end = start + len(response)
        trajectories.append((start, end, first, last))
        ids.append(response)
        positions.append(np.arange(len(prompt), len(prompt) + len(response)))
        marks = sampled[i] if len(sampled) else None
        chosen = np.arange(len(response)) if marks is None else np.flatnonzero(marks)
        sampled_places.append(chosen)
        # the prompt's last token predicts the first one of the response, that the next, and so on
        places.append(np.r_[last - 1, start : end - 1][chosen])
        targets.append(response[chosen])
    return Tokens(
        input_ids_L=from_numpy(np.concatenate(ids).astype(np.int64)),
        position_ids_L=from_numpy(np.concatenate(positions)),
        trajectories=tuple(trajectories),
        sampled=tuple(sampled_places),
        position_N=from_numpy(np.concatenate(places)),
        target_N=from_numpy(np.concatenate(targets).astype(np.int64)),
        length_B=tensor([len(target) for target in targets]),
        nominal=sum(map(len, prompts)) + sum(map(len, responses)),
    )
