"""The policy gradient with a weight on each token that is not differentiated: CISPO and the REC family."""

import math
from abc import abstractmethod

import numpy as np
from torch import Tensor

from topr.losses.clipped import GRPO
from topr.losses.groups import centred
from topr.losses.loss import Loss, LossOutput, check_clips, checked, mean_tokens, spread, sum_tokens
from topr.losses.tapered import truncated_ratio


class WeightedLoss(Loss):
    """-(1/T) sum_t A sg(w_t) log pi_t."""

    grouping = "group"

    @abstractmethod
    def weights(self, ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        """w_t and whether it is not what the ratio r_t alone would give, from r_t, detached, and A."""

    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        log_ratio_N = (log_probs_N - ref_log_probs_N).detach()
        ratio_N = truncated_ratio(log_ratio_N, 0, math.inf)
        weight_N, changed_N = self.weights(ratio_N, spread(advantage_B, length_B, ratio_N))
        objective_B = advantage_B * sum_tokens(weight_N * log_probs_N, length_B)
        shares = (mean_tokens(value_N.to(ratio_N), length_B) for value_N in (weight_N, changed_N))
        return LossOutput(-objective_B / length_B, objective_B.detach(), sum_tokens(log_ratio_N, length_B), *shares)


class CISPO(WeightedLoss):
    """w = clip(r, 1 - low, 1 + high), A as GRPO (MiniMax-M1, arXiv:2506.13585): no token loses its gradient.

    Args:
        clip_low: 1 or more for no lower bound.
        clip_high: epsilon above 1.
    """

    def __init__(self, clip_low: float, clip_high: float):
        check_clips(clip_low=clip_low, clip_high=clip_high)
        self.low, self.high = max(0.0, 1 - clip_low), 1 + clip_high

    advantages = GRPO.advantages

    def weights(self, ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        clipped_N = ratio_N.clamp(self.low, self.high)
        return clipped_N, clipped_N != ratio_N


class REC(WeightedLoss):
    """w = M_t, a mask that regularises as clipping does, or r_t M_t with importance sampling (arXiv:2509.24203).

    A = R - mean of the group.

    Args:
        importance: whether r_t weighs a token.
        clip_low: epsilon below 1.
        clip_high: epsilon above 1.
    """

    def __init__(self, importance: bool = False, clip_low: float = 0.2, clip_high: float = 0.2):
        check_clips(clip_low=clip_low, clip_high=clip_high)
        self.importance, self.low, self.high = importance, 1 - clip_low, 1 + clip_high

    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        return checked(self, centred(reward, group))

    @abstractmethod
    def kept(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        """M_t."""

    def weights(self, ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        kept_N = self.kept(ratio_N, advantage_N)
        return kept_N * ratio_N if self.importance else kept_N.to(ratio_N), ~kept_N


class RECOneSide(REC):
    """M: r <= 1 + high for A >= 0, r >= 1 - low for A <= 0; with importance sampling PPO's gradient."""

    def kept(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        return (advantage_N >= 0) & (ratio_N <= self.high) | (advantage_N <= 0) & (ratio_N >= self.low)


class RECTwoSide(REC):
    """M: 1 - low <= r <= 1 + high."""

    def kept(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        return (ratio_N >= self.low) & (ratio_N <= self.high)


class RECRing(RECTwoSide):
    """M: two sides, and what lags far behind: r <= 1 - outer_low for A >= 0, r >= 1 + outer_high for A <= 0.

    Args:
        importance: whether r_t weighs a token.
        clip_low: epsilon below 1.
        clip_high: epsilon above 1.
        outer_low: epsilon' below 1.
        outer_high: epsilon' above 1.
    """

    def __init__(
        self,
        importance: bool = False,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        outer_low: float = 0.6,
        outer_high: float = 2.0,
    ):
        super().__init__(importance, clip_low, clip_high)
        check_clips(outer_low=outer_low, outer_high=outer_high)
        self.outer_low, self.outer_high = 1 - outer_low, 1 + outer_high

    def kept(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        lags_N = (advantage_N >= 0) & (ratio_N <= self.outer_low) | (advantage_N <= 0) & (ratio_N >= self.outer_high)
        return super().kept(ratio_N, advantage_N) | lags_N
