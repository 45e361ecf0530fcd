"""Metrics of graded responses: one value per problem, gathered over ranks, with bootstrap intervals over problems."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, islice
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from topr.trajectories import Trajectory

Responses = list[Trajectory]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k responses is correct, from c correct among n >= k: 1 - C(n-c, k) / C(n, k)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(
    answers: Sequence[str | None], correct: Sequence[bool], k: int, weights: Sequence[float] = ()
) -> float:
    """Expected correctness of the majority answer of k responses, averaged over disjoint runs of k; 0 without votes.
    None, an invalid response, does not vote; others weigh 1 or their `weights`. Ties count the mean correctness of the
    tied answers. Equal answers must be equally correct."""
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


def response_metrics(
    responses: Responses, ks: Sequence[int], weights: Sequence[float] = ()
) -> dict[str, float]:
    """Metrics of the responses to one problem: pass@1; pass@k, maj@k and, given weights, weighted@k for each k;
    invalid (share without a readable answer); length (mean response tokens); ungraded (share without a verdict)."""
    correct = [response.reward > 0 for response in responses]
    answers = [response.answer if response.valid else None for response in responses]
    values = {"pass@1": fmean(correct)}
    for k in ks:
        values |= {
            f"pass@{k}": pass_at_k(len(responses), sum(correct), k),
            f"maj@{k}": maj_at_k(answers, correct, k),
        }
        if weights:
            values[f"weighted@{k}"] = maj_at_k(answers, correct, k, weights)
    values["invalid"] = 1 - fmean(bool(response.valid) for response in responses)
    values["length"] = fmean(len(response.response_ids) for response in responses)
    return values | {"ungraded": fmean(response.valid is None for response in responses)}


def group_by_problem(trajectories: Responses) -> list[Responses]:
    """The responses to each problem, which must follow each other."""
    return [list(rows) for _, rows in groupby(trajectories, key=lambda row: row.prompt_id)]


def per_problem(
    rows: Responses, ks: Sequence[int] = (), weights: Sequence[float] = ()
) -> dict[str, np.ndarray]:
    """`response_metrics` of each problem, from responses and their weights; k is by default the fewest responses."""
    problems, rest = group_by_problem(rows), iter(weights)
    ks = ks or [min(map(len, problems))]
    found = [response_metrics(some, ks, list(islice(rest, len(some)))) for some in problems]
    return {name: np.array([values[name] for values in found]) for name in found[0]}


class PerProblem(Metric):
    """`response_metrics` of each problem of all ranks, rank by rank."""

    values_PM: list[torch.Tensor]  # P problems, M metrics

    def __init__(self, k: int):
        super().__init__()
        self.k = k
        self.names = list(
            dict.fromkeys(["pass@1", f"pass@{k}", f"maj@{k}", "invalid", "length", "ungraded"])
        )
        self.add_state("values_PM", [], dist_reduce_fx="cat")

    def update(self, trajectories: Responses) -> None:
        rows = [
            list(response_metrics(some, [self.k]).values())
            for some in group_by_problem(trajectories)
        ]
        self.values_PM.append(
            torch.tensor(rows, dtype=torch.float64, device=self.device).view(-1, len(self.names))
        )

    def compute(self) -> dict[str, np.ndarray]:
        return dict(zip(self.names, dim_zero_cat(self.values_PM).cpu().numpy().T, strict=True))


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean of values, or paired differences, from 2,000 resamples of them."""
    rng = np.random.default_rng(seed)
    low, high = np.quantile(
        [rng.choice(values, len(values)).mean() for _ in range(2000)], [0.025, 0.975]
    )
    return float(low), float(high)


def summarise(values: dict[str, np.ndarray], seed: int = 0) -> dict[str, dict[str, Any]]:
    """`{name: {"mean": …, "interval": [low, high]}}` of per-problem values; `ungraded` is left out where it is 0."""
    return {
        name: {"mean": float(column.mean()), "interval": list(bootstrap_interval(column, seed))}
        for name, column in values.items()
        if name != "ungraded" or column.any()
    }
