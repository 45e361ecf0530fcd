"""Run this project's commands, each in a process of its own, and keep what they write."""

import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import threading
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

import evaluate
import topr.trajectories.__main__ as trajectories
import train
from data.arithmetic import make
from topr.distributed import die_with_parent
from topr.io import InputError

ROOT = Path(__file__).parents[2]
PROGRAMS = ["topr", "train.py", "evaluate.py"]
INPUTS = [*PROGRAMS, "configs", "data/arithmetic", "data/claims/training.yaml"]
TEMPLATES = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text())
MAINS = {
    "train.py": train.main,
    "evaluate.py": evaluate.main,
    "data/arithmetic/make.py": make.main,
    "-m": trajectories.main,
}
# Processes are forked from one that has imported this module: imports would take 7 s of each.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["data.claims.commands"])


class Commands:
    """Runs commands, and keeps their outputs in a cache.

    Each folder of the cache holds the output of one command. Its name is a hash of what decides
    the output: the command's arguments, and the content of code, configs and shipped data. An
    output of another command is an argument that has such a name.
    """

    def __init__(self, cache: Path):
        self.cache = cache.absolute()
        self.inputs = inputs_hash(ROOT)
        self.cpu_s: dict[str, float] = {}  # of each command whose output was asked for
        self.locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def run(self, name: str, *more: str, **values: Any) -> Path:
        """The folder with a command's output; the command is run if there is none.

        Args:
            name: of a command in commands.yaml
            more: arguments behind those of commands.yaml
            values: of the words in braces; paths are absolute, or start at the repository's root

        Raises an InputError if the command fails. A training that diverges does not: its folder
        lacks the policy.
        """
        words = [word.format(**values) for word in TEMPLATES[name].split()]
        words += more
        text = shlex.join(words).replace(str(self.cache), "")
        key = hashlib.sha256(f"{self.inputs} {text}".encode()).hexdigest()[:16]
        folder = self.cache / key
        with self.locks[key]:  # another thread may be running the same command
            if not folder.exists():
                start(folder, words)
        self.cpu_s[key] = json.loads((folder / "command.json").read_text())["cpu_s"]
        return folder


def start(folder: Path, words: list[str]) -> None:
    """Run a command in a new process; its folder gets its name once it is complete."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    words = [word.replace("OUT", str(partial)) for word in words]
    process = FORKS.Process(target=perform, args=(words, partial))
    process.start()
    process.join()
    output = partial / "output.txt"
    if process.exitcode and "is NaN or infinite" not in output.read_text():
        raise InputError(f"{shlex.join(words[:3])} … failed; see {output}")
    partial.rename(folder)


def perform(words: list[str], folder: Path) -> None:
    """Do what a shell would do with a command; its output goes to a file."""
    die_with_parent()
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    script = words[0]
    sys.argv = words[1:] if script == "-m" else words
    try:
        with TemporaryDirectory() as scratch:
            os.environ["HF_DATASETS_CACHE"] = scratch
            MAINS[script]()
    finally:
        record = {"command": f"python {shlex.join(words)}", "cpu_s": time.process_time()}
        (folder / "command.json").write_text(json.dumps(record))


def inputs_hash(root: Path) -> str:
    """Hash of all that decides an output beside the arguments of its command."""
    digest = hashlib.sha256(f"{version('torch')} {version('transformers')}".encode())
    for name in INPUTS:
        for path in sorted([root / name, *(root / name).rglob("*")]):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.read_bytes())
    return digest.hexdigest()
