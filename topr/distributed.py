"""Collectives for small Python objects and errors, signals between the processes of a run, progress of rank 0."""

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
from tqdm import tqdm

from topr.io import InputError

INTERVAL = 30.0  # seconds between two lines of `Progress`
stop_requested = (
    threading.Event()
)  # set by a signal handler; training and sampling ask it at every update and token


class Preempted(SystemExit):
    """The run was asked to stop; its exit code is that of a process ended by SIGTERM."""

    code = 128 + signal.SIGTERM


def end_with_parent() -> None:
    """End a rank together with the process that started it, even by SIGKILL; files it has written are complete."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@atexit.register  # a thread of gloo that outlives the interpreter can abort the process (pytorch/pytorch#179291)
def leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def rank() -> int:
    """Rank of this process, 0 if it is the only one."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Progress(tqdm):
    """A count out of a total, figures and the time left, on standard error of rank 0: a bar on a terminal, elsewhere a
    line every `INTERVAL` seconds; nothing if the total is 0 or no command has set `enabled`."""

    enabled = False

    def __init__(
        self, name: str = "", total: int | None = 0, unit: str = " responses", first: int = 0
    ):
        self.terminal, self.tokens = sys.stderr.isatty(), 0
        text = "{desc}" + ("|{bar}| " if self.terminal else " " if unit else ", update ")
        text += "{n_fmt}/{total_fmt}{unit}, {remaining} left{postfix}"
        settings: Any = {
            "bar_format": text,
            "initial": first,
            "miniters": 0,
            "smoothing": 0,
            "dynamic_ncols": True,
        }
        settings |= {
            "disable": total == 0 or rank() > 0 or not self.enabled,
            "leave": None,
            "mininterval": 0.25,
        }
        settings["unit"] = unit + " of rank 0" * (unit > "" and torch.distributed.is_initialized())
        settings |= (
            {}
            if self.terminal
            else {"leave": False, "position": 1, "mininterval": INTERVAL, "delay": INTERVAL}
        )
        super().__init__(desc=name, total=total, **settings)
        if (
            not self.terminal
        ):  # write lines only; for the same reason closing must neither leave nor clear a bar
            self.moveto, self.sp = (
                lambda _: None,
                lambda text: text and print(text, file=sys.stderr, flush=True),
            )

    def advance(self, responses: int, tokens: int) -> None:
        """Count responses that have ended, and sampled tokens, whose number per second is shown."""
        if self.disable:  # sampling calls this at every token
            return
        self.tokens += tokens
        self.postfix = self.format_sizeof(
            self.tokens / (self.format_dict["elapsed"] or 1), " tok/s"
        )
        self.update(responses)


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in the order of the ranks."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def same_error_on_all_ranks() -> Iterator[None]:
    """If the block raises an InputError on any rank, every rank ends, and rank 0 raises it. All ranks must enter it.
    The others exit with code 0: after another one a launcher would kill rank 0 before it has printed the message."""
    error = None
    try:
        yield
    except InputError as found:
        error = found
    errors = [found for found in gather(error and str(error)) if found]
    if errors:
        raise (SystemExit(0) if rank() else type(error or InputError())(errors[0])) from error
