"""Run this project's commands, each in a process of its own, and keep what they write."""

import hashlib
import multiprocessing
import os
import runpy
import shlex
import shutil
import sys
import threading
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from topr.distributed import die_with_parent
from topr.io import InputError

ROOT = Path(__file__).parents[2]
# what decides an output beside the arguments of its command; not .pyc
INPUTS = ["requirements.txt", "*.py", "topr/**/*.*[!c]", "configs/**/*.yaml"]
INPUTS += ["data/arithmetic/**/*.*[!c]", "data/claims/commands.yaml", "data/claims/training.yaml"]
TEMPLATES = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text())
# Processes are forked from one that has imported the commands, which would take each 7 s.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["__main__", "train", "evaluate", "data.arithmetic.make"])


class Commands:
    """Runs commands, and keeps their outputs in the folder `cache`.

    Each folder in it holds the output of one command. Its name is a hash of what decides the
    output: the arguments, and the content of code, configs and shipped data.
    """

    def __init__(self, cache: Path):
        self.cache = cache.absolute()
        self.inputs = inputs_hash(ROOT)
        self.locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def run(self, name: str, *more: str, **values: Any) -> Path:
        """The folder with a command's output; the command is run if there is none.

        Args:
            name: of a command in commands.yaml
            more: arguments behind those of commands.yaml
            values: of the words in braces

        Raises an InputError if the command fails. A training that diverges does not: its folder
        lacks the policy.
        """
        decides = repr((self.inputs, name, more, values))
        key = hashlib.sha256(decides.encode()).hexdigest()[:16]
        folder = self.cache / key
        partial = folder.with_suffix(".partial")
        words = [word.format(**values, out=partial) for word in TEMPLATES[name].split()]
        with self.locks[key]:  # another thread may be running the same command
            if not folder.exists():
                start(partial, [*words, *more])
                partial.rename(folder)
        return folder


def start(folder: Path, words: list[str]) -> None:
    """Run a command that writes to a folder in a new process."""
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed
    folder.mkdir(parents=True)
    output = folder / "output.txt"
    output.write_text(f"python -m {shlex.join(words)}\n")
    process = FORKS.Process(target=perform, args=(words, output))
    process.start()
    process.join()
    if process.exitcode and "is NaN or infinite" not in output.read_text():
        raise InputError(f"{shlex.join(words[:3])} … failed; see {output}")


def perform(words: list[str], output: Path) -> None:
    """Run a command as `python -m` would; what it prints is appended to a file."""
    die_with_parent()
    file = os.open(output, os.O_APPEND | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    sys.argv = words
    with TemporaryDirectory() as scratch:
        os.environ["HF_DATASETS_CACHE"] = scratch
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def inputs_hash(root: Path) -> str:
    """Hash of the files that decide outputs."""
    digest = hashlib.sha256()
    for pattern in INPUTS:
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()
