"""What the claims share: runs on every seed, learning rates, intervals over seeds, verdicts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from topr.reproduce.experiments import Experiment
from topr.reproduce.jobs import JobCache
from topr.reproduce.settings import LOSSES, Setting

Results = list[dict[str, Any]]  # of one run, a result for each seed
Rows = dict[str, dict[str, Any]]  # of a table: a summary over seeds for each metric
Scores = dict[str, dict[float, float]]  # mean validation pass@1 by label and learning rate
METRICS = ["pass@1", "maj", "invalid"]
START = "before training"


class Claim(NamedTuple):
    """What was found of a claim."""

    measured: Rows
    differences: Rows
    parts: dict[str, bool | None]  # of the criterion
    validation: Scores
    figure: Rows | None = None  # if it shows other rows than `measured`
    updates: dict[str, list[int]] | None = None  # if runs differ in their number of updates


def over_seeds(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Mean, 95% t-interval and the values, at least two, one for each seed."""
    mean, half = float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    interval = [round(mean - half, 5), round(mean + half, 5)]
    return {"mean": round(mean, 5), "interval": interval, "values": [round(float(value), 5) for value in values]}


def above(summary: dict[str, Any], bound: float = 0.0, sign: int = 1) -> bool | None:
    """Whether the interval lies above a bound (below it, if the sign is -1); None where it contains the bound."""
    low, high = sorted(sign * (end - bound) for end in summary["interval"])
    return True if low > 0 else False if high < 0 else None


below = partial(above, sign=-1)


def verdict(parts: dict[str, bool | None]) -> str:
    """`yes`, `in part` or `no`; `undecided` where an interval contains its bound and no part fails."""
    checks = list(parts.values())
    if False in checks:
        return "in part" if True in checks else "no"
    return "undecided" if None in checks else "yes"


def by_seed(results: Results, metric: str) -> np.ndarray:
    """A metric's mean over problems, for each seed."""
    return np.array([np.mean(result["result"][metric]) for result in results])


def summaries(runs: dict[str, Results], *labels: str) -> Rows:
    """Every metric of these runs, of all by default."""
    return {label: {name: over_seeds(by_seed(runs[label], name)) for name in METRICS} for label in labels or runs}


def differences(runs: dict[str, Results], *pairs: tuple[str, str]) -> Rows:
    """Every metric of one run minus another's, paired by seed."""
    rows = {f"{one} minus {two}": (runs[one], runs[two]) for one, two in pairs}
    return {label: {m: over_seeds(by_seed(a, m) - by_seed(b, m)) for m in METRICS} for label, (a, b) in rows.items()}


def best(scores: dict[float, float]) -> float:
    """The rule for learning rates: the one with the highest score."""
    return max(scores, key=lambda rate: scores[rate])


@dataclass
class Study:
    """A setting and the seeds that are reported."""

    cache: JobCache
    setting: Setting
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
        return {name: {rate: round(float(by_seed(next(ends), "pass@1").mean()), 4) for rate in rates} for name in runs}

    @property
    def trainings(self) -> dict[str, dict]:
        """The methods' trainings, on the data as sampled."""
        budget = self.setting.budget
        data = {"curation": {"way": "uniform", "budget": budget}} if budget else {}
        return {name: data | {"loss": LOSSES[name]} for name in self.setting.methods}

    @cached_property
    def grid(self) -> Scores:
        """Of the methods."""
        return self.tune(self.trainings, self.setting.tuning_seeds)

    @cached_property
    def method_runs(self) -> dict[str, Results]:
        """The methods, each at its own rate, with curves; REINFORCE for two epochs and at TOPR's rate as well."""
        curve = {"points": self.setting.points}
        rated = {name: run | curve | {"rate": best(self.grid[name])} for name, run in self.trainings.items()}
        more = {"REINFORCE, two epochs": rated["REINFORCE"] | {"epochs": 2}}  # the longest first
        more |= {"REINFORCE, TOPR's rate": rated["REINFORCE"] | {"rate": rated["TOPR"]["rate"]}}
        return self.train(more | rated, self.setting.samples)
