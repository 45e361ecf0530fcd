"""Policy gradients that TOPR is compared with; the stored log mu stands in for the old policy.

Shapes and symbols: see `losses/base.py`. r is the ratio of a token, s = e^(h/T), sg() stops
the gradient.
"""

import math
from abc import abstractmethod

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

from topr.losses.base import Loss, LossOutput, mean_tokens, sum_tokens, whole_response_output
from topr.losses.topr import LOG_INFINITY, LOG_ZERO, Ratio, RatioLoss, Tapered, rho


def exp_ratio(log_x: Tensor) -> Tensor:
    """The ratio, detached, at most e^20 so that it stays finite."""
    return log_x.detach().clamp(LOG_ZERO, LOG_INFINITY).exp()


class PPO(RatioLoss):
    """-(1/T) sum_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), offline, without KL and
    critic (arXiv:1707.06347).

    With advantages normalised by group it is GRPO (arXiv:2402.03300). With `ratio: sequence_mean`
    also GSPO (arXiv:2507.18071), -min(s A, clip(s) A), where s carries the 1/T. See `RatioLoss`.
    """

    def __init__(
        self,
        clip_low: NonNegativeFloat = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        ratio: Ratio = "token",
    ):
        super().__init__(ratio)
        self.low = 1 - clip_low
        self.high = 1 + clip_high

    def taper(self, log_x, positive) -> Tapered:
        ratio = rho(log_x, LOG_ZERO, LOG_INFINITY)
        # min(r A, clip(r) A) / A: positives are clipped from above only, negatives from below only
        value = torch.where(positive, ratio.clamp(max=self.high), ratio.clamp(min=self.low))
        weight = exp_ratio(log_x)
        clipped = torch.where(positive, weight > self.high, weight < self.low)
        return Tapered(value, weight * ~clipped, clipped.to(log_x))


class MaskedPPO(PPO):
    """PPO that drops negatives which have become unlikely, those with h/T < -delta: the off-policy
    sequence masking of DeepSeek-V3.2 (arXiv:2512.02556, Eq. 8 and 9), without its KL term.

    A dropped trajectory still counts in the divisor. The paper gives no delta; TRL suggests 0.5.
    """

    def __init__(
        self,
        clip_low: NonNegativeFloat = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        delta: NonNegativeFloat = 0.5,
    ):
        super().__init__(clip_low, clip_high)
        self.delta = delta

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        output = super().__call__(log_probs_N, ref_log_probs_N, length_B, advantage_B)
        kept_B = (advantage_B >= 0) | (output.log_ratio_B / length_B >= -self.delta)
        return output._replace(
            loss_B=output.loss_B * kept_B,
            objective_B=output.objective_B * kept_B,
            weight_B=output.weight_B * kept_B,
            truncated_B=output.truncated_B.where(kept_B, 1.0),
        )


class VESPO(RatioLoss):
    """-A sg(phi(W)) log(W) / T with W = pi/mu and phi(W) = W^k e^(lambda (1 - W)): a smooth weight
    that is 1 on policy and fades far from it, on both sides (arXiv:2602.10693, Eq. 20).

    Eq. 20 has no 1/T; here the loss is divided by T, like TOPR's.

    Args:
        k_plus: of positives; the larger, the faster phi fades below W = 1.
        lambda_plus: of positives; the larger, the faster phi fades above W = 1.
        k_minus: of negatives.
        lambda_minus: of negatives.
        ratio: `sequence` is the paper's; see `RatioLoss` for the others.
    """

    def __init__(
        self,
        k_plus: PositiveFloat = 2.0,
        lambda_plus: PositiveFloat = 3.0,
        k_minus: PositiveFloat = 3.0,
        lambda_minus: PositiveFloat = 2.0,
        ratio: Ratio = "sequence",
    ):
        super().__init__(ratio)
        self.k_plus = k_plus
        self.lambda_plus = lambda_plus
        self.k_minus = k_minus
        self.lambda_minus = lambda_minus

    def taper(self, log_x, positive) -> Tapered:
        k = torch.where(positive, self.k_plus, self.k_minus)
        rate = torch.where(positive, self.lambda_plus, self.lambda_minus)
        log_weight = k * log_x.detach() + rate * (1 - exp_ratio(log_x))
        weight = log_weight.exp()
        return Tapered(weight * log_x, weight, torch.zeros_like(weight))


