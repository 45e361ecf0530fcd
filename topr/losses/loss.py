"""What every loss is: pure, tensors in, one loss per trajectory out; and what several of them share.

Shapes: B trajectories, T response tokens of one trajectory, N response tokens of all B laid end to end.
Symbols: mu sampled the trajectory, pi is trained, h = log pi(y|x) - log mu(y|x) is a SUM over the response tokens,
R the reward, c the baseline, A = R - c the advantage. T+ holds A >= 0, T- holds A < 0.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from topr.io import InputError

LARGEST = 1e6  # of rewards, baselines and log-probs: sums of them are squared in float32

Ratio = Literal["sequence", "sequence_mean", "token"]


class LossOutput(NamedTuple):
    """What a loss says of each trajectory; all but `loss_B` are detached."""

    loss_B: Tensor  # differentiable; the caller sums it and divides by the global number of trajectories (or pairs)
    objective_B: Tensor  # what is maximised, before any division by T: A rho(pi/mu), the term of the paper's J
    log_ratio_B: Tensor  # h
    weight_B: Tensor  # what multiplies A grad log pi: the truncated ratio [pi/mu]_a^b; of token ratios the mean
    truncated_B: Tensor  # 1 where pi/mu > b, or the ratio is clipped or masked; for token ratios the share of tokens


class Loss(ABC):
    """A loss on stored trajectories. `grouping` tells the epoch plan what must lie in one global batch:

    `none`, whole groups (`group`: all trajectories of one prompt), or pairs of a positive and a negative (`pair`),
    neighbours in this order. But for pairs, a trajectory's loss depends on that trajectory and its advantage alone.
    """

    grouping: Literal["none", "group", "pair"] = "none"

    @abstractmethod
    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        """Advantages of the whole data set, float32.

        Args:
            reward: rewards, [trajectories].
            group: integer id of each trajectory's group, [trajectories].
            seed: of what a loss draws, with `epoch`.
            epoch: counted from 0.

        Raises:
            InputError: the rewards leave this loss nothing to learn from.
        """

    @abstractmethod
    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        """Losses of B trajectories.

        Args:
            log_probs_N: log pi of each response token, differentiable.
            ref_log_probs_N: log mu of each response token.
            length_B: response tokens of each trajectory, T; they sum to N.
            advantage_B: A.
        """


class RatioLoss(Loss):
    """-A f(pi/mu) / T for some f of the ratio of the whole sequence, `ratio: sequence`.

    `sequence_mean` is -A f(e^(h/T)), whose gradient carries the 1/T; `token` is -(A/T) sum_t f(r_t).

    Raises:
        InputError: there is no such ratio.
    """

    def __init__(self, ratio: Ratio):
        if ratio not in Ratio.__args__:
            raise InputError(f"model.loss: ratio is {ratio!r}; choose one of {', '.join(Ratio.__args__)}")
        self.ratio = ratio

    @abstractmethod
    def of_ratio(self, log_ratio: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f, differentiable; its slope with respect to the log-ratio; whether the ratio is truncated."""

    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        log_ratio_N = log_probs_N - ref_log_probs_N
        log_ratio_B = sum_tokens(log_ratio_N, length_B)
        positive_B = advantage_B >= 0
        if self.ratio == "token":
            found = self.of_ratio(log_ratio_N, spread(positive_B, length_B, log_ratio_N))
            f_B, weight_B, truncated_B = (mean_tokens(value_N.to(log_ratio_N), length_B) for value_N in found)
            loss_B = -advantage_B * f_B
        elif self.ratio == "sequence_mean":
            f_B, weight_B, truncated_B = self.of_ratio(log_ratio_B / length_B, positive_B)
            loss_B = -advantage_B * f_B
        else:
            f_B, weight_B, truncated_B = self.of_ratio(log_ratio_B, positive_B)
            loss_B = -advantage_B * f_B / length_B
        objective_B = (advantage_B * f_B).detach()
        return LossOutput(loss_B, objective_B, log_ratio_B.detach(), weight_B, truncated_B.to(weight_B))


def sum_tokens(value_N: Tensor, length_B: Tensor) -> Tensor:
    """Sums [B] over each trajectory's tokens of flat values [N]."""
    return torch.segment_reduce(value_N, "sum", lengths=length_B)


def mean_tokens(value_N: Tensor, length_B: Tensor) -> Tensor:
    """Means [B] over each trajectory's tokens of flat values [N]."""
    return sum_tokens(value_N, length_B) / length_B


def spread(value_B: Tensor, length_B: Tensor, like_N: Tensor) -> Tensor:
    """Each trajectory's value at each of its tokens, [N] as `like_N`."""
    return value_B.repeat_interleave(length_B, output_size=len(like_N))


def checked(loss: Loss, advantage: np.ndarray) -> np.ndarray:
    """Advantages in float32.

    Raises:
        InputError: all of them are 0.
    """
    if not advantage.any():
        of = "no group holds rewards that differ" if loss.grouping == "group" else "every advantage is 0"
        raise InputError(
            f"data.train: {of}, which leaves {type(loss).__name__} nothing to learn; sample more responses to each "
            "prompt, or choose another loss"
        )
    return advantage.astype(np.float32)


def check_clips(**clips: float) -> None:
    """Refuse bounds of a clip that are negative or NaN; infinity is none."""
    for name, value in clips.items():
        if not value >= 0:
            raise InputError(f"model.loss: {name} is {value}; it must be at least 0, and .inf clips nothing")


def check_baseline(baseline: float) -> None:
    """Refuse a baseline beyond `LARGEST`."""
    if not abs(baseline) <= LARGEST:
        raise InputError(
            f"model.loss: baseline is {baseline}; it must be finite, between -{LARGEST:.0f} and {LARGEST:.0f}"
        )
