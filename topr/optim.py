"""Adafactor (Shazeer & Stern, arXiv:1804.04235) with an absolute learning rate."""

from collections.abc import Iterable

import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class Adafactor(torch.optim.Optimizer):
    """Second moments factored into rows and columns, no first moment, updates clipped at root mean
    square 1.

    The learning rate is absolute, as the paper's 5e-7 means it: equal to transformers' `Adafactor`
    with `scale_parameter=False, relative_step=False`. That one and torch's fail under FSDP2, since
    they change partial DTensors in place.
    """

    def __init__(self, params: Iterable, lr: NonNegativeFloat = 5e-7):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter with a gradient."""
        with torch.enable_grad():
            loss = closure and closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(
                        scaled(parameter.grad.float(), self.state[parameter]) * group["lr"]
                    )
        return loss


def scaled(gradient: Tensor, state: dict) -> Tensor:
    """The gradient over the root of its second moment, clipped; the state is brought up to date."""
    state["step"] = state.get("step", torch.tensor(0.0)) + 1
    weight = state["step"].item() ** -0.8  # of the newest gradient; 1 at the first step

    def average(name, value):
        state[name] = state.get(name, value).lerp(value, weight)
        return state[name]

    squared = gradient.square() + 1e-30
    if squared.dim() > 1:
        row = average("row", whole(squared.mean(-1)))
        column = average("column", whole(squared.mean(-2)))
        row = row / row.mean(-1, keepdim=True)
        update = gradient * row.rsqrt().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
    else:
        update = gradient * average("both", squared).rsqrt()
    return update / update.square().mean().sqrt().clamp(min=1.0)


def whole(mean: Tensor) -> Tensor:
    """A mean, under FSDP2 on every rank that of all shards."""
    if isinstance(mean, DTensor):
        return mean.redistribute(placements=[Replicate()] * mean.device_mesh.ndim)
    return mean
