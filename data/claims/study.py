"""Experiments over seeds, each at a learning rate that other seeds have chosen."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from data.claims.commands import Commands
from data.claims.experiments import SETTINGS, Experiment, Rows

Runs = dict[str, dict[str, Any]]  # arguments of an experiment, by label
Frames = dict[str, pd.DataFrame]  # by label: a row for each seed, a column for each metric
Gains = dict[str, dict[float, list[float]]]  # by label, learning rate and tuning seed
FIRST_TUNING_SEED = 101  # no other result is of the seeds that choose learning rates


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

    def run(self, experiment: str, runs: Runs, seeds: list[int], **given: Any) -> Frames:
        """The rows of a method of `Experiment`.

        It gets the arguments of each run, and those that all are given.
        """

        def perform(job: tuple[str, int]) -> Rows:
            label, seed = job
            method = getattr(Experiment(self.commands, self.setting, seed), experiment)
            return method(**runs[label], **given)

        jobs = list(product(runs, seeds))
        with ThreadPool(self.workers) as pool:
            results = list(tqdm(pool.imap(perform, jobs), experiment, len(jobs)))
        found = defaultdict(list)
        for (label, _), rows in zip(jobs, results, strict=True):
            for name, scores in rows.items():
                found[name.format(label)].append(scores)
        return {label: pd.DataFrame(scores) for label, scores in found.items()}

    def tuned(self, runs: Runs, experiment: str) -> tuple[Runs, Gains]:
        """Runs with their learning rates; and what pass@1 on validation gains at each rate."""
        seeds = [FIRST_TUNING_SEED + i for i in range(self.setting["tuning_seeds"])]
        given = {"split": "val", "samples": 4}
        own = [label for label in runs if "rate" not in runs[label]]
        cells = {}
        for label, rate in product(own, self.setting["rates"]):
            cells[f"{label} {rate}"] = runs[label] | {"rate": rate}
        start = self.run("train", {"start": {"rate": 0}}, seeds, **given)["start"]["pass@1"]
        ends = self.run(experiment, cells, seeds, **given)
        gains: Gains = {label: {} for label in own}
        for label, rate in product(own, self.setting["rates"]):
            end = ends[f"{label} {rate}"]["pass@1"]
            gains[label][rate] = (end - start).round(5).tolist()
        chosen = {}
        for label, run in runs.items():
            rate = run.get("rate", label)
            chosen[label] = run | {"rate": best(gains[rate]) if rate in gains else float(rate)}
        return chosen, gains


def expanded(templates: list[dict], setting: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Each template once for every combination of what it is `for`, which fills its braces."""
    values = SETTINGS | setting
    for template in templates:
        names = template.get("for", {})
        choices = [values[key] if isinstance(key, str) else key for key in names.values()]
        for chosen in product(*choices):
            words = values | dict(zip(names, chosen, strict=True))
            yield {key: template[key].format(**words) for key in template if key != "for"}


def best(gains: dict[float, list[float]]) -> float:
    """The rule for learning rates, the same for every method.

    Among the rates at which no tuning seed ends more than 5 points below its start, the one with
    the highest mean; the smallest rate if there is none.
    """
    safe = [rate for rate, values in gains.items() if min(values) >= -0.05]
    return max(safe, key=lambda rate: np.mean(gains[rate]), default=min(gains))
