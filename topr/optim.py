"""Adafactor (Shazeer & Stern, arXiv:1804.04235) with an absolute learning rate, right under FSDP2; schedules."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

EPSILON = 1e-30  # added to squared gradients
SMALLEST_SCALE = 1e-3  # of a parameter, with `scale_parameter`


class Adafactor(torch.optim.Optimizer):
    """Second moments factored into rows and columns, no first moment, updates clipped at root mean square 1.

    The learning rate is absolute, as the paper's 5e-7 means it: equal to transformers' `Adafactor` with
    `scale_parameter=False, relative_step=False`. Only the parameter itself is written in place, since in-place
    operations on partial DTensors fail.

    Args:
        scale_parameter: multiply it by each parameter's root mean square and bound it by 1/sqrt(step), as torch does.
        weight_decay: decoupled, times the learning rate.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 5e-7,
        scale_parameter: bool = False,
        weight_decay: float = 0.0,
    ):
        if lr < 0 or weight_decay < 0:
            raise ValueError(
                f"Adafactor: lr = {lr} and weight_decay = {weight_decay} must not be negative"
            )
        super().__init__(
            params, {"lr": lr, "scale_parameter": scale_parameter, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter with a gradient."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), self.state[parameter], group)
        return loss

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        new = state["step"].item() ** -0.8  # 1 - beta2: the first step forgets its zeros entirely
        squared = gradient.square() + EPSILON
        factors = (
            {"row": squared.mean(-1), "column": squared.mean(-2)}
            if squared.dim() > 1
            else {"both": squared}
        )
        for name, value in factors.items():
            value = _whole(value) if name == "column" else value
            state[name] = value if name not in state else state[name] * (1 - new) + value * new
        if squared.dim() > 1:
            row = state["row"] / _whole(state["row"].mean(-1, keepdim=True))
            update = gradient * row.rsqrt().unsqueeze(-1) * state["column"].rsqrt().unsqueeze(-2)
        else:
            update = gradient * state["both"].rsqrt()
        update = update / _rms(update).clamp(min=1.0)
        rate = group["lr"]
        if group["scale_parameter"]:
            rate = min(rate, state["step"].item() ** -0.5) * _rms(parameter).clamp(
                min=SMALLEST_SCALE
            )
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update * rate)


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """A learning-rate schedule of transformers, by name.

    Args:
        name: `linear`, `cosine`, `constant_with_warmup` or another of transformers' `SchedulerType`.
        num_warmup_steps: updates over which the rate rises from 0.
        num_training_steps: updates of the whole run, which most schedules need.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str = "cosine",
        num_warmup_steps: NonNegativeInt = 0,
        num_training_steps: PositiveInt | None = None,
    ):
        from transformers import get_scheduler

        super().__init__(
            optimizer,
            get_scheduler(name, optimizer, num_warmup_steps, num_training_steps).lr_lambdas,
        )


def _whole(tensor: Tensor) -> Tensor:
    """A mean over shards, complete on every rank."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor


def _rms(tensor: Tensor) -> Tensor:
    return _whole(tensor.float().square().mean()).sqrt()
