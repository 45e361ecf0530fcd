"""Metrics of graded responses: one value per problem, with bootstrap intervals over problems."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice
from statistics import fmean

import numpy as np
import pandas as pd

from topr.trajectories import Trajectory


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
    weights = weights or [1.0] * len(answers)
    is_correct = dict(zip(answers, correct, strict=True))
    results = []
    for start in range(0, len(answers) - k + 1, k):
        votes: Counter = Counter()
        for i in range(start, start + k):
            votes[answers[i]] += weights[i]  # type: ignore[assignment]
        del votes[None]
        most = max(votes.values(), default=0)
        tied = [is_correct[answer] for answer in votes if math.isclose(votes[answer], most)]
        results.append(fmean(tied or [0]))
    return fmean(results)


def per_problem(
    trajectories: list[Trajectory], ks: Sequence[int] = (), weights: Sequence[float] = ()
) -> pd.DataFrame:
    """Metrics of the responses to each problem: a row for each problem, a column for each metric.

    pass@1, then for each k pass@k, maj@k and, given weights, weighted@k; invalid (share without a
    readable answer), length (mean tokens of a response), ungraded (share on which the grader gave
    up).

    Args:
        trajectories: responses, those to one problem one after another.
        ks: of pass@k and maj@k; by default the number of responses to a problem.
        weights: of the votes, one for each response; none by default.
    """
    rows = []
    votes = iter(weights)
    for _, group in groupby(trajectories, lambda row: row.prompt_id):
        responses = list(group)
        own_votes = list(islice(votes, len(responses)))
        correct = [response.reward > 0 for response in responses]
        answers = [response.answer if response.valid else None for response in responses]
        values = {"pass@1": fmean(correct)}
        for k in ks or [len(responses)]:
            values[f"pass@{k}"] = pass_at_k(len(responses), sum(correct), k)
            values[f"maj@{k}"] = maj_at_k(answers, correct, k)
            if weights:
                values[f"weighted@{k}"] = maj_at_k(answers, correct, k, own_votes)
        values["invalid"] = fmean(not response.valid for response in responses)
        values["length"] = fmean(len(response.response_ids) for response in responses)
        values["ungraded"] = fmean(response.valid is None for response in responses)
        rows.append(values)
    return pd.DataFrame(rows)


def summarise(values: pd.DataFrame, seed: int = 0) -> dict:
    """`{name: {"mean": …, "interval": [low, high]}}` of per-problem values, or of their paired
    differences: 95% percentile bootstrap intervals from 2,000 resamples of the problems.

    `ungraded` is left out where it is 0, which it is for most graders."""
    resamples = np.random.default_rng(seed).integers(len(values), size=(2000, len(values)))
    summaries = {}
    for name, column in values.items():
        if name != "ungraded" or column.any():
            means = column.to_numpy()[resamples].mean(axis=1)
            interval = np.quantile(means, [0.025, 0.975])
            summaries[name] = {"mean": float(column.mean()), "interval": interval.tolist()}
    return summaries
