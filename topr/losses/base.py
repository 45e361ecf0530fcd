"""What every loss is: a function of log-probs, lengths and advantages that returns one loss for
each trajectory.

Shapes: B trajectories, T sampled tokens of one trajectory, N sampled tokens of all B laid end to
end; those of users and tools within a response do not count. Symbols: mu sampled the trajectory, pi
is trained. h = log pi(y|x) - log mu(y|x) is a SUM over the sampled tokens, and e^h the ratio pi/mu.
A is the advantage: positives have A >= 0, negatives A < 0.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from topr.io import InputError
from topr.io.settings import Configurable


class LossOutput(NamedTuple):
    """Loss and statistics of each trajectory. Only `loss_B` has a gradient."""

    loss_B: Tensor  # the caller divides the sum by the trajectories of the global batch
    # what is maximised: of TOPR A rho(pi/mu), before the division by T; of token ratios A times
    # their mean rho
    objective_B: Tensor
    log_ratio_B: Tensor  # h
    weight_B: Tensor  # what multiplies A grad log pi; of token ratios the mean
    truncated_B: Tensor  # 1 where the ratio is truncated or masked; of token ratios the share


class Loss(Configurable, ABC):
    """A loss on stored trajectories.

    `batching` says what must lie in one batch: `trajectories` in any order, or `pairs` of a
    positive and a negative of one prompt, neighbours in this order. Except for pairs, the loss of
    a trajectory depends on that trajectory and its advantage alone. With
    `refuses_zero_advantages`, no advantage may be 0: the loss sees signs only.
    """

    batching: Literal["trajectories", "pairs"] = "trajectories"
    refuses_zero_advantages = False

    @abstractmethod
    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        """The losses of B trajectories.

        Args:
            log_probs_N: log pi of each sampled token, differentiable.
            ref_log_probs_N: log mu of each sampled token, as stored.
            length_B: T, integers that sum to N.
            advantage_B: A; see `topr.advantages`.
        """


def sum_tokens(value_N: Tensor, length_B: Tensor) -> Tensor:
    """Sums over the tokens of each trajectory, [B]."""
    # unsafe: the checks would make the host wait for the device, in every forward
    return torch.segment_reduce(value_N, "sum", lengths=length_B, unsafe=True)


def mean_tokens(value_N: Tensor, length_B: Tensor) -> Tensor:
    """Means over the tokens of each trajectory, [B]."""
    return sum_tokens(value_N, length_B) / length_B


def whole_response_output(loss_B: Tensor, log_ratio_B: Tensor, weight_B: Tensor) -> LossOutput:
    """The output of a loss of whole responses that maximises -loss and truncates nothing."""
    return LossOutput(
        loss_B,
        -loss_B.detach(),
        log_ratio_B.detach(),
        weight_B.detach(),
        torch.zeros_like(log_ratio_B),
    )


def check_output(loss: Loss):
    """Call a loss on a positive and a negative; raise an InputError unless its output is right."""
    length_B = torch.tensor([2, 2])
    advantage_B = torch.tensor([1.0, -1.0])
    output = loss(torch.zeros(4, requires_grad=True), torch.zeros(4), length_B, advantage_B)
    expected = f"model.loss: {type(loss).__name__} must return a LossOutput"
    if not isinstance(output, LossOutput):
        raise InputError(f"{expected}, not {type(output).__name__}")
    for name, value in output._asdict().items():
        if getattr(value, "shape", None) != length_B.shape:
            raise InputError(f"{expected} with one value per trajectory in {name}")
        if value.requires_grad != (name == "loss_B"):
            raise InputError(f"{expected} in which loss_B alone has a gradient; see {name}")
