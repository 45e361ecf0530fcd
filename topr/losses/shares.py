"""Baselines, and the share of positives that the data acts as having under them."""

import numpy as np

from topr.io import InputError


def effective_positive_share(positive_share: float, baseline: float) -> float:
    """The share of positives that rewards +-1 with share p act as under baseline c: p(1-c) / (1 + c(1-2p)).

    Raises:
        InputError: unless 0 <= p <= 1 and -1 <= c <= 1.
    """
    if not (0 <= positive_share <= 1 and -1 <= baseline <= 1):
        raise InputError(f"p = {positive_share} must lie in [0, 1] and c = {baseline} in [-1, 1]")
    return positive_share * (1 - baseline) / (1 + baseline * (1 - 2 * positive_share))


def baseline_for_share(positive_share: float, effective_share: float) -> float:
    """The baseline under which rewards +-1 with share p act as share q: (p-q) / (p+q-2pq). Inverts the above in c.

    Raises:
        InputError: unless both shares lie strictly between 0 and 1.
    """
    p, q = positive_share, effective_share
    if not (0 < p < 1 and 0 < q < 1):
        raise InputError(f"the shares p = {p} and effective {q} must lie strictly between 0 and 1")
    return (p - q) / (p + q - 2 * p * q)


def advantage_share(advantage: np.ndarray) -> float:
    """Effective share of positives of any advantages: sum of A over A >= 0, over the sum of |A| (0 if all are 0)."""
    total = np.abs(advantage).sum(dtype=np.float64)
    return float(advantage[advantage > 0].sum(dtype=np.float64) / total) if total else 0.0


def baseline_from_rewards(reward: np.ndarray, effective_share: float) -> float:
    """The baseline c under which `advantage_share(reward - c)` is `effective_share`, by bisection: it falls with c.

    Raises:
        InputError: all rewards are equal, or no baseline leaves both signs.
    """
    low, high = float(reward.min()), float(reward.max())
    if low == high:
        raise InputError(
            f"data.train: positive_share needs rewards of both signs but every reward is {low:g}; "
            "set positive_share: null or train on data with both"
        )
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if advantage_share(reward - middle) > effective_share else (low, middle)
    return (low + high) / 2


def positives(advantage: np.ndarray, of_group: bool) -> np.ndarray:
    """Which trajectories are positives: A >= 0, but A > 0 of advantages within a group, where 0 has no gradient."""
    return advantage > 0 if of_group else advantage >= 0


def silent_groups(advantage: np.ndarray, group: np.ndarray) -> int:
    """Groups that have no gradient: every advantage in them is 0."""
    return len(np.setdiff1d(group, group[advantage != 0]))
