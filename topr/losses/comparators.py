"""The methods that TOPR is compared with, on the same stored trajectories; log mu stands in for the old policy.

Shapes and symbols: see `losses/base.py`. r is the ratio of a token, s = e^(h/T).
"""

import math
from abc import abstractmethod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from topr.io import LARGEST, InputError
from topr.losses.advantages import centred, place_in_group, standardised
from topr.losses.base import Loss, LossOutput, check_argument, check_clips, sum_tokens
from topr.losses.topr import TOPR, Ratio, RatioLoss, rho, truncated_ratio


class PPO(RatioLoss):
    """-(1/T) sum_t min(r_t A, clip(r_t, 1 - low, 1 + high) A) (arXiv:1707.06347), offline, no KL, no critic. `ratio:
    token` is PPO's; see `RatioLoss` for the others."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        baseline: float = 0.0,
        ratio: Ratio = "token",
    ):
        super().__init__(ratio, a=(0, 1 - clip_low), b=(1 + clip_high, math.inf), baseline=baseline)
        check_clips(clip_low=clip_low, clip_high=clip_high)

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        """R - c."""
        return reward.astype(np.float64) - self.baseline

    @staticmethod
    def f(log_x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """min(r A, clip(r) A) / A, which is r up to 1 + high for positives, r from 1 - low for negatives."""
        ratio = truncated_ratio(log_x.detach(), 0, math.inf)
        clipped = (ratio < a) | (ratio > b)
        return rho(log_x, 0, math.inf).clamp(a, b), ratio * ~clipped, clipped


class GRPO(PPO):
    """PPO with A = (R - mean of the group) / (its standard deviation + 1e-4) (arXiv:2402.03300)."""

    grouping = "group"

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2):
        super().__init__(clip_low, clip_high)

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        return standardised(reward, group)


class GSPO(GRPO):
    """-min(s A, clip(s, 1 - low, 1 + high) A); s carries the 1/T; A as GRPO (arXiv:2507.18071)."""

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4):
        super().__init__(clip_low, clip_high)
        self.ratio = "sequence_mean"


class OPMD(Loss):
    """-(R - mean of the group) log pi + (tau/2) h^2 on whole sequences, no 1/T (Kimi k1.5, arXiv:2501.12599)."""

    grouping = "group"

    def __init__(self, tau: float = 0.1):
        check_argument("tau", tau, 0 <= tau < np.inf, "finite and at least 0")
        self.tau = tau

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        return centred(reward, group)

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        loss_B = self.tau / 2 * log_ratio_B.square() - advantage_B * sum_tokens(
            log_probs_N, length_B
        )
        weight_B = log_ratio_B.new_ones(len(log_ratio_B)).detach()  # of the first term
        return LossOutput(loss_B, -loss_B.detach(), log_ratio_B.detach(), weight_B, 0 * weight_B)


class WeightedLoss(Loss):
    """-(1/T) sum_t A sg(w_t) log pi_t: a policy gradient whose token weights are not differentiated."""

    grouping = "group"

    @abstractmethod
    def weights(self, ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        """w_t, and whether it was clipped or masked, from r_t (detached) and A."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_N = (log_probs_N - ref_log_probs_N).detach()
        ratio_N = truncated_ratio(log_ratio_N, 0, math.inf)
        advantage_N = advantage_B.repeat_interleave(length_B, output_size=len(ratio_N))
        weight_N, truncated_N = self.weights(ratio_N, advantage_N)
        objective_B = advantage_B * sum_tokens(weight_N * log_probs_N, length_B)
        means = (
            sum_tokens(value_N.to(ratio_N), length_B) / length_B
            for value_N in (weight_N, truncated_N)
        )
        return LossOutput(
            -objective_B / length_B, objective_B.detach(), sum_tokens(log_ratio_N, length_B), *means
        )


