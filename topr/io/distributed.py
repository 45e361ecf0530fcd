"""Collectives for small Python objects and errors; signals between the processes of a run."""

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from topr.io import InputError

# set by a signal handler; training and sampling ask it at every update and token
stop_requested = threading.Event()


class Preempted(SystemExit):
    """The run was asked to stop; its exit code is that of a process ended by SIGTERM."""

    code = 143


def end_rank_with_launcher():
    """End a rank together with the process that started it, even by SIGKILL; files it has written
    are complete."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent()


def die_with_parent():
    """Have the kernel kill this process when the one that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# a thread of gloo that outlives the interpreter can abort the process (pytorch/pytorch#179291)
@atexit.register
def leave_group():
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def rank() -> int:
    """Rank of this process, 0 if it is the only one."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """Number of processes of the run."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def gather(value) -> list[Any]:
    """`value` of every rank, in the order of the ranks."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def end_all_ranks_on_error() -> Iterator[None]:
    """If the block raises an InputError on any rank, rank 0 raises it, and the other ranks exit
    with code 0. All ranks must enter the block."""
    error = None
    try:
        yield
    except InputError as found:
        error = found
    messages = [message for message in gather(error and str(error)) if message]
    if not messages:
        return
    if rank() > 0:
        # after another exit code, a launcher would kill rank 0 before it has printed the message
        raise SystemExit(0)
    raise InputError(messages[0]) from error
