"""Cached jobs in parallel processes. A result is used again only by the same code, setting and libraries."""

import ast
import hashlib
import json
import logging
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import datasets
import joblib
import torch

from topr.distributed import die_with_parent
from topr.io import InputError, write_text
from topr.reproduce.experiments import Experiment
from topr.tasks.arithmetic.task import Arithmetic, configured

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent
SHIPPED = ROOT / "data" / "arithmetic"


def digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@cache
def code_digest(package: Path = PACKAGE) -> str:
    """Digest of the library versions and of the code that decides results, whatever its comments and layout."""
    found = [version("torch"), version("transformers")]
    for path in sorted(package.rglob("*.py")):
        if path.name == "report.py" or (path.parent.name == "reproduce" and path.stem not in ("experiments", "jobs")):
            continue  # these choose jobs, combine their results and draw them
        found += [str(path.relative_to(package)), ast.dump(ast.parse(path.read_text()))]
    return digest(found)


@cache
def commit() -> str | None:
    """The commit of this code; None without git."""
    status, text = subprocess.getstatusoutput(f"git -C '{PACKAGE}' describe --always --dirty")
    return text if status == 0 else None


class JobCache:
    """Runs experiments in `workers` processes; keeps results under `out` and computes only those that are missing."""

    def __init__(self, out: Path, workers: int, setting: SimpleNamespace):
        self.task = configured(ROOT / setting.config) if setting.config else Arithmetic()
        self.folder = out / digest(code_digest(), str(vars(self.task)), setting.optimizer, setting.base)
        self.workers, self.optimizer, self.base = workers, getattr(torch.optim, setting.optimizer), setting.base
        self.used: dict[Path, dict[str, Any]] = {}  # results by file

    def run(self, experiment: Callable, runs: dict[str, dict], seeds: list[int]) -> dict[str, list[dict[str, Any]]]:
        """The results of a method of `Experiment` with the arguments of each run, for every seed; by label."""
        if self.base and experiment is not Experiment.make_base:  # all others start from its results
            self.run(Experiment.make_base, {"base policy": self.base}, seeds)
        files = {
            (label, seed): self.folder / "results" / f"{digest(experiment.__name__, seed, arguments)}.json"
            for label, arguments in runs.items()
            for seed in seeds
        }
        missing = {file: cell for cell, file in files.items() if not file.exists()}
        parallel = joblib.Parallel(self.workers, "loky", return_as="generator_unordered", initializer=die_with_parent)
        bases = {seed: self.folder / "bases" / str(seed) if self.base else SHIPPED for seed in seeds}
        of_seed = {seed: Experiment(bases[seed], self.task, self.optimizer, seed) for seed in seeds}
        call = joblib.delayed(perform)
        calls = (call(experiment, of_seed[seed], label, runs[label], file) for file, (label, seed) in missing.items())
        for i, line in enumerate(parallel(calls), 1):
            print(f"[{i}/{len(missing)}] {line}", flush=True)
        self.used |= {file: json.loads(file.read_text()) for file in files.values() if file not in self.used}
        return {label: [self.used[files[label, seed]] for seed in seeds] for label in runs}

    def provenance(self) -> dict[str, Any]:
        """The present commit, the commits that measured the results used, and the CPU time of these."""
        commits = sorted({str(result["commit"]) for result in self.used.values()})
        minutes = round(sum(result["cpu_s"] for result in self.used.values()) / 60)
        return {"commit": commit(), "measured_at": ", ".join(commits), "cpu_minutes": minutes}


def perform(experiment: Callable, job: Experiment, label: str, arguments: dict[str, Any], file: Path) -> str:
    """Run a job with one thread and without output, and write its result; the progress line."""
    torch.set_num_threads(1)  # as fast as more for policies of this size
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    start, name = time.process_time(), f"{label}, seed {job.seed}"
    with TemporaryDirectory() as scratch, open(os.devnull, "w") as null:
        job.scratch, datasets.config.HF_DATASETS_CACHE = Path(scratch), Path(scratch) / "datasets"
        with redirect_stdout(null), warnings.catch_warnings(action="ignore"):
            try:
                found = experiment(job, **arguments)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
    found |= {"label": name, "commit": commit(), "cpu_s": time.process_time() - start}
    write_text(file, json.dumps(found))
    return f"{name}: {found['message']} ({found['cpu_s']:.0f} s)"
