"""Advantages A from rewards R: a baseline for all trajectories, or statistics of each group.

A group holds the trajectories of one prompt. Positives have A >= 0, negatives A < 0. All arrays
have one value for each trajectory of the whole data set; groups are integers from 0.
"""

from abc import ABC, abstractmethod

import numpy as np
from jsonargparse.typing import OpenUnitInterval, PositiveFloat

from topr.io import InputError
from topr.io.settings import Configurable


class Advantage(Configurable, ABC):
    """Computes advantages; chosen by `data.advantage`. `NFT` and `QRPO` need the one that their
    docstrings name."""

    @abstractmethod
    def __call__(
        self, reward: np.ndarray, group: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Finite advantages, one for each trajectory. `rng` differs from epoch to epoch."""


class Baseline(Advantage):
    """A = R - c."""

    def __init__(self, c: float = 0.0):
        self.c = c

    def __call__(self, reward, group, rng):
        return reward.astype(np.float64) - self.c


class PositiveShare(Advantage):
    """A = R - c, with the c that makes the data act as if this share of them were positive.

    Args:
        share: effective share of positives, between 0 and 1; see `positive_share_of`.
    """

    def __init__(self, share: OpenUnitInterval):
        self.share = share

    def __call__(self, reward, group, rng):
        from scipy.optimize import bisect  # here: nothing else needs scipy

        reward = reward.astype(np.float64)
        if reward.min() == reward.max():
            raise InputError("data.train: all rewards are equal; set data.advantage to Baseline")

        def surplus(c):
            return positive_share_of(reward - c) - self.share  # falls as c rises

        return reward - bisect(surplus, reward.min(), reward.max(), xtol=1e-15)


class GroupMean(Advantage):
    """A = R - (mean of the group + shift); 0 in a group of one.

    With `shift` -0.1 it is the advantage of AsymRE (arXiv:2506.20520). A shift below 0 favours
    positives.
    """

    def __init__(self, shift: float = 0.0):
        self.shift = shift

    def __call__(self, reward, group, rng):
        return np.where(np.bincount(group)[group] > 1, centred(reward, group) - self.shift, 0.0)


class LeaveOneOut(Advantage):
    """A = R - mean of the OTHERS in the group (RLOO, arXiv:2402.14740); 0 in a group of one."""

    def __call__(self, reward, group, rng):
        count = np.bincount(group)[group]
        return centred(reward, group) * (count / np.maximum(count - 1, 1))


class GroupNormalised(Advantage):
    """A = (R - mean of the group) / (its standard deviation + 1e-4); 0 in a group of one.

    The advantage of GRPO (arXiv:2402.03300). The variance is divided by the group's size - 1.
    """

    def __call__(self, reward, group, rng):
        advantage = centred(reward, group)
        variance = np.bincount(group, advantage**2) / np.maximum(np.bincount(group) - 1, 1)
        return advantage / (np.sqrt(variance)[group] + 1e-4)


class GroupBalanced(Advantage):
    """Drops surplus negatives (R below the group's mean) at random until the group is balanced.

    A = R - mean of the kept, and 0 for the dropped, which still count in the loss's divisor. Each
    epoch drops anew. The advantage of RED-Drop (arXiv:2509.24203); not for losses of pairs, which
    would take the dropped for positives.
    """

    def __call__(self, reward, group, rng):
        from pandas import Series

        negative = centred(reward, group) < 0
        draw = Series(rng.random(len(group)))
        place = draw.groupby([group, negative]).rank().to_numpy()  # from 1, in a random order
        positives = np.bincount(group, ~negative)[group]
        kept = place <= positives
        advantage = np.zeros(reward.shape)
        advantage[kept] = centred(reward[kept], group[kept])
        return advantage


class GroupExponential(Advantage):
    """A = D e^(D / temperature) with D = R - mean of the group: good trajectories weigh more.

    The advantage of RED-Weight (arXiv:2509.24203).
    """

    def __init__(self, temperature: PositiveFloat = 1.0):
        self.temperature = temperature

    def __call__(self, reward, group, rng):
        difference = centred(reward, group)
        return difference * np.exp(difference / self.temperature)


class GroupQuantile(Advantage):
    """A = share of the group with a reward at most R, less 1: 0 for the best, below 0 for others.

    The advantage of QRPO (arXiv:2507.08068); the group itself stands for the paper's reference
    rewards. Where all rewards of a group are equal, A = 0, be they right or wrong.
    """

    def __call__(self, reward, group, rng):
        from pandas import Series

        return Series(reward).groupby(group).rank(method="max", pct=True).to_numpy() - 1


def centred(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """R - mean of the group, in float64; exactly 0 where all rewards of a group are equal."""
    reward = reward.astype(np.float64)  # sums of equal float32 numbers are exact in float64
    mean = np.bincount(group, reward) / np.maximum(np.bincount(group), 1)
    return reward - mean[group]


def positive_share_of(advantage: np.ndarray) -> float:
    """The effective share of positives: the sum of A over positives, over the sum of |A|.

    0 if every advantage is 0.
    """
    positive = np.maximum(advantage, 0).sum(dtype=float)
    return positive / (np.abs(advantage).sum(dtype=float) or 1.0)
