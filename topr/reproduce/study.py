"""What the claims share: cached jobs in parallel processes, learning rates, intervals over seeds, verdicts."""

import ast
import hashlib
import json
import logging
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import datasets
import joblib
import numpy as np
import pandas as pd
import torch
import yaml
from scipy import stats

from topr.distributed import die_with_parent
from topr.io import InputError, write_text
from topr.reproduce.experiments import Experiment
from topr.tasks.arithmetic import Arithmetic, configured

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "data" / "arithmetic"
Results = list[dict[str, Any]]  # of one run, a result for each seed
Rows = dict[str, dict[str, Any]]  # of a table: a summary over seeds for each metric
Gains = dict[
    str, dict[float, list[float]]
]  # pass@1 on validation minus the start's, by label, rate and tuning seed
START = "before training"
FIRST_TUNING_SEED = 101  # no other result is of the seeds that choose learning rates
SETTINGS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("settings.yaml").read_text()
)


class Claim(NamedTuple):
    """What was found of a claim."""

    measured: Rows
    differences: Rows
    parts: dict[str, bool | None]  # of the criterion
    tuning: Gains
    figure: Rows | None = None  # if it shows other rows than `measured`
    updates: dict[str, list[int]] | None = None  # if runs differ in their number of updates


def over_seeds(values: Sequence[float] | np.ndarray | pd.Series) -> dict[str, Any]:
    """Mean, 95% t-interval and the values, at least two, one for each seed."""
    mean, half = np.mean(values), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    rounded = [round(float(number), 5) for number in (mean, mean - half, mean + half, *values)]
    return {"mean": rounded[0], "interval": rounded[1:3], "values": rounded[3:]}


def above(summary: dict[str, Any], bound: float = 0.0, sign: int = 1) -> bool | None:
    """Whether the interval lies above a bound (below it, if the sign is -1); None where it contains the bound."""
    low, high = sorted(sign * (end - bound) for end in summary["interval"])
    return True if low > 0 else False if high < 0 else None


below = partial(above, sign=-1)


def verdict(parts: dict[str, bool | None]) -> str:
    """`yes`, `in part` or `no`; `undecided` where an interval contains its bound and no part fails."""
    if not parts:
        return "not a claim"
    if False in parts.values():
        return "in part" if True in parts.values() else "no"
    return "undecided" if None in parts.values() else "yes"


def by_seed(results: list[dict[str, Any]], of: str = "result") -> pd.DataFrame:
    """Means over problems, with a row for each seed and a column for each metric."""
    return pd.DataFrame([result[of] for result in results]).map(np.mean)


def row(frame: pd.DataFrame) -> dict[str, Any]:
    """A summary over seeds of each column."""
    return {name: over_seeds(values) for name, values in frame.items()}


def rows(runs: dict[str, Results], *labels: str) -> Rows:
    """Every metric of these runs, of all by default."""
    return {label: row(by_seed(runs[label])) for label in labels or runs}


def differences(runs: dict[str, Results], *pairs: tuple[str, str]) -> Rows:
    """Every metric of one run minus another's, paired by seed."""
    return {
        f"{one} minus {two}": row(by_seed(runs[one]) - by_seed(runs[two])) for one, two in pairs
    }


def best(gains: dict[float, list[float]]) -> float:
    """The rule for learning rates, the same for every method: the highest mean among the rates at which no tuning seed
    ends more than 5 points below its start; the smallest rate if there is none."""
    safe = [rate for rate, values in gains.items() if min(values) >= -0.05]
    return max(safe, key=lambda rate: np.mean(gains[rate]), default=min(gains))


def digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@cache
def code_digest(package: Path = ROOT / "topr") -> str:
    """Digest of library versions and all code, whatever its comments, but for what chooses jobs and reports results."""
    paths = sorted(
        path
        for path in package.rglob("*.py")
        if path.stem not in ("__main__", "claims", "study", "report")
    )
    return digest(
        version("torch"),
        version("transformers"),
        [ast.dump(ast.parse(p.read_text())) for p in paths],
    )


