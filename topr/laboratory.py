"""Runs jobs side by side, each once: what a job found is kept under the digest of what it is.

A study that was killed goes on where it stood, and studies share what they have in common.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from topr.io import InputError, atomic
from topr.ranks import die_with_parent


class Job(NamedTuple):
    """What is to be done: a function of a module, and its arguments, which JSON can hold.

    It is called with the folder of the study, an empty one of its own, and the arguments, and returns what it found.
    """

    function: Callable[..., dict[str, Any]]
    label: str  # for the reader of the progress
    arguments: dict[str, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(
            json.dumps([self.function.__name__, self.arguments], sort_keys=True).encode()
        ).hexdigest()[:16]


class Laboratory:
    """Runs jobs in `workers` processes and keeps what they found under `out`.

    Raises:
        InputError: another command is at work under `out`.
    """

    def __init__(self, out: Path, workers: int):
        self.out, self.used = out, {}  # the latter by digest: commit and CPU time of what was found
        (out / "jobs").mkdir(parents=True, exist_ok=True)
        self.lock = (out / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lifts it when this process ends
        except BlockingIOError:
            raise InputError(f"another command is at work under {out}; wait for it, or name another --out") from None
        os.environ |= {"HF_DATASETS_CACHE": str(out / "cache"), "TOKENIZERS_PARALLELISM": "false"}
        os.environ |= {"OMP_NUM_THREADS": "1"}  # as fast as more for policies of this size
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"), _quiet)

    def run(self, jobs: Iterable[Job]) -> list[dict[str, Any]]:
        """What each job found, newly or before, in their order."""
        jobs = list(jobs)
        path = {job.digest: self.out / "jobs" / f"{job.digest}.json" for job in jobs}
        missing = {job.digest: job for job in jobs if not path[job.digest].exists()}
        running = {self.pool.submit(perform, job, self.out): job for job in missing.values()}
        for number, done in enumerate(as_completed(running), 1):
            took, told = done.result()
            print(f"[{number}/{len(running)}] {running[done].label}: {told} ({took:.0f} s)", flush=True)
        found = [json.loads(path[job.digest].read_text()) for job in jobs]
        self.used |= {job.digest: (result["commit"], result["cpu_s"]) for job, result in zip(jobs, found, strict=True)}
        return found

    def agree(self, name: str, settings: dict[str, Any]) -> None:
        """Let what is kept be of these settings alone.

        Raises:
            InputError: it is of others.
        """
        path, text = self.out / f"{name}.json", json.dumps(settings, default=vars, sort_keys=True)
        if path.exists() and path.read_text() != text:
            raise InputError(f"{self.out} keeps what was measured with other settings of {name}; name another --out")
        with atomic(path) as temporary:
            temporary.write_text(text)

    def account(self) -> dict[str, Any]:
        """The commits that measured what was used, the present one, and the CPU time that it took."""
        commits, seconds = zip(*self.used.values(), strict=True)
        measured_at = ", ".join(sorted(set(map(str, commits))))
        return {"commit": commit(), "measured_at": measured_at, "cpu_minutes": round(sum(seconds) / 60)}

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        shutil.rmtree(self.out / "cache", ignore_errors=True)
        self.lock.close()


@cache
def commit() -> str | None:
    """The project's commit, where git knows it."""
    with suppress(OSError):
        told = subprocess.run(
            ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        return told.stdout.strip() or None


def _quiet() -> None:
    """A worker tells nothing but errors, and ends with the process that started it."""
    die_with_parent()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def perform(job: Job, out: Path) -> tuple[float, str]:
    """Do a job in a folder of its own and write what it found; its CPU time and a word on it."""
    folder, clock = out / "work" / job.digest, time.process_time()
    shutil.rmtree(folder, ignore_errors=True)  # of a job that was killed
    folder.mkdir(parents=True)
    try:
        found = job.function(out, folder, **job.arguments)
    except InputError as error:
        raise InputError(f"{job.label}: {error}") from error
    found |= {"cpu_s": time.process_time() - clock, "commit": commit()}
    with atomic(out / "jobs" / f"{job.digest}.json") as path:
        path.write_text(
            json.dumps({"function": job.function.__name__, "label": job.label, "arguments": job.arguments} | found)
        )
    shutil.rmtree(folder)
    return found["cpu_s"], found["told"]
