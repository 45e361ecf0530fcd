"""What the claims have in common: seeds, learning rates, trainings, paired intervals."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from topr import experiments
from topr.experiments import BATCH, CLIP
from topr.laboratory import Job, Laboratory
from topr.regimes import REGIMES

METHODS = {
    "TOPR": ["TOPR", {}],
    "positives only": ["PositivesOnly", {}],
    "REINFORCE": ["REINFORCE", {}],
    "PPO": ["PPO", {}],
    "PPO, sequence ratio": ["PPO", {"ratio": "sequence"}],
    "DPO": ["DPO", {}],
}
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]  # two-sided 95%, 1 to 10 degrees
METRICS = ["pass@1", "maj", "invalid"]
ANSWERS = {True: "yes", False: "no", None: "undecided"}


def over_seeds(values: list[float]) -> dict[str, Any]:
    """Mean, 95% t-interval and the values themselves, one a seed."""
    n, mean = len(values), float(np.mean(values))
    df = max(n - 1, 1)
    quantile = STUDENT[df - 1] if df <= len(STUDENT) else 1.96 + 2.372 / df + 2.82 / df**2  # Cornish and Fisher's
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return {
        "mean": round(mean, 5),
        "interval": [round(mean - half, 5), round(mean + half, 5)] if n > 1 else None,
        "values": [round(value, 5) for value in values],
    }


def below(summary: dict[str, Any], bound: float = 0.0) -> bool | None:
    """Whether the interval lies below a bound; None where it holds the bound, or there is none."""
    low, high = summary["interval"] or (-math.inf, math.inf)
    return True if high < bound else False if low > bound else None


def above(summary: dict[str, Any], bound: float = 0.0) -> bool | None:
    """Whether the interval lies above a bound; None as in `below`."""
    under = below(summary, bound)
    return None if under is None else not under


def verdict(parts: dict[str, bool | None]) -> dict[str, Any]:
    """Whether a claim holds, and which parts of it: `undecided` where intervals do not tell and nothing speaks against.

    In part: some parts hold, and others do not.
    """
    checks = list(parts.values())
    if all(checks):
        holds = "yes"
    elif False in checks:
        holds = "in part" if True in checks else "no"
    else:
        holds = "undecided"
    return {"holds": holds, "parts": {part: ANSWERS[check] for part, check in parts.items()}}


def best(scores: dict[float, float]) -> float:
    """The learning rate of the best score."""
    return max(scores, key=scores.get)


@dataclass
class Study:
    """What the claims have in common: a laboratory, a regime, seeds, sizes."""

    lab: Laboratory
    regime: str
    seeds: list[int]
    rates: list[float]
    scale: dict[str, int]  # of the base policies' data; see `Regime.make`
    methods: list[str] = field(default_factory=lambda: list(METHODS))  # of the paper's Figures 3 and 4
    budget: int | None = None  # trajectories of a problem that they are trained on; None for all
    shares: list[float] = field(default_factory=lambda: [0.05, 0.15, 0.3, 0.5, 0.9])  # effective, of positives
    small_rate: float | None = None  # of learning, for all shares alike
    grid_seeds: int = 2  # on which learning rates are chosen
    share_grid_seeds: int = 1  # those of claim 5, which has many methods
    samples: int = 16  # responses to each test problem
    points: int = 10  # validations of a curve
    total: int = 3200  # trajectories of a given composition
    gradients: int = 1000  # responses of each sign, of which claim 5 takes gradients one by one
    prompts: int = 300  # of an iteration
    verifier_steps: int = 300  # of the supervised training that makes a verifier of a base policy
    pool: int = 32  # responses to each, from which Anna Karenina takes 8

    @cached_property
    def bases(self) -> list[dict]:
        """The base policies' trajectories, by seed."""
        return self.lab.run(
            self.job(experiments.base, f"base policy, seed {seed}", seed, scale=self.scale) for seed in self.seeds
        )

    def run(self, jobs: Iterable[Job]) -> list[dict]:
        """What jobs find that need the base policies."""
        return self.lab.run(jobs) if self.bases else []

    def job(self, function: Callable, label: str, seed: int, **arguments: Any) -> Job:
        return Job(function, f"{self.regime}: {label}", {"regime": self.regime, "seed": seed} | arguments)

    @property
    def start(self) -> list[dict]:
        """The base policies on test."""
        return self.begin(self.samples)

    def begin(self, samples: int) -> list[dict]:
        """The base policies on test, with so many responses to a problem."""
        how = {"split": "test", "samples": samples}
        return self.run(
            self.job(experiments.start, f"before training, seed {seed}", seed, **how) for seed in self.seeds
        )

    def training(self, label: str, seed: int, loss: list, rate: float, **more: Any) -> Job:
        how = {"split": "test", "samples": self.samples, "loss": loss, "rate": rate} | more
        rated = label if f"rate {rate:g}" in label else f"{label}, rate {rate:g}"
        return self.job(experiments.train, f"{rated}, seed {seed}", seed, **how)

    def train(self, runs: dict[str, dict[str, Any]]) -> dict[str, list[dict]]:
        """Train each run on every seed, all side by side; results by label and seed."""
        jobs = [self.training(label, seed, **arguments) for label, arguments in runs.items() for seed in self.seeds]
        found, n = self.run(jobs), len(self.seeds)
        return {label: found[i * n : (i + 1) * n] for i, label in enumerate(runs)}

    def tuned(self, methods: dict[str, list], seeds: int | None = None, **more: Any) -> dict[str, dict[float, float]]:
        """Mean validation pass@1 at the end, by method and rate of the grid."""
        how = {"split": "val", "samples": 4} | more
        cells = [(name, rate) for name in methods for rate in self.rates]

        def job(cell: tuple[str, float], seed: int) -> Job:
            name, rate = cell
            return self.training(f"grid, {name}", seed, methods[name], rate, **how)

        return self.scores(cells, job, seeds or self.grid_seeds)

    def scores(
        self, cells: list[tuple[str, float]], job: Callable[[tuple[str, float], int], Job], count: int
    ) -> dict[str, dict[float, float]]:
        """Mean pass@1 of jobs over the first `count` seeds, by name and rate."""
        seeds = self.seeds[:count]
        found = self.run(job(cell, seed) for cell in cells for seed in seeds)
        grid: dict[str, dict[float, float]] = {}
        for i, (name, rate) in enumerate(cells):
            results = found[i * len(seeds) : (i + 1) * len(seeds)]
            grid.setdefault(name, {})[rate] = round(float(np.mean(self.mean(results, "pass@1"))), 4)
        return grid

    @cached_property
    def grid(self) -> dict[str, dict[float, float]]:
        """Of the methods of the paper's Figures 3 and 4."""
        return self.tuned({name: METHODS[name] for name in self.methods}, **self.sampled)

    @property
    def sampled(self) -> dict[str, int]:
        """Argument of a training on the data as sampled."""
        return {"budget": self.budget} if self.budget else {}

    @cached_property
    def ends(self) -> dict[str, list[dict]]:
        """Those methods, each at its own rate, with curves; REINFORCE longer and at TOPR's rate as well."""
        own = {name: {"loss": METHODS[name], "rate": best(self.grid[name])} for name in self.methods}
        runs = {"REINFORCE, two epochs": own["REINFORCE"] | {"epochs": 2}} | own  # the longest first
        runs["REINFORCE, TOPR's rate"] = {"loss": METHODS["REINFORCE"], "rate": best(self.grid["TOPR"])}
        return self.train({label: run | {"points": self.points} | self.sampled for label, run in runs.items()})

    def mean(self, results: list[dict], metric: str) -> list[float]:
        """A metric's mean over problems, by seed."""
        return [float(np.mean(result["result"][metric])) for result in results]

    def summary(self, results: list[dict]) -> dict[str, Any]:
        return {metric: over_seeds(self.mean(results, metric)) for metric in METRICS}

    def difference(self, one: list[dict], other: list[dict]) -> dict[str, Any]:
        """One minus the other, paired by seed."""
        pairs = {metric: (self.mean(one, metric), self.mean(other, metric)) for metric in METRICS}
        return {metric: over_seeds([a - b for a, b in zip(*pair, strict=True)]) for metric, pair in pairs.items()}

    def settings(self, grid: dict[str, dict[float, float]], **more: Any) -> dict[str, Any]:
        """What a claim was measured with, and which methods would perhaps want a rate beyond the grid."""
        fixed = {"optimizer": REGIMES[self.regime].optimizer.__name__, "batch_size": BATCH, "gradient_clip": CLIP}
        given = {"regime": self.regime} | fixed | {"seeds": self.seeds, "samples": self.samples, "data": self.scale}
        edges = [name for name, scores in grid.items() if best(scores) in (min(self.rates), max(self.rates))]
        given |= {"rates": self.rates, "grid_seeds": self.grid_seeds, "validation": grid, "at_edge": edges}
        return given | more
