"""What the processes of a distributed run say to each other."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from topr.io import InputError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Let a rank end with the process that started it, even by SIGKILL; what it has written is whole."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent()


def die_with_parent() -> None:
    """Let this process be killed when the one that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def rank() -> int:
    """Number of this process, 0 where there is but one."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in the order of the ranks."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm of all tensors together, the same on every rank where they are sharded."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def refuse(error: InputError | None) -> None:
    """Let every rank end when one has an error, and the first alone tell it; all ranks have to call.

    Raises:
        InputError: on rank 0, the first error of any rank.
        SystemExit: on the others, with code 0: a launcher would kill rank 0 before it has spoken.
    """
    errors = [found for found in gather(error and str(error)) if found]
    if not errors:
        return
    if rank():
        raise SystemExit(0)
    raise type(error or InputError())(errors[0]) from error
