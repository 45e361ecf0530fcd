"""TOPR and its family (arXiv:2503.14286, Table 1): one objective, J = E_mu[A rho(pi/mu; a, b)], with other limits.

Shapes and symbols: see `losses/base.py`.
"""

import math
import warnings
from abc import abstractmethod
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from topr.io import LARGEST, InputError
from topr.losses.advantages import baseline_for_rewards
from topr.losses.base import Loss, LossOutput, check_argument, sum_tokens

LOG_INFINITY = 20.0  # b = infinity stands for b = e^20, continued linearly like every other b
LOG_ZERO = -1e4  # its exponential is exactly 0
Ratio = Literal["sequence", "sequence_mean", "token"]


def rho(log_x: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """The taper rho(x; a, b), whose derivative with respect to log x is the truncated ratio [x]_a^b. x within the
    limits, b (1 + log(x/b)) above, a (1 + log(x/a)) below, identically 0 for b = 0. One expression covers the three
    pieces, so no untaken branch can put a NaN or an infinity into the value or the gradient."""
    within = log_x.clamp(log_limit(a), log_limit(b))
    return within.exp() * (1 + log_x - within)


def truncated_ratio(log_x: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """[x]_a^b = min(max(x, a), b)."""
    return log_x.clamp(log_limit(a), log_limit(b)).exp()


def log_limit(limit: Tensor | float) -> Any:
    """log of a limit: `LOG_INFINITY` for infinity, `LOG_ZERO` for 0."""
    if isinstance(limit, Tensor):
        return limit.log().clamp(LOG_ZERO, LOG_INFINITY)
    return min(math.log(limit), LOG_INFINITY) if limit > 0 else LOG_ZERO


class RatioLoss(Loss):
    """-A f(pi/mu; a, b) / T, limits by sign; `ratio: sequence`, the paper's, is that of all tokens. For comparison:
    `sequence_mean`, -A f(e^(h/T)), whose gradient carries the 1/T, and `token`, -(A/T) sum_t f(r_t)."""

    def __init__(
        self, ratio: Ratio, a: tuple[float, float], b: tuple[float, float], baseline: float
    ):
        check_argument(
            "ratio", ratio, ratio in get_args(Ratio), f"one of {', '.join(get_args(Ratio))}"
        )
        check_argument(
            "baseline", baseline, abs(baseline) <= LARGEST, f"finite, at most {LARGEST:.0f} in size"
        )
        self.ratio, self.a, self.b, self.baseline = (
            ratio,
            a,
            b,
            baseline,
        )  # limits of positives, of negatives

    @staticmethod
    @abstractmethod
    def f(log_x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f of a ratio x, differentiable with respect to log x; that derivative, detached; whether x is truncated."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_N = log_probs_N - ref_log_probs_N
        log_ratio_B = sum_tokens(log_ratio_N, length_B)  # h
        log_x, positive = log_ratio_B, advantage_B >= 0  # of each sequence, or of each token
        if self.ratio == "sequence_mean":
            log_x = log_ratio_B / length_B
        elif self.ratio == "token":
            log_x, positive = (
                log_ratio_N,
                positive.repeat_interleave(length_B, output_size=len(log_ratio_N)),
            )
        a, b = (
            log_x.new_full(log_x.shape, minus).masked_fill_(positive, plus)
            for plus, minus in (self.a, self.b)
        )
        values: Any = self.f(log_x, a, b)
        if self.ratio == "token":
            values = (sum_tokens(value_N.to(log_x), length_B) / length_B for value_N in values)
        f_B, weight_B, truncated_B = values
        objective_B = advantage_B * f_B
        loss_B = -objective_B / length_B if self.ratio == "sequence" else -objective_B
        return LossOutput(
            loss_B, objective_B.detach(), log_ratio_B.detach(), weight_B, truncated_B.to(weight_B)
        )


class TOPR(RatioLoss):
    """The truncated objective E_mu[A rho(pi/mu; a, b)] with limits for each sign; canonical TOPR by default.

    Its gradient is sum A [pi/mu]_a^b grad log pi: positives weigh 1, negatives the sequence ratio clipped to [0, 1].
    The loss of one trajectory is -A rho / T: divided by the response length, while the ratio is not length-normalised.

    Args:
        a_plus: lower limit of the ratio of positives.
        b_plus: upper limit of the ratio of positives; may be infinite.
        a_minus: lower limit for negatives. Above 0 the objective is unbounded above and the policy degenerates.
        b_minus: upper limit for negatives; may be infinite.
        baseline: c, subtracted from every reward.
        positive_share: effective share of positives, instead of `baseline`; c then follows from the data.
        ratio: `sequence` is the paper's; see `RatioLoss` for the others.
    """

    def __init__(
        self,
        a_plus: float = 1.0,
        b_plus: float = 1.0,
        a_minus: float = 0.0,
        b_minus: float = 1.0,
        baseline: float = 0.0,
        positive_share: float | None = None,
        ratio: Ratio = "sequence",
    ):
        for sign, a, b in (("plus", a_plus, b_plus), ("minus", a_minus, b_minus)):
            largest = math.exp(LOG_INFINITY)
            valid = (
                None not in (a, b) and 0 <= a <= b and a <= largest and not largest < b < math.inf
            )
            check_argument(
                f"[a_{sign}, b_{sign}]",
                [a, b],
                valid,
                f"0 <= a <= b <= e^{LOG_INFINITY:.0f} or b = .inf",
            )
        if positive_share is not None:
            check_argument(
                "positive_share", positive_share, 0 < positive_share < 1, "strictly between 0 and 1"
            )
            if baseline != 0:
                raise InputError(
                    "model.loss: both baseline and positive_share are given; remove one"
                )
        super().__init__(ratio, a=(a_plus, a_minus), b=(b_plus, b_minus), baseline=baseline)
        self.positive_share = positive_share

    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        """R - c, where c is the baseline or follows from `positive_share`; see `Loss.advantages`."""
        reward, share = reward.astype(np.float64), self.positive_share
        baseline = self.baseline if share is None else baseline_for_rewards(reward, share)
        advantage = reward - baseline
        learns = (advantage > 0) & (self.b[0] > 0) | (advantage < 0) & (self.b[1] > 0)
        if not learns.any():
            message = f"data.train: no trajectory has a gradient under {type(self).__name__} with baseline {baseline:g}"
            raise InputError(
                f"{message}, rewards {reward.min():g} to {reward.max():g}; change the data or the loss"
            )
        if (advantage >= 0).all() and self.b[1] > 0:
            hint = (
                "; for 0/1 rewards set baseline: 0.5 or use rewards +1/-1"
                if set(reward) <= {0.0, 1.0}
                else ""
            )
            warnings.warn(
                f"no trajectory has a negative advantage, so only positives are learned{hint}",
                stacklevel=2,
            )
        elif (advantage < 0).all():
            warnings.warn(
                "every trajectory has a negative advantage: nothing is learned from positives",
                stacklevel=2,
            )
        return advantage.astype(np.float32)

    @staticmethod
    def f(log_x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            rho(log_x, a, b),
            truncated_ratio(log_x.detach(), a, b),
            log_x.detach() > log_limit(b) + 1e-4,
        )


class REINFORCE(TOPR):
    """Naive off-policy REINFORCE, all limits 1: unbounded above, it pushes negatives without end and collapses."""

    def __init__(
        self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"
    ):
        super().__init__(1, 1, 1, 1, baseline, positive_share, ratio)


class PositivesOnly(TOPR):
    """Supervised fine-tuning on positives (SFT, STaR, RFT): negatives weigh 0 but count in the divisor."""

    def __init__(
        self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"
    ):
        super().__init__(1, 1, 0, 0, baseline, positive_share, ratio)


class IS(TOPR):
    """Off-policy REINFORCE with the untruncated importance ratio: unbiased, of exploding variance."""

    def __init__(
        self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"
    ):
        super().__init__(0, math.inf, 0, math.inf, baseline, positive_share, ratio)


class TIS(TOPR):
    """Truncated importance sampling: ratios clipped to [0, 1] for both signs."""

    def __init__(
        self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"
    ):
        super().__init__(0, 1, 0, 1, baseline, positive_share, ratio)
