"""Baselines of a group, the trajectories of one prompt: RLOO, AsymRE, RED and OPMD.

The advantages come from whole groups of the data set, once per epoch; the rest is REINFORCE's row of the family, whose
gradient is A grad log pi / T, or OPMD's square.
"""

from abc import abstractmethod

import numpy as np
from torch import Tensor

from topr.io import InputError
from topr.losses.loss import Loss, LossOutput, checked, sum_tokens
from topr.losses.tapered import TOPR


def centred(reward: np.ndarray, group: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """R - mean of its group, over the `kept` if given; exactly 0 where all rewards of a group are equal."""
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    reward = reward.astype(np.float64) - reward[first].astype(np.float64)[group]
    weight = np.ones(len(reward)) if kept is None else kept.astype(np.float64)
    count = np.bincount(group, weight)
    return reward - (np.bincount(group, weight * reward) / np.maximum(count, 1))[group]


def standardised(reward: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(R - mean of the group) / (its standard deviation, ddof = 1, + 1e-4); 0 for a group of one."""
    advantage = centred(reward, group)
    _, group, count = np.unique(group, return_inverse=True, return_counts=True)
    deviation = np.sqrt(np.bincount(group, advantage**2) / np.maximum(count - 1, 1))
    return advantage / (deviation[group] + 1e-4)


class GroupREINFORCE(TOPR):
    """REINFORCE's row of the family, all limits 1, with an advantage within the group."""

    grouping = "group"

    def __init__(self):
        super().__init__(1, 1, 1, 1)

    @abstractmethod
    def within(self, reward: np.ndarray, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A of each trajectory."""

    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        return checked(self, self.within(reward, group, np.random.default_rng([seed, epoch, 1])))


class RLOO(GroupREINFORCE):
    """A = R - mean of the OTHERS of the group (arXiv:2402.14740); 0 in a group of one."""

    def within(self, reward: np.ndarray, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        _, group, count = np.unique(group, return_inverse=True, return_counts=True)
        return centred(reward, group) * (count / np.maximum(count - 1, 1))[group]


class AsymRE(GroupREINFORCE):
    """A = R - (mean of the group + delta) (arXiv:2506.20520); 0 in a group of one.

    Args:
        delta: below 0 it leans on positives.
    """

    def __init__(self, delta: float = -0.1):
        super().__init__()
        if not abs(delta) < np.inf:
            raise InputError(f"model.loss: delta is {delta}; it must be finite")
        self.delta = delta

    def within(self, reward: np.ndarray, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        _, group, count = np.unique(group, return_inverse=True, return_counts=True)
        return np.where(count[group] > 1, centred(reward, group) - self.delta, 0.0)


class REDDrop(GroupREINFORCE):
    """Surplus negatives of a group (R below its mean) are dropped by chance until it is balanced (arXiv:2509.24203).

    A = R - mean of the kept, 0 for the dropped, which still count in the divisor; others are dropped in each epoch.
    """

    def within(self, reward: np.ndarray, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        _, number = np.unique(group, return_inverse=True)
        negative = centred(reward, group) < 0
        order = np.lexsort((rng.random(len(group)), negative, number))  # by group, then sign, then chance
        run = 2 * number[order] + negative[order]
        first = np.flatnonzero(np.diff(run, prepend=-1))
        place = np.empty(len(order), dtype=np.int64)  # of each trajectory within its group and sign
        place[order] = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
        kept = ~negative | (place < np.bincount(number, ~negative)[number])
        return np.where(kept, centred(reward, group, kept), 0.0)


class REDWeight(GroupREINFORCE):
    """A e^(A/lambda) with A = R - mean of the group: good trajectories weigh more (arXiv:2509.24203).

    Args:
        temperature: lambda.
    """

    def __init__(self, temperature: float = 1.0):
        super().__init__()
        if not temperature > 0:
            raise InputError(f"model.loss: temperature is {temperature}; it must be above 0")
        self.temperature = temperature

    def within(self, reward: np.ndarray, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        advantage = centred(reward, group)
        with np.errstate(over="ignore"):
            weighted = advantage * np.exp(advantage / self.temperature)
        if not np.isfinite(weighted.astype(np.float32)).all():
            raise InputError(
                f"model.loss: e^(A/temperature) overflows with A up to {advantage.max():g} and temperature "
                f"{self.temperature:g}; raise the temperature or scale the rewards"
            )
        return weighted


class OPMD(Loss):
    """-(R - mean of the group) log pi + (tau/2) h^2 on whole sequences, no 1/T (Kimi k1.5, arXiv:2501.12599).

    Args:
        tau: of the square of the SEQUENCE log-ratio, which pulls back to mu.
    """

    grouping = "group"

    def __init__(self, tau: float = 0.1):
        if not 0 <= tau < np.inf:
            raise InputError(f"model.loss: tau is {tau}; it must be finite and at least 0")
        self.tau = tau

    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        return checked(self, centred(reward, group))

    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        loss_B = self.tau / 2 * log_ratio_B.square() - advantage_B * sum_tokens(log_probs_N, length_B)
        weight_B = log_ratio_B.new_ones(len(log_ratio_B)).detach()  # of the first term
        return LossOutput(loss_B, -loss_B.detach(), log_ratio_B.detach(), weight_B, 0 * weight_B)