class CISPO(WeightedLoss):
    """w = clip(r, 1 - clip_low, 1 + clip_high), A as GRPO (MiniMax-M1, arXiv:2506.13585); no token is dropped."""

    advantages = GRPO.advantages

    def __init__(self, clip_low: float, clip_high: float):
        check_clips(clip_low=clip_low, clip_high=clip_high)
        self.low, self.high = max(0.0, 1 - clip_low), 1 + clip_high

    def weights(self, ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        clipped_N = ratio_N.clamp(self.low, self.high)
        return clipped_N, clipped_N != ratio_N


class REC(WeightedLoss):
    """w = M_t, a mask that clips, or r_t M_t with `importance`; A = R - mean of the group (arXiv:2509.24203)."""

    advantages = OPMD.advantages

    def __init__(self, importance: bool = False, clip_low: float = 0.2, clip_high: float = 0.2):
        check_clips(clip_low=clip_low, clip_high=clip_high)
        self.importance, self.low, self.high = importance, 1 - clip_low, 1 + clip_high

    @abstractmethod
    def mask(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        """M_t, boolean."""

    def weights(self, ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        mask_N = self.mask(ratio_N, advantage_N)
        return mask_N * ratio_N if self.importance else mask_N.to(ratio_N), ~mask_N


class RECOneSide(REC):
    """M: r <= 1 + high for A >= 0, r >= 1 - low for A <= 0; with importance sampling PPO's gradient."""

    def mask(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        return (advantage_N >= 0) & (ratio_N <= self.high) | (advantage_N <= 0) & (
            ratio_N >= self.low
        )


class RECTwoSide(REC):
    """M: 1 - low <= r <= 1 + high."""

    def mask(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        return (ratio_N >= self.low) & (ratio_N <= self.high)


class RECRing(RECTwoSide):
    """M: two sides, and what lags far behind: r <= 1 - outer_low for A >= 0, r >= 1 + outer_high for A <= 0."""

    def __init__(
        self,
        importance: bool = False,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        outer_low=0.6,
        outer_high=2.0,
    ):
        super().__init__(importance, clip_low, clip_high)
        check_clips(outer_low=outer_low, outer_high=outer_high)
        self.outer_low, self.outer_high = 1 - outer_low, 1 + outer_high

    def mask(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        lags_N = (advantage_N >= 0) & (ratio_N <= self.outer_low) | (advantage_N <= 0) & (
            ratio_N >= self.outer_high
        )
        return super().mask(ratio_N, advantage_N) | lags_N


class DPO(Loss):
    """-log sigmoid(beta (h+ - h-)) on pairs of a positive (R >= `baseline`) and a negative (arXiv:2305.18290). The
    divisor is the number of pairs in the global batch; each of a pair holds half of its loss."""

    grouping = "pair"
    advantages = PPO.advantages  # R - c, of which only the sign counts

    def __init__(self, beta: float = 0.1, baseline: float = 0.0):
        check_argument("beta", beta, 0 < beta < np.inf, "finite and above 0")
        check_argument(
            "baseline", baseline, abs(baseline) <= LARGEST, f"finite, at most {LARGEST:.0f} in size"
        )
        self.beta, self.baseline = beta, baseline

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        positive, negative = log_ratio_B.view(-1, 2).unbind(dim=1)
        margin = self.beta * (positive - negative)
        loss_B = -F.logsigmoid(margin).repeat_interleave(2) / 2
        weight_B = self.beta * (-margin.detach()).sigmoid().repeat_interleave(2)
        return LossOutput(loss_B, -loss_B.detach(), log_ratio_B.detach(), weight_B, 0 * weight_B)


class KTO(DPO):
    """1 - sigmoid(beta (h - z)) for positives, 1 - sigmoid(beta (z - h)) for negatives (arXiv:2402.01306). z, a
    divergence estimated from mismatched pairs, is 0 offline; both classes weigh 1."""

    grouping = "none"  # type: ignore[assignment]

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        gain_B = self.beta * torch.where(advantage_B >= 0, log_ratio_B, -log_ratio_B)
        loss_B = (-gain_B).sigmoid()  # 1 - sigmoid(x) = sigmoid(-x)
        weight_B = self.beta * (loss_B * (1 - loss_B)).detach()
        return LossOutput(loss_B, -loss_B.detach(), log_ratio_B.detach(), weight_B, 0 * weight_B)


class GroupREINFORCE(TOPR):
    """REINFORCE, all limits 1, with an advantage computed within the group."""

    grouping = "group"

    def __init__(self):
        super().__init__(1, 1, 1, 1)


class RLOO(GroupREINFORCE):
    """A = R - mean of the OTHERS in the group (arXiv:2402.14740); 0 in a group of one."""

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        count = np.bincount(group)[group]
        return centred(reward, group) * (count / np.maximum(count - 1, 1))


class AsymRE(GroupREINFORCE):
    """A = R - (mean of the group + delta) (arXiv:2506.20520), 0 in a group of one; delta < 0 favours positives."""

    def __init__(self, delta: float = -0.1):
        super().__init__()
        check_argument("delta", delta, abs(delta) < np.inf, "finite")
        self.delta = delta

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        return np.where(np.bincount(group)[group] > 1, centred(reward, group) - self.delta, 0.0)


class REDDrop(GroupREINFORCE):
    """Drops surplus negatives (R below the group's mean) at random until the group is balanced (arXiv:2509.24203). A =
    R - mean of the kept, 0 for the dropped, which still count in the divisor; each epoch drops anew."""

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        negative = centred(reward, group) < 0
        sign = 2 * group + negative
        order = np.lexsort((np.random.default_rng([seed, epoch, 1]).random(len(group)), sign))
        place = place_in_group(sign[order])[np.argsort(order)]
        kept = ~negative | (place < np.bincount(group, ~negative)[group])
        return np.where(kept, centred(reward, group, kept), 0.0)


class REDWeight(GroupREINFORCE):
    """A e^(A/temperature) with A = R - mean of the group: good trajectories weigh more (arXiv:2509.24203)."""

    def __init__(self, temperature: float = 1.0):
        super().__init__()
        check_argument("temperature", temperature, temperature > 0, "above 0")
        self.temperature = temperature

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        advantage = centred(reward, group)
        if advantage.max() > 70 * self.temperature:  # times A, the end of float32
            raise InputError(
                f"model.loss: e^(A/temperature) overflows with A = {advantage.max():g}; raise temperature"
            )
        return advantage * np.exp(advantage / self.temperature)
