"""Metrics of graded responses: one value per problem, gathered over ranks, with bootstrap intervals over problems."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice, repeat
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from topr.trajectories import Trajectory

Responses = list[Trajectory]  # to one problem
Weights = Sequence[float]  # of these responses, by a verifier
Value = Callable[..., float]  # of responses and weights


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k responses is correct, from c correct among n: 1 - C(n-c, k) / C(n, k)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int, weights: Weights | None = None) -> float:
    """Expected correctness of the majority answer of k responses, in [0, 1].

    None marks an invalid response, which does not vote. Ties count the mean correctness of the tied answers. Without
    any vote the result is 0. More than k responses are averaged over disjoint runs of k.

    Args:
        answers: canonical answer of each response.
        correct: whether that answer is correct, the same for equal answers.
        weights: weight of each vote, 1 by default.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@k needs 1 <= k <= {len(answers)} responses, got k={k}")
    weights, right = weights or [1.0] * len(answers), dict(zip(answers, correct, strict=True))
    results = []
    for start in range(0, len(answers) - k + 1, k):
        votes: dict[str | None, float] = defaultdict(float)
        for i in range(start, start + k):
            votes[answers[i]] += weights[i]
        votes.pop(None, None)
        tied = [answer for answer, vote in votes.items() if math.isclose(vote, max(votes.values()))]
        results.append(fmean(right[answer] for answer in tied) if tied else 0.0)
    return float(np.mean(results))


class PerProblem(Metric):
    """A value for each problem that follows from its responses and their weights, for the problems of all ranks."""

    values: list[torch.Tensor]
    full_state_update = False

    def __init__(self, of_problem: Value, **kwargs: Any):
        super().__init__(**kwargs)
        self.of_problem = of_problem
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, problems: list[Responses], weights: Iterable[float] = repeat(1.0)) -> None:
        """Add the responses to some problems, or to none; the weights of all of them follow each other."""
        rest = iter(weights)
        found = [self.of_problem(rows, list(islice(rest, len(rows)))) for rows in problems]
        self.values.append(torch.tensor(found, dtype=torch.float64, device=self.device))

    def compute(self) -> torch.Tensor:
        """The values, rank by rank."""
        return dim_zero_cat(self.values)


def _majority(rows: Responses, k: int, weights: Weights | None = None) -> float:
    return maj_at_k([row.answer if row.valid else None for row in rows], [row.reward > 0 for row in rows], k, weights)


def response_metrics(ks: Sequence[int], weighted: bool = False, **kwargs: Any) -> MetricCollection:
    """Metrics whose `compute` gives a value for each problem of all ranks, rank by rank.

    pass@1; pass@k, maj@k and, where `weighted`, weighted@k for each k; invalid (share without a readable answer);
    length (mean response tokens); ungraded (share that the grader gave up on). `kwargs` are those of any `Metric`.
    """
    values: dict[str, Value] = {"pass@1": lambda rows, _: fmean(row.reward > 0 for row in rows)}
    for k in ks:
        values[f"pass@{k}"] = lambda rows, _, k=k: pass_at_k(len(rows), sum(row.reward > 0 for row in rows), k)
        values[f"maj@{k}"] = lambda rows, _, k=k: _majority(rows, k)
        if weighted:
            values[f"weighted@{k}"] = lambda rows, weights, k=k: _majority(rows, k, weights)
    values["invalid"] = lambda rows, _: 1 - fmean(bool(row.valid) for row in rows)
    values["length"] = lambda rows, _: fmean(len(row.response_ids) for row in rows)
    values["ungraded"] = lambda rows, _: fmean(row.valid is None for row in rows)
    metrics = MetricCollection({}, compute_groups=False)  # groups would merge metrics whose first values are equal
    for name, value in values.items():  # one by one: a dictionary would be sorted
        metrics.add_metrics({name: PerProblem(value, **kwargs)})
    return metrics


def group_by_problem(trajectories: Sequence[Trajectory]) -> list[Responses]:
    """The responses to each problem, which must follow each other."""
    return [list(rows) for _, rows in groupby(trajectories, key=lambda row: row.prompt_id)]


def per_problem(rows: Sequence[Trajectory], ks: Sequence[int] = (), weights: Weights = ()) -> dict[str, np.ndarray]:
    """The values of `response_metrics` for each problem, from the trajectories of this process alone.

    By default k is the number of responses per problem, the fewest where problems differ.
    """
    problems = group_by_problem(rows)
    metrics = response_metrics(ks or [min(map(len, problems))], weighted=bool(weights), sync_on_compute=False)
    metrics.update(problems, weights=weights or repeat(1.0))
    return to_arrays(metrics)


def to_arrays(metrics: MetricCollection) -> dict[str, np.ndarray]:
    """What `compute` gives, on the CPU; it drops the axis where there is one problem."""
    return {name: np.atleast_1d(values.cpu()) for name, values in metrics.compute().items()}


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean of per-problem values, from 2,000 resamples of the problems.

    Paired comparison of two policies: pass the per-problem differences.
    """
    rng = np.random.default_rng(seed)
    low, high = np.quantile([rng.choice(values, len(values)).mean() for _ in range(2000)], [0.025, 0.975])
    return float(low), float(high)


def summarise(metrics: MetricCollection | Mapping[str, np.ndarray], seed: int = 0) -> dict[str, dict[str, Any]]:
    """`{name: {"mean": …, "interval": [low, high]}}` of metrics, for which every rank must call, or of arrays.

    `ungraded` is left out where it is 0.
    """
    if isinstance(metrics, MetricCollection):
        metrics = to_arrays(metrics)
    return {
        name: {"mean": float(values.mean()), "interval": list(bootstrap_interval(values, seed))}
        for name, values in metrics.items()
        if name != "ungraded" or values.any()
    }
