"""The epoch plan: which trajectories form which global batch, whatever the ranks, workers and micro-batches."""

import math
from typing import Literal

import numpy as np

from topr.io import InputError
from topr.packing import partition


def epoch_plan(
    group: np.ndarray,
    positive: np.ndarray,
    *,
    batch_size: int,
    grouping: Literal["none", "group", "pair"],
    seed: int,
    epoch: int,
) -> list[np.ndarray]:
    """Global batches of one epoch, each an array of trajectory indices; a pure function of its arguments.

    Args:
        group: integer id of each trajectory's group, [trajectories].
        positive: whether its advantage is positive, [trajectories].
        batch_size: trajectories per batch at most; the last batch of an epoch may be shorter.
        grouping: `none` shuffles trajectories; `group` shuffles groups and fills batches with whole ones; `pair` draws
            min(n+, n-) disjoint pairs in each group and shuffles them, a positive and its negative side by side.
        seed: of the shuffle.
        epoch: counted from 0; another shuffle, and other pairs, for each.

    Raises:
        InputError: a group does not fit into a batch, or there is no pair.
    """
    rng = np.random.default_rng([seed, epoch])
    if grouping == "none":
        order = rng.permutation(len(group))
        return np.split(order, range(batch_size, len(order), batch_size))
    if grouping == "pair":
        pairs = rng.permutation(_pairs(group, positive, rng))
        if batch_size < 2:
            raise InputError("data.batch_size is 1, but this loss needs pairs; set it to 2 at least")
        size = batch_size // 2
        return [part.ravel() for part in np.split(pairs, range(size, len(pairs), size))]
    rank = rng.permutation(group.max() + 1)
    order = np.argsort(rank[group], kind="stable")
    ends = np.flatnonzero(np.diff(rank[group[order]], append=-1)) + 1
    cuts, start = [], 0
    for previous, end in zip(np.append(0, ends[:-1]), ends, strict=True):
        if end - previous > batch_size:
            raise InputError(
                f"data.batch_size is {batch_size} but a group has {end - previous} trajectories, and this loss or "
                "data.whole_groups needs them in one batch; raise data.batch_size"
            )
        if end - start > batch_size:
            cuts.append(previous)
            start = previous
    return np.split(order, cuts)


def _pairs(group: np.ndarray, positive: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Disjoint (positive, negative) pairs within groups, [pairs, 2]."""
    order = np.lexsort((rng.random(len(group)), positive, group))  # by group, then sign, then chance
    run = group[order] * 2 + positive[order]
    first = np.flatnonzero(np.diff(run, prepend=-1))
    place = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))  # rank within group and sign
    count = np.bincount(run, minlength=2 * (group.max() + 1)).reshape(-1, 2).min(axis=1)
    kept = order[place < count[group[order]]]
    if not len(kept):
        raise InputError("data.train: no group holds both a positive and a negative; this loss needs such pairs")
    return np.stack((kept[positive[kept]], kept[~positive[kept]]), axis=1)


def microbatch_count(
    plan: list[np.ndarray], sizes: np.ndarray, *, microbatch_tokens: int, ranks: int, unit: int
) -> int:
    """The least number of micro-batches per rank and step that keeps each of an epoch within `microbatch_tokens`.

    Args:
        plan: global batches.
        sizes: see `partition`.
        microbatch_tokens: bound on the tokens of a micro-batch, in which a prompt counts once for all its responses.
        ranks: processes that share a global batch.
        unit: neighbours that stay in one micro-batch (2 for pairs).

    Raises:
        InputError: a unit alone is longer than `microbatch_tokens`.
    """
    longest = 0
    for batch in plan:
        prompt, prompt_length, length = sizes[:, batch].reshape(3, -1, unit)
        apart = (prompt[:, 1:] != prompt[:, :-1]) * prompt_length[:, 1:]  # neighbours that share no prompt
        longest = max(longest, int((prompt_length[:, 0] + length.sum(axis=1) + apart.sum(axis=1)).max()))
    if longest > microbatch_tokens:
        raise InputError(
            f"data.microbatch_tokens is {microbatch_tokens} but {'a pair' if unit == 2 else 'a trajectory'} takes up "
            f"to {longest} tokens; raise it"
        )
    rows = (len(partition(sizes[:, batch], microbatch_tokens, unit=unit)) for batch in plan)
    return max(math.ceil(count / ranks) for count in rows)
