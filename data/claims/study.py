"""Experiments over seeds, each at a learning rate that was chosen on validation problems."""

from dataclasses import dataclass
from itertools import product
from multiprocessing.pool import ThreadPool

import numpy as np
import pandas as pd
from tqdm import tqdm

from data.claims.commands import Commands
from data.claims.experiments import Experiment

Runs = dict[str, dict]  # arguments of an experiment, by label
LEVELS = ["seed", "problem", "metric"]  # of the index of results
Gains = dict[float, list[float]]  # by learning rate, one for each tuning seed


@dataclass
class Study:
    """Runs the experiments of a setting (its keys: settings.yaml) on several seeds.

    Args:
        workers: commands that run at once
        seeds: whose results are reported
    """

    commands: Commands
    workers: int
    setting: dict
    seeds: list[int]

    def run(
        self, experiment: str, runs: Runs, seeds: list[int], split: str, samples: int
    ) -> pd.DataFrame:
        """The results of a method of `Experiment`, a table as in criteria.py."""

        def perform(job):
            seed, label = job
            one = Experiment(self.commands, self.setting, seed, split, samples)
            rows = getattr(one, experiment)(label, **runs[label])
            table = pd.DataFrame(rows)  # by metric, or by problem and metric
            if table.index.nlevels == 1:
                table = pd.concat({0: table})
            return pd.concat({seed: table}, names=LEVELS)

        jobs = list(product(seeds, runs))
        with ThreadPool(self.workers) as pool:
            tables = list(tqdm(pool.imap(perform, jobs), experiment, len(jobs)))
        return pd.concat(tables).groupby(LEVELS, sort=False).mean()

    def tune(self, runs: Runs, experiment: str) -> dict[str, Gains]:
        """What pass@1 on validation gains at each rate, for the runs without a rate."""
        tuned = [label for label in runs if "rate" not in runs[label]]
        rates = self.setting["rates"]
        rated = {
            f"{label} {rate}": runs[label] | {"rate": rate} for rate, label in product(rates, tuned)
        }
        results = self.run(experiment, rated, self.setting["tuning_seeds"], "val", 4)
        ends = results.xs("pass@1", level="metric")
        gained = ends.sub(ends["before training"], axis="index").round(5)
        gains = {}
        for label in tuned:
            gains[label] = {rate: gained[f"{label} {rate}"].tolist() for rate in rates}
        return gains


def best(gains: Gains) -> float:
    """The rule for learning rates, the same for every method.

    Among the rates at which no tuning seed ends more than 5 points below its start, the one with
    the highest mean; the smallest rate if there is none.
    """
    safe = [rate for rate, values in gains.items() if min(values) >= -0.05]
    return max(safe, key=lambda rate: np.mean(gains[rate]), default=min(gains))


def add_peaks(results: pd.DataFrame, runs: Runs):
    """Add what each training reaches on validation at its peak.

    The peak of a seed is where the mean curve of the others has its own: that of its own curve
    would be a peak of its noise, too. After divergence all values are 0.
    """
    for label in runs:
        curve = results.filter(regex=f"^{label} at validation").fillna(0)
        others = curve.groupby("metric").transform("sum") - curve
        at_peak = others.eq(others.max(axis="columns"), axis="index")
        results[f"{label} at its peak"] = curve.where(at_peak).max(axis="columns")
