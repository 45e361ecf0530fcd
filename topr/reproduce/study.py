"""What the claims share: settings, runs on every seed, learning rates, intervals over seeds, verdicts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from topr.reproduce.experiments import Experiment
from topr.reproduce.jobs import JobCache

Results = list[dict[str, Any]]  # of one run, a result for each seed
Rows = dict[str, dict[str, Any]]  # of a table: a summary over seeds for each metric
Scores = dict[str, dict[float, float]]  # mean validation pass@1 by label and learning rate
START = "before training"
SETTINGS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text())


class Claim(NamedTuple):
    """What was found of a claim."""

    measured: Rows
    differences: Rows
    parts: dict[str, bool | None]  # of the criterion
    validation: Scores
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
    if False in parts.values():
        return "in part" if True in parts.values() else "no"
    return "undecided" if None in parts.values() else "yes"


def by_seed(results: list[dict[str, Any]], of: str = "result") -> pd.DataFrame:
    """Means over problems, with a row for each seed and a column for each metric."""
    return pd.DataFrame([result[of] for result in results]).map(np.mean)


def row(frame: pd.DataFrame) -> dict[str, Any]:
    """A summary over seeds of each column."""
    return {name: over_seeds(values) for name, values in frame.items()}


def summaries(runs: dict[str, Results], *labels: str) -> Rows:
    """Every metric of these runs, of all by default."""
    return {label: row(by_seed(runs[label])) for label in labels or runs}


def differences(runs: dict[str, Results], *pairs: tuple[str, str]) -> Rows:
    """Every metric of one run minus another's, paired by seed."""
    return {f"{one} minus {two}": row(by_seed(runs[one]) - by_seed(runs[two])) for one, two in pairs}


def best(scores: dict[float, float]) -> float:
    """The rule for learning rates: the one with the highest score."""
    return max(scores, key=lambda rate: scores[rate])


@dataclass
class Study:
    """A setting and the seeds that are reported."""

    cache: JobCache
    setting: SimpleNamespace  # keys as in settings.yaml
    seeds: list[int]

    def train(self, runs: dict[str, dict], samples: int) -> dict[str, Results]:
        """The base policies, and trainings from them, on the test problems."""
        test, runs = {"split": "test", "samples": samples}, {START: {"loss": None}} | runs
        return self.cache.run(Experiment.train, {label: run | test for label, run in runs.items()}, self.seeds)

    def tune(self, runs: dict[str, dict], seeds: int, experiment: Callable = Experiment.train) -> Scores:
        """Mean validation pass@1 at the end, over the first seeds, at each learning rate of the grid."""
        given, rates = {"split": "val", "samples": 4}, self.setting.rates
        cells = {f"grid, {name}, rate {rate:g}": given | runs[name] | {"rate": rate} for name in runs for rate in rates}
        ends = iter(self.cache.run(experiment, cells, self.seeds[:seeds]).values())
        return {name: {rate: round(by_seed(next(ends))["pass@1"].mean(), 4) for rate in rates} for name in runs}

    def method(self, name: str) -> dict[str, Any]:
        """A method's training, on the data as sampled."""
        loss, budget = {"loss": SETTINGS["losses"][name]}, self.setting.budget
        return loss | {"curation": {"way": "uniform", "budget": budget}} if budget else loss

    @cached_property
    def grid(self) -> Scores:
        """Of the methods."""
        return self.tune({name: self.method(name) for name in self.setting.methods}, self.setting.tuning_seeds)

    @cached_property
    def method_runs(self) -> dict[str, Results]:
        """The methods, each at its own rate, with curves; REINFORCE for two epochs and at TOPR's rate as well."""
        curve = {"points": self.setting.points}
        rated = {name: self.method(name) | curve | {"rate": best(self.grid[name])} for name in self.setting.methods}
        more = {"REINFORCE, two epochs": rated["REINFORCE"] | {"epochs": 2}}  # the longest first
        more |= {"REINFORCE, TOPR's rate": rated["REINFORCE"] | {"rate": rated["TOPR"]["rate"]}}
        return self.train(more | rated, self.setting.samples)
