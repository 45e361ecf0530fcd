"""The losses of TOPR's family (arXiv:2503.14286, Table 1), pure: tensors in, one loss per trajectory out.

Shapes: B trajectories, T response tokens of one trajectory, N response tokens of all B laid end to end.
Symbols: mu sampled the trajectory, pi is trained, h = log pi(y|x) - log mu(y|x) is a SUM over the response tokens,
R the reward, c the baseline, A = R - c the advantage. T+ holds A >= 0, T- holds A < 0.
"""

import math
import warnings
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from topr.io import InputError

LARGEST = 1e6  # of rewards, baselines and log-probs: sums of them are squared in float32

LOG_INFINITY = 20.0  # b = infinity stands for b = e^20, continued linearly like every other b

Ratio = Literal["sequence", "sequence_mean", "token"]


class LossOutput(NamedTuple):
    """What a loss says of each trajectory; all but `loss_B` are detached."""

    loss_B: Tensor  # differentiable; the caller sums it and divides by the global number of trajectories
    objective_B: Tensor  # A rho(pi/mu), the trajectory's term of the paper's J
    log_ratio_B: Tensor  # h
    weight_B: Tensor  # the truncated ratio [pi/mu]_a^b that multiplies A grad log pi
    truncated_B: Tensor  # 1 where pi/mu > b, for token ratios the share of such tokens


class Loss(ABC):
    """A loss on stored trajectories. `grouping` tells the epoch plan what must lie in one global batch:

    `none`, whole groups (`group`: all trajectories of one prompt), or pairs of a positive and a negative (`pair`).
    """

    grouping: Literal["none", "group", "pair"] = "none"

    @abstractmethod
    def advantages(self, reward: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Advantages of the whole data set, float32.

        Args:
            reward: rewards, [trajectories].
            group: integer id of each trajectory's group, [trajectories].

        Raises:
            InputError: the rewards leave this loss nothing to learn from.
        """

    @abstractmethod
    def __call__(self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor):
        """Losses of B trajectories, as a `LossOutput`.

        Args:
            log_probs_N: log pi of each response token, differentiable.
            ref_log_probs_N: log mu of each response token.
            length_B: response tokens of each trajectory, T; they sum to N.
            advantage_B: A.
        """


class TOPR(Loss):
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
        if not abs(baseline) <= LARGEST:
            raise InputError(
                f"model.loss: baseline is {baseline}; it must be finite, between -{LARGEST:.0f} and {LARGEST:.0f}"
            )
        if positive_share is not None and baseline != 0:
            raise InputError(
                f"model.loss: both baseline = {baseline} and positive_share = {positive_share} are given; the share "
                "determines the baseline, so set one of them (baseline: 0 or positive_share: null)"
            )
        if positive_share is not None and not 0 < positive_share < 1:
            raise InputError(f"model.loss: positive_share is {positive_share}; it must lie strictly between 0 and 1")
        if ratio not in Ratio.__args__:
            raise InputError(f"model.loss: ratio is {ratio!r}; choose one of {', '.join(Ratio.__args__)}")
        self.limits_plus, self.limits_minus = (a_plus, b_plus), (a_minus, b_minus)
        self.baseline, self.positive_share, self.ratio = baseline, positive_share, ratio

    def advantages(self, reward: np.ndarray, group: np.ndarray) -> np.ndarray:
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

    def __call__(self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor):
        log_ratio_N = log_probs_N - ref_log_probs_N
        log_ratio_B = sum_tokens(log_ratio_N, length_B)
        positive_B = advantage_B >= 0
        if self.ratio == "token":
            positive_N = positive_B.repeat_interleave(length_B, output_size=len(log_ratio_N))
            rho_B, weight_B, truncated_B = (
                sum_tokens(value_N, length_B) / length_B for value_N in self._truncate(log_ratio_N, positive_N)
            )
            loss_B = -advantage_B * rho_B
        elif self.ratio == "sequence_mean":
            rho_B, weight_B, truncated_B = self._truncate(log_ratio_B / length_B, positive_B)
            loss_B = -advantage_B * rho_B
        else:
            rho_B, weight_B, truncated_B = self._truncate(log_ratio_B, positive_B)
            loss_B = -advantage_B * rho_B / length_B
        objective_B = (advantage_B * rho_B).detach()
        return LossOutput(loss_B, objective_B, log_ratio_B.detach(), weight_B, truncated_B)

    def _truncate(self, log_ratio: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rho, weight and truncation flag, each element under the limits of its sign."""
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


def sum_tokens(value_N: Tensor, length_B: Tensor) -> Tensor:
    """Sums [B] over each trajectory's tokens of flat values [N]."""
    return torch.segment_reduce(value_N, "sum", lengths=length_B)


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