class WeightedLoss(Loss):
    """-(1/T) sum_t A sg(w_t) log pi_t: a policy gradient whose weights are not differentiated."""

    @abstractmethod
    def weights(self, ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        """w_t, and whether it is clipped or masked; from r_t (detached) and A of each token."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_N = (log_probs_N - ref_log_probs_N).detach()
        advantage_N = advantage_B.repeat_interleave(length_B, output_size=len(log_ratio_N))
        weight_N, truncated_N = self.weights(exp_ratio(log_ratio_N), advantage_N)
        objective_B = advantage_B * sum_tokens(weight_N * log_probs_N, length_B)
        return LossOutput(
            -objective_B / length_B,
            objective_B.detach(),
            sum_tokens(log_ratio_N, length_B),
            mean_tokens(weight_N, length_B),
            mean_tokens(truncated_N.to(weight_N), length_B),
        )


class NFT(WeightedLoss):
    """w = 1 for positives, r / max(q, epsilon) for negatives, where q = (1 - p r) / (1 - p), p the
    share of right answers in the group (arXiv:2505.18116, Eq. 10 with prompt weight 1 - p).

    It needs rewards of +-1 and `GroupMean`: A is 2 (1 - p) for right answers, -2 p for wrong ones.
    p is at most 0.98, as in the authors' code. The gradient is twice the paper's, with the mean
    over tokens in place of their sum; the value is that of the weights, not of log r and log q.
    """

    def __init__(self, epsilon: PositiveFloat = 1.0):
        self.epsilon = epsilon

    def weights(self, ratio_N, advantage_N):
        negative_N = advantage_N < 0
        share_N = (-advantage_N / 2).clamp(max=0.98)
        quotient_N = (1 - share_N * ratio_N) / (1 - share_N)
        weight_N = torch.where(negative_N, ratio_N / quotient_N.clamp(min=self.epsilon), 1.0)
        return weight_N, negative_N & (quotient_N < self.epsilon)


class ClippedLoss(WeightedLoss):
    """Weights that depend on whether r lies within bounds.

    Args:
        clip_low: the lower bound of r is 1 - clip_low.
        clip_high: the upper bound of r is 1 + clip_high.
    """

    def __init__(self, clip_low: NonNegativeFloat = 0.2, clip_high: NonNegativeFloat = 0.2):
        self.low = 1 - clip_low
        self.high = 1 + clip_high


class CISPO(ClippedLoss):
    """w = clip(r, 1 - clip_low, 1 + clip_high); no token is dropped (MiniMax-M1,
    arXiv:2506.13585)."""

    def weights(self, ratio_N, advantage_N):
        clipped_N = ratio_N.clamp(self.low, self.high)
        return clipped_N, clipped_N != ratio_N


class REC(ClippedLoss):
    """w = M_t, a mask that stands for clipping (arXiv:2509.24203)."""

    @abstractmethod
    def mask(self, ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
        """M_t, boolean."""

    def weights(self, ratio_N, advantage_N):
        mask_N = self.mask(ratio_N, advantage_N)
        return mask_N.to(ratio_N), ~mask_N


class RECOneSide(REC):
    """M: r <= 1 + clip_high for A >= 0, r >= 1 - clip_low for A <= 0. Weighted by r it would have
    PPO's gradient."""

    def mask(self, ratio_N, advantage_N):
        positive_N = (advantage_N >= 0) & (ratio_N <= self.high)
        negative_N = (advantage_N <= 0) & (ratio_N >= self.low)
        return positive_N | negative_N


class RECTwoSide(REC):
    """M: 1 - clip_low <= r <= 1 + clip_high."""

    def mask(self, ratio_N, advantage_N):
        return (ratio_N >= self.low) & (ratio_N <= self.high)


class RECRing(RECTwoSide):
    """M: both sides, and tokens that lag far behind: r <= 1 - outer_low for A >= 0, or
    r >= 1 + outer_high for A <= 0."""

    def __init__(
        self,
        clip_low: NonNegativeFloat = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        outer_low: NonNegativeFloat = 0.6,
        outer_high: NonNegativeFloat = 2.0,
    ):
        super().__init__(clip_low, clip_high)
        self.outer_low = 1 - outer_low
        self.outer_high = 1 + outer_high

    def mask(self, ratio_N, advantage_N):
        positive_N = (advantage_N >= 0) & (ratio_N <= self.outer_low)
        negative_N = (advantage_N <= 0) & (ratio_N >= self.outer_high)
        return super().mask(ratio_N, advantage_N) | positive_N | negative_N


class OPMD(Loss):
    """-A log pi + (tau/2) h^2 on whole sequences, without 1/T (Kimi k1.5, arXiv:2501.12599)."""

    def __init__(self, tau: NonNegativeFloat = 0.1):
        self.tau = tau

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        penalty_B = self.tau / 2 * log_ratio_B.square()
        loss_B = penalty_B - advantage_B * sum_tokens(log_probs_N, length_B)
        weight_B = torch.ones_like(log_ratio_B)  # of the first term
        return whole_response_output(loss_B, log_ratio_B, weight_B)


class QRPO(Loss):
    """(R_q - beta log Z - beta h)^2 on whole sequences, without 1/T, where R_q is the quantile of R
    among rewards of mu (arXiv:2507.08068, Algorithm 1).

    `GroupQuantile` gives A = R_q - 1. Of Z = beta (e^(1/beta) - 1) the -1 is left out, as in the
    paper, which needs a small beta: beta log Z = beta log beta + 1.
    """

    def __init__(self, beta: PositiveFloat = 0.003):
        self.beta = beta

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        residual_B = advantage_B - self.beta * (math.log(self.beta) + log_ratio_B)
        weight_B = 2 * self.beta * residual_B.abs()
        return whole_response_output(residual_B.square(), log_ratio_B, weight_B)
