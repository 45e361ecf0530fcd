"""Metrics of graded responses: one value per problem, with bootstrap intervals over problems."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from statistics import fmean
from typing import Any

import numpy as np

from topr.distributed import gather
from topr.trajectories import Trajectory

Responses = list[Trajectory]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k responses is correct, from c correct ones among n >= k:
    1 - C(n-c, k) / C(n, k) (arXiv:2107.03374, equation 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(
    answers: Sequence[str | None], correct: Sequence[bool], k: int, weights: Sequence[float] = ()
) -> float:
    """Expected correctness of the majority answer of k responses; 0 without votes.

    The mean over disjoint runs of k responses. Tied answers count with their mean correctness.

    Args:
        answers: of each response; None, an invalid one, does not vote.
        correct: whether each answer is correct; equal answers are equally correct.
        k: responses that vote together.
        weights: of each vote; 1 by default.
    """
    is_correct = dict(zip(answers, correct, strict=True))
    weights = weights or [1.0] * len(answers)
    results = []
    for start in range(0, len(answers) - k + 1, k):
        votes: dict[str | None, float] = defaultdict(float)
        for i in range(start, start + k):
            votes[answers[i]] += weights[i]
        votes.pop(None, None)
        most = max(votes.values(), default=0)
        tied = [is_correct[answer] for answer in votes if math.isclose(votes[answer], most)]
        results.append(fmean(tied or [0]))
    return fmean(results)


def response_metrics(
    responses: Responses, ks: Sequence[int], weights: Sequence[float] = ()
) -> dict[str, float]:
    """Metrics of the responses to one problem.

    pass@1, then for each k pass@k, maj@k and, given weights, weighted@k; invalid (share without a
    readable answer), length (mean tokens of a response), ungraded (share on which the grader gave
    up).
    """
    correct = [response.reward > 0 for response in responses]
    answers = [response.answer if response.valid else None for response in responses]
    values = {"pass@1": fmean(correct)}
    for k in ks:
        values[f"pass@{k}"] = pass_at_k(len(responses), sum(correct), k)
        values[f"maj@{k}"] = maj_at_k(answers, correct, k)
        if weights:
            values[f"weighted@{k}"] = maj_at_k(answers, correct, k, weights)
    values["invalid"] = fmean(not response.valid for response in responses)
    values["length"] = fmean(len(response.response_ids) for response in responses)
    values["ungraded"] = fmean(response.valid is None for response in responses)
    return values


def group_by_problem(trajectories: Responses) -> list[Responses]:
    """The responses to each problem. Those to one problem must follow each other."""
    return [list(rows) for _, rows in groupby(trajectories, key=lambda row: row.prompt_id)]


def per_problem(
    trajectories: Responses, ks: Sequence[int] = (), weights: Sequence[float] = ()
) -> dict[str, np.ndarray]:
    """`response_metrics` of each problem: an array for each metric.

    Args:
        trajectories: responses, those to one problem one after another.
        ks: of pass@k and maj@k; by default the smallest number of responses to a problem.
        weights: of the votes, one for each response; none by default.
    """
    problems = group_by_problem(trajectories)
    ks = ks or [min(map(len, problems))]
    votes = iter(weights)
    return columns(
        [response_metrics(part, ks, list(islice(votes, len(part)))) for part in problems]
    )


def per_problem_of_all_ranks(
    trajectories: Responses, numbers: list[int], k: int
) -> dict[str, np.ndarray]:
    """`per_problem` of the problems of all ranks, in the order of their numbers.

    Args:
        trajectories: responses to this rank's problems, perhaps to none.
        numbers: of these problems in the whole set.
        k: of pass@k and maj@k.
    """
    rows = [response_metrics(part, [k]) for part in group_by_problem(trajectories)]
    found: dict[int, dict[str, float]] = {}
    for part in gather(dict(zip(numbers, rows, strict=True))):
        found |= part
    return columns([found[number] for number in sorted(found)])


def columns(rows: list[dict[str, float]]) -> dict[str, np.ndarray]:
    """Rows of the same names as an array for each name."""
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> list[float]:
    """95% percentile bootstrap interval of the mean of values, from 2,000 resamples."""
    rng = np.random.default_rng(seed)
    means = [rng.choice(values, len(values)).mean() for _ in range(2000)]
    return np.quantile(means, [0.025, 0.975]).tolist()


def summarise(values: Mapping[Any, Any], seed: int = 0) -> dict[str, dict]:
    """`{name: {"mean": …, "interval": [low, high]}}` of per-problem values, or of their paired
    differences. `ungraded` is left out where it is 0, which it is for most graders."""
    return {
        name: {"mean": float(column.mean()), "interval": bootstrap_interval(column, seed)}
        for name, column in values.items()
        if name != "ungraded" or column.any()
    }
