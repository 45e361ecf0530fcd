"""TOPR and its family (arXiv:2503.14286): one objective, J = E_mu[A rho(pi/mu; a, b)].

The members of the family differ only in the limits a and b (the paper's Table 1).
Shapes and symbols: see `losses/base.py`. x is a ratio pi/mu, [x]_a^b = min(max(x, a), b).
"""

import math
from abc import abstractmethod
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from topr.io import InputError
from topr.losses.base import Loss, LossOutput, mean_tokens, sum_tokens

LOG_INFINITY = 20.0  # b = infinity stands for b = e^20; above any b, rho is linear in log x
LOG_ZERO = -1e4  # its exponential is exactly 0
TOLERANCE = 1e-4  # rounding in h, which must not count as truncated on policy

Ratio = Literal["sequence", "sequence_mean", "token"]
Limit = TypeVar("Limit", Tensor, float)


def log_limit(limit: float) -> float:
    """The log of a limit of the ratio; finite for 0 and for infinity."""
    if limit == 0:
        return LOG_ZERO
    return min(math.log(limit), LOG_INFINITY)


def rho(log_x: Tensor, log_a: Limit, log_b: Limit) -> Tensor:
    """The taper rho(x; a, b); its derivative with respect to log x is [x]_a^b.

    x within the limits, b (1 + log(x/b)) above, a (1 + log(x/a)) below, and 0 for b = 0. One
    expression covers all pieces, so no untaken branch can cause a NaN in the value or the gradient.
    """
    within = log_x.clamp(log_a, log_b)
    return within.exp() * (1 + log_x - within)


class Tapered(NamedTuple):
    """A function f of ratios x, of sequences [B] or of tokens [N]."""

    value: Tensor  # f(x), differentiable
    weight: Tensor  # its derivative with respect to log x
    truncated: Tensor  # whether x is truncated: 0 or 1


class RatioLoss(Loss):
    """-A f(pi/mu) / T, where f may differ between positives and negatives.

    `ratio: sequence`, the paper's, is the ratio of the whole response. The others are for
    comparison: `sequence_mean`, -A f(e^(h/T)), has the 1/T in its gradient, and `token` is
    -(A/T) sum_t f(r_t) with the ratios r_t of tokens.
    """

    def __init__(self, ratio: Ratio):
        if ratio not in get_args(Ratio):
            raise InputError(f"model.loss: ratio is {ratio!r}, not one of {get_args(Ratio)}")
        self.ratio = ratio

    @abstractmethod
    def taper(self, log_x: Tensor, positive: Tensor) -> Tapered:
        """f of the ratios with these logs; `positive` is True where A >= 0."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_N = log_probs_N - ref_log_probs_N
        log_ratio_B = sum_tokens(log_ratio_N, length_B)  # h
        positive_B = advantage_B >= 0
        if self.ratio == "token":
            positive_N = positive_B.repeat_interleave(length_B, output_size=len(log_ratio_N))
            tapered_N = self.taper(log_ratio_N, positive_N)
            f_B, weight_B, truncated_B = [mean_tokens(value_N, length_B) for value_N in tapered_N]
        elif self.ratio == "sequence_mean":
            f_B, weight_B, truncated_B = self.taper(log_ratio_B / length_B, positive_B)
        else:
            f_B, weight_B, truncated_B = self.taper(log_ratio_B, positive_B)
        objective_B = advantage_B * f_B
        loss_B = -objective_B
        if self.ratio == "sequence":
            loss_B = loss_B / length_B
        return LossOutput(loss_B, objective_B.detach(), log_ratio_B.detach(), weight_B, truncated_B)


class TOPR(RatioLoss):
    """The truncated objective E_mu[A rho(pi/mu; a, b)]; canonical TOPR by default.

    Its gradient is E_mu[A [pi/mu]_a^b grad log pi]: positives weigh 1, negatives their sequence
    ratio clipped to [0, 1]. The loss of a trajectory is -A rho / T: it is divided by the response
    length, while the ratio is not length-normalised.

    Args:
        a_plus: lower limit of the ratio of positives.
        b_plus: upper limit of the ratio of positives; may be infinite.
        a_minus: lower limit for negatives. Above 0 the policy degenerates in the end.
        b_minus: upper limit for negatives; may be infinite.
        ratio: `sequence` is the paper's; see `RatioLoss` for the others.
    """

    def __init__(
        self,
        a_plus: float = 1.0,
        b_plus: float = 1.0,
        a_minus: float = 0.0,
        b_minus: float = 1.0,
        ratio: Ratio = "sequence",
    ):
        super().__init__(ratio)
        if not (0 <= a_plus <= b_plus and 0 <= a_minus <= b_minus):
            raise InputError("model.loss: the limits of a ratio must be 0 <= a <= b")
        self.log_a_plus = log_limit(a_plus)
        self.log_b_plus = log_limit(b_plus)
        self.log_a_minus = log_limit(a_minus)
        self.log_b_minus = log_limit(b_minus)

    def taper(self, log_x, positive) -> Tapered:
        log_a = torch.full_like(log_x, self.log_a_minus).masked_fill(positive, self.log_a_plus)
        log_b = torch.full_like(log_x, self.log_b_minus).masked_fill(positive, self.log_b_plus)
        truncated_ratio = log_x.detach().clamp(log_a, log_b).exp()
        truncated = log_x > log_b + TOLERANCE
        return Tapered(rho(log_x, log_a, log_b), truncated_ratio, truncated.to(log_x))


class Preset(TOPR):
    """A member of the family: `limits` are its a_plus, b_plus, a_minus, b_minus."""

    limits: tuple[float, float, float, float]

    def __init__(self, ratio: Ratio = "sequence"):
        super().__init__(*self.limits, ratio)


class REINFORCE(Preset):
    """Naive off-policy REINFORCE. It pushes negatives without end and collapses."""

    limits = (1, 1, 1, 1)


class PositivesOnly(Preset):
    """Supervised fine-tuning on positives (SFT, STaR, RFT). Negatives count only in the divisor."""

    limits = (1, 1, 0, 0)


class IS(Preset):
    """Off-policy REINFORCE with the untruncated importance ratio: unbiased, exploding variance."""

    limits = (0, math.inf, 0, math.inf)


class TIS(Preset):
    """Truncated importance sampling: ratios clipped to [0, 1] for both signs."""

    limits = (0, 1, 0, 1)
