"""The losses of TOPR's family (arXiv:2503.14286, Table 1): one objective with other limits of the ratio."""

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from topr.io import InputError
from topr.losses.loss import Ratio, RatioLoss, check_baseline
from topr.losses.shares import baseline_from_rewards

LOG_INFINITY = 20.0  # b = infinity stands for b = e^20, continued linearly like every other b


class TOPR(RatioLoss):
    """The general truncated objective E_mu[A rho(pi/mu; a, b)] with limits for each sign; by default canonical TOPR.

    Its gradient is sum A [pi/mu]_a^b grad log pi (the paper's general form): positives weigh 1, negatives the
    sequence ratio clipped to [0, 1]. The loss of one trajectory is -A rho / T: divided by the response length, while
    the ratio is not length-normalised. No surrogate, no stop-gradient: `rho` is differentiated as it stands.

    Args:
        a_plus: lower limit of the ratio of positives.
        b_plus: upper limit of the ratio of positives; may be infinite.
        a_minus: lower limit for negatives. Above 0 the objective is unbounded above and the policy degenerates.
        b_minus: upper limit for negatives; may be infinite.
        baseline: c, subtracted from every reward.
        positive_share: effective share of positives, in place of `baseline`; c then follows from the data.
        ratio: `sequence` is the paper's. For comparison: `sequence_mean`, -A rho(e^(h/T)), and
            `token`, -(A/T) sum_t rho(r_t).

    Raises:
        InputError: a limit is negative, a > b, or both a baseline and a positive share are given.
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
            if None in (a, b) or not (0 <= a <= b and a <= largest and (b <= largest or b == math.inf)):
                raise InputError(
                    f"model.loss: limits a_{sign} = {a} and b_{sign} = {b} must satisfy 0 <= a <= b <= "
                    f"e^{LOG_INFINITY:.0f} or b = infinity (.inf); exchange or change them"
                )
        check_baseline(baseline)
        if positive_share is not None and baseline != 0:
            raise InputError(
                f"model.loss: both baseline = {baseline} and positive_share = {positive_share} are given; the share "
                "determines the baseline, so set one of them (baseline: 0 or positive_share: null)"
            )
        if positive_share is not None and not 0 < positive_share < 1:
            raise InputError(f"model.loss: positive_share is {positive_share}; it must lie strictly between 0 and 1")
        super().__init__(ratio)
        self.limits_plus, self.limits_minus = (a_plus, b_plus), (a_minus, b_minus)
        self.baseline, self.positive_share = baseline, positive_share

    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        """R - c, where c is the baseline or follows from `positive_share`; see `Loss.advantages`."""
        reward = reward.astype(np.float64)
        baseline = self.baseline
        if self.positive_share is not None:
            baseline = baseline_from_rewards(reward, self.positive_share)
        advantage = reward - baseline
        learns = (advantage > 0) & (self.limits_plus[1] > 0) | (advantage < 0) & (self.limits_minus[1] > 0)
        if not learns.any():
            raise InputError(
                f"data.train: no trajectory has a gradient under {type(self).__name__} with baseline {baseline:g} "
                f"(rewards {reward.min():g} to {reward.max():g}); train on data with other rewards or change the loss"
            )
        if (advantage >= 0).all() and self.limits_minus[1] > 0:
            hint = "; for 0/1 rewards set baseline: 0.5 or use rewards +1/-1" if set(reward) <= {0.0, 1.0} else ""
            warnings.warn(f"no trajectory has a negative advantage, so only positives are learned{hint}", stacklevel=2)
        elif (advantage < 0).all():
            warnings.warn("every trajectory has a negative advantage: nothing is learned from positives", stacklevel=2)
        return advantage.astype(np.float32)

    def of_ratio(self, log_ratio: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rho, the truncated ratio and whether pi/mu > b, each under the limits of its sign."""
        both = [
            (rho(log_ratio, a, b), truncated_ratio(log_ratio.detach(), a, b), log_ratio.detach() > log_limit(b) + 1e-4)
            for a, b in (self.limits_plus, self.limits_minus)
        ]
        return tuple(torch.where(positive, plus, minus).to(log_ratio.dtype) for plus, minus in zip(*both, strict=True))


class REINFORCE(TOPR):
    """Naive off-policy REINFORCE, all limits 1: unbounded above, it pushes negatives for ever and collapses."""

    def __init__(self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"):
        super().__init__(1, 1, 1, 1, baseline, positive_share, ratio)


class PositivesOnly(TOPR):
    """Supervised fine-tuning on positives (SFT, STaR, RFT): negatives weigh 0 but count in the divisor."""

    def __init__(self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"):
        super().__init__(1, 1, 0, 0, baseline, positive_share, ratio)


class IS(TOPR):
    """Off-policy REINFORCE with the untruncated importance ratio: unbiased, of exploding variance."""

    def __init__(self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"):
        super().__init__(0, math.inf, 0, math.inf, baseline, positive_share, ratio)


class TIS(TOPR):
    """Truncated importance sampling, ratios clipped to [0, 1] for both signs."""

    def __init__(self, baseline: float = 0.0, positive_share: float | None = None, ratio: Ratio = "sequence"):
        super().__init__(0, 1, 0, 1, baseline, positive_share, ratio)


def rho(log_x: Tensor, a: float, b: float) -> Tensor:
    """The taper rho(x; a, b), whose derivative with respect to log x is the truncated ratio [x]_a^b.

    x within the limits, b (1 + log(x/b)) above, a (1 + log(x/a)) below, identically 0 for b = 0. One expression
    serves the three pieces, so that no untaken branch can put a NaN or an Inf into value or gradient.
    """
    if b == 0:
        return 0 * log_x
    within = log_x.clamp(log_limit(a), log_limit(b))
    return within.exp() * (1 + log_x - within)


def truncated_ratio(log_x: Tensor, a: float, b: float) -> Tensor:
    """[x]_a^b = min(max(x, a), b)."""
    return log_x.clamp(log_limit(a), log_limit(b)).exp()


def log_limit(limit: float) -> float:
    """log of a limit: -inf for 0, `LOG_INFINITY` for infinity."""
    return min(math.log(limit), LOG_INFINITY) if limit > 0 else -math.inf
