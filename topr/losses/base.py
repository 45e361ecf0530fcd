"""What every loss is: tensors in, one loss per trajectory out.

Shapes: B trajectories, T response tokens of one trajectory, N response tokens of all B laid end to end.
Symbols: mu sampled the trajectory, pi is trained, h = log pi(y|x) - log mu(y|x) is a SUM over the response tokens,
R the reward, c the baseline, A = R - c the advantage. T+ holds A >= 0, T- holds A < 0.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from topr.io import InputError

Grouping = Literal["none", "group", "pair"]


class LossOutput(NamedTuple):
    """Loss and statistics of each trajectory; all but `loss_B` are detached."""

    loss_B: Tensor  # differentiable; the caller sums it and divides by the global number of trajectories (or pairs)
    objective_B: Tensor  # what is maximised, before any division by T: A rho(pi/mu), the term of the paper's J
    log_ratio_B: Tensor  # h
    weight_B: Tensor  # what multiplies A grad log pi: the truncated ratio [pi/mu]_a^b; of token ratios the mean
    truncated_B: Tensor  # 1 where pi/mu > b, or the ratio is clipped or masked; for token ratios the share of tokens


class Loss(ABC):
    """A loss on stored trajectories. `grouping` names what must lie in one global batch: nothing (`none`), all
    trajectories of a prompt (`group`), or pairs of a positive and a negative, neighbours in this order (`pair`). Except
    for pairs, the loss of a trajectory depends on that trajectory and its advantage alone."""

    grouping: Grouping = "none"

    @abstractmethod
    def advantages(
        self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> np.ndarray:
        """Advantages from rewards and group numbers, all [trajectories] of the whole data set; stored in float32. A
        loss that draws at random uses `seed` and `epoch`, counted from 0. The data module rejects all zeros."""

    @abstractmethod
    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        """Losses of B trajectories; `log_probs_N` (log pi) is differentiable, `length_B` holds T and sums to N."""


def check_output(loss: Loss) -> None:
    """Raise an InputError unless a loss returns what it should for two trajectories, a positive and a negative."""
    log_probs_N = torch.zeros(4, requires_grad=True)
    output = loss(log_probs_N, torch.zeros(4), torch.tensor([2, 2]), torch.tensor([1.0, -1.0]))
    found = type(output).__name__
    if isinstance(output, LossOutput):
        sizes = {
            name: tuple(getattr(value, "shape", ("?",))) for name, value in output._asdict().items()
        }
        found = ", ".join(f"{name} {list(size)}" for name, size in sizes.items() if size != (2,))
        found = found or "a loss_B without a gradient" * (not output.loss_B.requires_grad)
    if found:
        expected = f"LossOutput({', '.join(LossOutput._fields)}), tensors of one value per trajectory, here [2]"
        raise InputError(
            f"model.loss: {type(loss).__name__} must return {expected}, but gave {found}"
        )


def sum_tokens(value_N: Tensor, length_B: Tensor) -> Tensor:
    """Sums [B] over each trajectory's tokens of flat values [N]."""
    return torch.segment_reduce(value_N, "sum", lengths=length_B)


def check_argument(name: str, value: Any, valid: bool, expected: str) -> None:
    """Raise an InputError that names the argument of a loss unless it is valid."""
    if not valid:
        raise InputError(f"model.loss: {name} is {value}; it must be {expected}")


def check_clips(**clips: float) -> None:
    """Raise an InputError unless every clip bound is at least 0."""
    for name, value in clips.items():
        check_argument(name, value, value >= 0, "at least 0, and .inf clips nothing")
