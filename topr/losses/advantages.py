"""Baselines, group statistics and the effective share of positives, as plain functions of reward arrays."""

import numpy as np

from topr.io import InputError


def centred(reward: np.ndarray, group: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """R - mean of its group, over the `kept` ones if given; exactly 0 where all rewards of a group are equal."""
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    reward = reward.astype(np.float64) - reward[first].astype(np.float64)[group]
    weight = np.ones(len(reward)) if kept is None else kept.astype(np.float64)
    count = np.bincount(group, weight)
    return reward - (np.bincount(group, weight * reward) / np.maximum(count, 1))[group]


def standardised(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(R - mean of the group) / (its standard deviation, ddof = 1, + 1e-4); 0 for a group of one."""
    advantage = centred(reward, group)
    deviation = np.sqrt(
        (np.bincount(group, advantage**2) / np.maximum(np.bincount(group) - 1, 1))[group]
    )
    return advantage / (deviation + 1e-4)


def place_in_group(group: np.ndarray) -> np.ndarray:
    """The place of each element among those of its group, counted from 0 in the order given."""
    import pandas as pd  # here: the help of commands needs none

    return pd.Series(group).groupby(group).cumcount().to_numpy()


def positives(advantage: np.ndarray, of_group: bool) -> np.ndarray:
    """Which trajectories are positives: A >= 0, but A > 0 of advantages within a group, where 0 has no gradient."""
    return advantage > 0 if of_group else advantage >= 0


def silent_groups(advantage: np.ndarray, group: np.ndarray) -> int:
    """Groups without a gradient: every advantage in them is 0."""
    return len(np.setdiff1d(group, group[advantage != 0]))


def advantage_share(advantage: np.ndarray) -> float:
    """Effective share of positives of any advantages: sum of A over A >= 0, over the sum of |A| (0 if all are 0)."""
    total = np.abs(advantage).sum(dtype=np.float64)
    return float(advantage[advantage > 0].sum(dtype=np.float64) / total) if total else 0.0


def baseline_for_rewards(reward: np.ndarray, effective_share: float) -> float:
    """The baseline c that makes `advantage_share(reward - c)`, which falls with c, `effective_share`; by bisection."""
    low, high = float(reward.min()), float(reward.max())
    if low == high:
        raise InputError(
            f"data.train: every reward is {low:g}, so no baseline gives positive_share; set it to null"
        )
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if advantage_share(reward - middle) > effective_share else (low, middle)
        )
    return (low + high) / 2