class Study:
    """Runs experiments of a setting (its keys: settings.yaml) in `workers` processes, and keeps results under `out`."""

    losses = SETTINGS["losses"]

    def __init__(self, out: Path, workers: int, setting: SimpleNamespace, seeds: list[int]):
        self.workers, self.setting, self.seeds = workers, setting, seeds
        self.task = configured(ROOT / setting.config) if setting.config else Arithmetic()
        self.folder = out / digest(
            code_digest(), str(vars(self.task)), setting.optimizer, setting.base
        )
        self.used: dict[Path, dict[str, Any]] = {}  # results by file

    def run(
        self, experiment: Callable, runs: dict[str, dict], seeds: list[int]
    ) -> dict[str, list[dict[str, Any]]]:
        """The results of a method of `Experiment` with the arguments of each run, for every seed; by label."""
        if (
            self.setting.base and experiment is not Experiment.make_base
        ):  # all others start from its results
            self.run(Experiment.make_base, {"base policy": self.setting.base}, seeds)
        files = {
            (label, seed): self.folder
            / f"results/{digest(experiment.__name__, seed, runs[label])}.json"
            for label, seed in product(runs, seeds)
        }
        missing = {file: cell for cell, file in files.items() if not file.exists()}
        parallel = joblib.Parallel(
            self.workers, "loky", return_as="generator_unordered", initializer=die_with_parent
        )
        calls, optimizer = [], getattr(torch.optim, self.setting.optimizer)
        for file, (label, seed) in missing.items():
            base = self.folder / "bases" / str(seed) if self.setting.base else SHIPPED
            job = Experiment(base, self.task, optimizer, seed)
            calls.append(joblib.delayed(perform)(experiment, job, label, runs[label], file))
        for i, line in enumerate(parallel(calls), 1):
            print(f"[{i}/{len(missing)}] {line}", flush=True)
        self.used |= {
            file: json.loads(file.read_text()) for file in files.values() if file not in self.used
        }
        return {label: [self.used[files[label, seed]] for seed in seeds] for label in runs}

    def provenance(self) -> dict[str, Any]:
        """The commit (None without git), and the CPU time of the results used, which the same code has measured."""
        status, commit = subprocess.getstatusoutput(f"git -C '{ROOT}' describe --always --dirty")
        minutes = round(sum(result["cpu_s"] for result in self.used.values()) / 60)
        return {"commit": None if status else commit, "cpu_minutes": minutes}

    def train(self, runs: dict[str, dict], samples: int) -> dict[str, Results]:
        """The base policies, and trainings from them, on the test problems."""
        test, runs = {"split": "test", "samples": samples}, {START: {"loss": None}} | runs
        return self.run(
            Experiment.train, {label: run | test for label, run in runs.items()}, self.seeds
        )

    def tune(self, runs: dict[str, dict], experiment: Callable = Experiment.train) -> Gains:
        """What pass@1 on validation gains, on each tuning seed, at each learning rate of the grid."""
        seeds = [FIRST_TUNING_SEED + i for i in range(self.setting.tuning_seeds)]
        given, rates = {"split": "val", "samples": 4}, self.setting.rates
        start = by_seed(self.run(Experiment.train, {START: given | {"loss": None}}, seeds)[START])[
            "pass@1"
        ]
        cells = {
            f"grid, {name}, rate {rate:g}": given | runs[name] | {"rate": rate}
            for name in runs
            for rate in rates
        }
        ends = iter(self.run(experiment, cells, seeds).values())
        gains = {
            name: {rate: by_seed(next(ends))["pass@1"] - start for rate in rates} for name in runs
        }
        return {
            name: {rate: gains[name][rate].round(5).tolist() for rate in rates} for name in runs
        }

    def method(self, name: str) -> dict[str, Any]:
        """A method's training, on the data as sampled."""
        loss, budget = {"loss": self.losses[name]}, self.setting.budget
        return loss | {"curation": {"way": "uniform", "budget": budget}} if budget else loss

    def tuned(self, names: list[str]) -> tuple[dict[str, dict], Gains]:
        """The methods' trainings, each at its own rate, with curves; and what decided the rates."""
        grid, curve = (
            self.tune({name: self.method(name) for name in names}),
            {"points": self.setting.points},
        )
        return {
            name: self.method(name) | curve | {"rate": best(grid[name])} for name in names
        }, grid

    @cached_property
    def methods(self) -> tuple[dict[str, Results], Gains]:
        """Results of the methods of claims 1 to 4, and of REINFORCE for two epochs and at TOPR's rate."""
        runs, grid = self.tuned(self.setting.methods)
        more = {"REINFORCE, two epochs": runs["REINFORCE"] | {"epochs": 2}}  # the longest first
        more |= {"REINFORCE, TOPR's rate": runs["REINFORCE"] | {"rate": runs["TOPR"]["rate"]}}
        return self.train(more | runs, self.setting.samples), grid


def perform(
    experiment: Callable, job: Experiment, label: str, arguments: dict[str, Any], file: Path
) -> str:
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
    found |= {"label": name, "cpu_s": time.process_time() - start}
    write_text(file, json.dumps(found))
    return f"{name} ({found['cpu_s']:.0f} s)"
