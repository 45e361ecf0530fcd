"""Run this project's commands, each in a process of its own, and keep what they write."""

import glob
import multiprocessing.connection
import os
import runpy
import shlex
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path

import torch
import yaml

from topr.io import InputError, remove
from topr.run.identity import content_hash, file_hash

ROOT = Path(__file__).parents[2]
TEMPLATES = yaml.safe_load((ROOT / "data/claims/commands.yaml").read_text())
# Processes are forked from one that has imported the commands, which would take each 7 s.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["__main__", "train", "evaluate", "data.arithmetic.make", "data.word_problems.make"]
)

# `start` collects the ends of other threads' processes, too; read twice, an exit code becomes 255
ENDS = threading.Lock()


class Commands:
    """Runs commands, and keeps their outputs in the folder `cache`; `more` are patterns of files
    that decide them, too.

    Each folder in it is of one command: `output`, and what it printed. Its name is a hash of what
    decides the output: the command, and the content of code, configs and shipped data.
    """

    def __init__(self, cache: Path, *more: str):
        self.cache = cache.absolute()
        self.inputs = inputs_hash(ROOT, *more)
        self.locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def run(self, name: str, *more: str, **values) -> Path:
        """The folder with a command's output; the command is run if there is none.

        Args:
            name: of a command in commands.yaml
            more: arguments behind those of commands.yaml
            values: of the words in braces, and others

        Raises an InputError if the command fails. A training that diverges does not: its folder
        lacks the policy.
        """
        words = [word.format(out="{out}", **values) for word in TEMPLATES[name].split()]
        words += more
        key = content_hash(self.inputs, words)
        folder = self.cache / key / "output"
        with self.locks[key]:  # another thread may be running the same command
            if not folder.exists():
                # a killed command goes on from what it has written
                partial = folder.with_name("partial")
                partial.mkdir(parents=True, exist_ok=True)
                start(
                    folder.with_suffix(".txt"),
                    [word.replace("{out}", str(partial)) for word in words],
                )
                for checkpoints in partial.rglob("checkpoints"):
                    remove(checkpoints)
                partial.rename(folder)
        return folder


def start(output: Path, words: list[str]):
    """Run a command in a new process; what it prints is appended to the file `output`."""
    process = FORKS.Process(target=perform, args=(words, output))
    with ENDS:
        process.start()
    multiprocessing.connection.wait([process.sentinel])
    with ENDS:
        process.join()
    printed = output.read_text().rpartition("\npython -m ")[2]  # by this start
    if process.exitcode and "is NaN or infinite" not in printed:
        raise InputError(
            f"{words[0]} failed ({process.exitcode}), see {output}: " + printed.splitlines()[-1]
        )


def perform(words: list[str], output: Path):
    """Run a command as `python -m` would; it and what it prints are appended to a file."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    file = output.open("a")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    print(f"python -m {shlex.join(words)}", flush=True)
    os.chdir(ROOT)
    torch.set_num_threads(1)  # as fast as more for policies of this size
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def end_with_parent():
    """End this process as soon as the one that started the study has ended.

    A fork server outlives it, since the processes that it has forked keep it alive.
    """
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGKILL)


def inputs_hash(root: Path, *more: str) -> str:
    """Hash of the files that decide outputs, see commands.yaml."""
    return content_hash(
        [
            file_hash(path)
            for pattern in [*TEMPLATES["inputs"], *more]
            for path in sorted(glob.glob(str(root / pattern), recursive=True))
            if Path(path).is_file()
        ]
    )
