"""What the claims share: experiments over seeds, learning rates, intervals and criteria."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats
from tqdm import tqdm

from data.claims.commands import Commands
from data.claims.experiments import Experiment

Summary = dict[str, Any]  # of values, one a seed: `mean`, `interval`, `values`
Rows = dict[str, dict[str, Summary]]  # of a table: a summary for each metric
Run = dict[str, Any]  # arguments of an experiment
Results = list[dict[str, Any]]  # of an experiment, one for each seed
Gains = dict[str, dict[float, list[float]]]  # by label, learning rate and tuning seed
START = "before training"
FIRST_TUNING_SEED = 101  # no other result is of the seeds that choose learning rates
FOLDER = Path(__file__).parent
SETTINGS: dict[str, Any] = yaml.safe_load((FOLDER / "settings.yaml").read_text())
CRITERIA: dict[int, dict[str, Any]] = yaml.safe_load((FOLDER / "claims.yaml").read_text())


@dataclass
class Found:
    """What was found of a claim."""

    measured: Rows
    differences: Rows
    tuning: Gains
    figure: Rows = field(default_factory=dict)  # if it shows other rows than `measured`
    updates: dict[str, list[int]] | None = None  # if experiments differ in their number of updates
    variants: list[dict[str, str]] = field(default_factory=lambda: [{}])  # words of the criteria


class Study:
    """Runs the experiments of a setting (its keys: settings.yaml) on several seeds.

    Args:
        cache: folder for the outputs of commands
        workers: commands that run at once
        setting: sizes of the experiments
        seeds: whose results are reported
    """

    def __init__(self, cache: Path, workers: int, setting: dict[str, Any], seeds: list[int]):
        self.commands = Commands(cache)
        self.workers = workers
        self.setting = setting
        self.seeds = seeds

    def run(self, experiment: str, runs: dict[Any, Run], seeds: list[int]) -> dict[Any, Results]:
        """The results of a method of `Experiment` with the arguments of each run, by label."""

        def perform(job: tuple[Any, int]) -> dict[str, Any]:
            label, seed = job
            one = Experiment(self.commands, self.setting, seed)
            return getattr(one, experiment)(**runs[label])

        jobs = list(product(runs, seeds))
        with ThreadPool(self.workers) as pool:
            results = list(tqdm(pool.imap(perform, jobs), experiment, len(jobs)))
        count = len(seeds)
        return {label: results[i * count : (i + 1) * count] for i, label in enumerate(runs)}

    def train(self, runs: dict[str, Run], samples: int) -> dict[str, Results]:
        """The base policies and trainings of them, measured on the test problems."""
        given = {"split": "test", "samples": samples}
        cells = {label: run | given for label, run in {START: {}, **runs}.items()}
        return self.run("train", cells, self.seeds)

    def tune(self, runs: dict[str, Run], experiment: str = "train") -> Gains:
        """What pass@1 on validation gains at each learning rate, on each tuning seed."""
        seeds = [FIRST_TUNING_SEED + i for i in range(self.setting["tuning_seeds"])]
        given = {"split": "val", "samples": 4}
        start = means(self.run("train", {START: given}, seeds)[START])["pass@1"]
        cells = {}
        for label, rate in product(runs, self.setting["rates"]):
            cells[label, rate] = runs[label] | given | {"rate": rate}
        gains: Gains = {label: {} for label in runs}
        for (label, rate), results in self.run(experiment, cells, seeds).items():
            gains[label][rate] = (means(results)["pass@1"] - start).round(5).tolist()
        return gains

    def tuned(self, names: list[str]) -> tuple[dict[str, Run], Gains]:
        """Trainings of methods at their own rates, with curves; and what decided the rates."""
        runs: dict[str, Run] = {name: {"loss": SETTINGS["losses"][name]} for name in names}
        if budget := self.setting["budget"]:
            for run in runs.values():
                run["curation"] = ["uniform", f"--budget={budget}"]
        gains = self.tune(runs)
        for name, run in runs.items():
            run |= {"rate": best(gains[name]), "points": self.setting["points"]}
        return runs, gains

    @cached_property
    def methods(self) -> tuple[dict[str, Results], Gains]:
        """Results of the methods of claims 1 to 4, and what decided their rates."""
        runs, gains = self.tuned(self.setting["methods"])
        runs["REINFORCE, two epochs"] = runs["REINFORCE"] | {"epochs": 2}
        runs["REINFORCE, TOPR's rate"] = runs["REINFORCE"] | {"rate": runs["TOPR"]["rate"]}
        return self.train(runs, self.setting["samples"]), gains


def best(gains: dict[float, list[float]]) -> float:
    """The rule for learning rates, the same for every method.

    Among the rates at which no tuning seed ends more than 5 points below its start, the one with
    the highest mean; the smallest rate if there is none.
    """
    safe = [rate for rate, values in gains.items() if min(values) >= -0.05]
    return max(safe, key=lambda rate: np.mean(gains[rate]), default=min(gains))


def over_seeds(values: Sequence[float] | np.ndarray | pd.Series) -> Summary:
    """Mean, 95% t-interval and the values, one for each of at least two seeds."""
    mean = np.mean(values)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    rounded = np.round([mean, mean - half, mean + half, *values], 5).tolist()
    return {"mean": rounded[0], "interval": rounded[1:3], "values": rounded[3:]}


def means(results: Results) -> pd.DataFrame:
    """Means over problems, with a row for each seed and a column for each metric."""
    return pd.DataFrame([result["result"].mean() for result in results])


def row(frame: pd.DataFrame) -> dict[str, Summary]:
    """A summary over seeds of each column."""
    return {name: over_seeds(values) for name, values in frame.items()}


def rows(runs: dict[str, Results], labels: Sequence[str] = ()) -> Rows:
    """Every metric of these runs, of all by default."""
    return {label: row(means(runs[label])) for label in labels or runs}


def differences(runs: dict[str, Results], pairs: Sequence[Sequence[str]]) -> Rows:
    """Every metric of one run minus another's, paired by seed."""
    found = {}
    for one, two in pairs:
        found[f"{one} minus {two}"] = row(means(runs[one]) - means(runs[two]))
    return found


def check(criteria: dict[str, Any], table: Rows, words: dict[str, Any]) -> dict[str, str]:
    """Whether each part of a claim holds; `words` fill the braces of texts and rows."""
    found = {}
    for text, conditions in criteria.items():
        if isinstance(conditions, dict):
            conditions = [conditions]
        metrics = [table[condition["row"].format(**words)] for condition in conditions]
        answers = [holds(*pair) for pair in zip(conditions, metrics, strict=True)]
        worst = min(answers, key=["no", "undecided", "yes"].index)
        found[text.format(**words)] = worst
    return found


def holds(condition: dict[str, Any], metrics: dict[str, Summary]) -> str:
    """Whether an interval lies on the right side of a bound."""
    summary = metrics[condition["metric"]]
    if "minus" in condition:
        other = metrics[condition["minus"]]["values"]
        summary = over_seeds(np.subtract(summary["values"], other))
    low, high = summary["interval"]
    right_side = "above" in condition
    bound = condition["above" if right_side else "below"]
    if low <= bound <= high:
        return "undecided"
    return "yes" if (low > bound) == right_side else "no"


def verdict(parts: dict[str, str]) -> str:
    """Whether a claim holds: in part if some of its parts do and others fail."""
    answers = set(parts.values())
    if not answers:
        return "not a claim"
    if "no" in answers:
        return "in part" if "yes" in answers else "no"
    return "undecided" if "undecided" in answers else "yes"
