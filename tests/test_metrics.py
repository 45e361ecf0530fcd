"""Metrics against enumeration, intervals against a plain loop, and their synchronisation across ranks."""

import itertools
import math
import os

import numpy as np
import pytest
import torch

from topr.evaluation import (
    PerProblem,
    group_by_problem,
    maj_at_k,
    pass_at_k,
    per_problem,
    summarise,
)
from topr.evaluation.metrics import bootstrap_interval
from topr.trajectories import Trajectory


def responses(prompt: str, *given: tuple[str | None, float]) -> list[Trajectory]:
    """Responses to a prompt from (answer, reward), the i-th of i + 1 tokens; without an answer, they are invalid."""
    return [
        Trajectory(
            prompt,
            prompt,
            prompt,
            [3],
            "",
            [3] * (i + 1),
            [],
            reward,
            True,
            answer is not None,
            answer,
        )
        for i, (answer, reward) in enumerate(given)
    ]


SOME = [
    *responses("p", ("a", 1), ("a", 1), ("b", -1), (None, -1)),
    *responses("q", ("c", -1), ("d", 1), ("d", 1), ("d", 1)),
    *responses("r", (None, -1), (None, -1), (None, -1), ("e", -1)),
]


def test_pass_at_k_equals_enumeration():
    for n, c in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1):
            if c <= n:
                drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(
                    np.mean([any(d) for d in drawn]), abs=1e-12
                )
    with pytest.raises(ZeroDivisionError):
        pass_at_k(2, 1, 3)


def test_majority_counts_ties_by_expectation_and_ignores_invalid_votes():
    assert maj_at_k(["a", "b", "a"], [True, False, True], 3) == 1
    assert maj_at_k(["a", "b"], [True, False], 2) == maj_at_k(["b", "a"], [False, True], 2) == 0.5
    assert maj_at_k(["a", "b", "c"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert maj_at_k([None, None, "a"], [False, False, True], 3) == 1
    assert maj_at_k([None, None], [False, False], 2) == 0
    assert (
        maj_at_k(["a", "a", "b", "b"], [True, True, False, False], 2) == 0.5
    )  # two disjoint votes
    assert maj_at_k(["a", "b", "b"], [True, False, False], 3, weights=[3, 1, 1]) == 1


def test_values_of_each_problem():
    assert [len(rows) for rows in group_by_problem(SOME)] == [4, 4, 4]
    values = per_problem(SOME, ks=(2, 4))
    expected = {
        "pass@1": [1 / 2, 3 / 4, 0], "pass@2": [5 / 6, 1, 0], "maj@2": [(1 + 0) / 2, (0.5 + 1) / 2, 0],
        "pass@4": [1, 1, 0], "maj@4": [1, 1, 0], "invalid": [1 / 4, 0, 3 / 4], "length": [2.5, 2.5, 2.5],
        "ungraded": [0, 0, 0],
    }  # fmt: skip
    assert list(values) == list(expected)  # the order of the columns of a table
    for name, column in expected.items():
        np.testing.assert_allclose(values[name], column, atol=1e-12, err_msg=name)
    assert list(per_problem(SOME[:-1])) == [
        "pass@1",
        "pass@3",
        "maj@3",
        "invalid",
        "length",
        "ungraded",
    ]  # the fewest


def test_weights_belong_to_the_responses_in_their_order():
    weighted = per_problem(SOME, (2, 4), [0.1, 0.1, 0.9, 5, 5, 1, 1, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(weighted["weighted@4"], [0, 0, 0])
    np.testing.assert_allclose(weighted["weighted@2"], [0.5, 0.5, 0])
    np.testing.assert_allclose(weighted["maj@4"], [1, 1, 0])
    assert list(weighted)[:4] == ["pass@1", "pass@2", "maj@2", "weighted@2"]


def test_ungraded_is_reported_where_a_grader_gave_up():
    assert "ungraded" not in summarise(per_problem(SOME))
    rows = responses("p", ("a", 1), ("b", -1), ("b", -1), ("c", -1))
    rows[1].valid = rows[2].valid = None
    found = summarise(per_problem(rows))
    assert (
        found["ungraded"]["mean"] == found["invalid"]["mean"] == found["maj@4"]["mean"] == 0.5
    )  # b does not vote
    assert found["ungraded"]["interval"] == [0.5, 0.5]  # one problem


def test_intervals_equal_those_of_a_loop():
    values = np.random.default_rng(3).random(37)
    rng = np.random.default_rng(5)
    means = sorted(values[rng.integers(37, size=37)].mean() for _ in range(2000))
    low, high = bootstrap_interval(values, seed=5)
    assert (low, high) == tuple(np.quantile(means, [0.025, 0.975]))
    assert means[49] <= low <= means[50] and means[1949] <= high <= means[1950]
    assert bootstrap_interval(values, seed=6) != (low, high)
    normal = 1.96 * values.std() / math.sqrt(37)  # 90% would be 1.64
    assert (high - low) / 2 == pytest.approx(normal, rel=0.06)
    assert bootstrap_interval(np.ones(5)) == (1, 1) and bootstrap_interval(np.array([0.3])) == (
        0.3,
        0.3,
    )


def test_summaries_are_of_all_updates():
    metrics, problems = PerProblem(4), group_by_problem(SOME)[::-1]
    for rows in problems:  # of the first problem alone, pass@1 and pass@4 are equal
        metrics.update(rows)
    metrics.update([])
    assert summarise(metrics.compute(), seed=2) == summarise(per_problem(sum(problems, [])), seed=2)
    assert metrics.compute()["maj@4"].dtype == np.float64


@pytest.mark.parametrize("shares", [[[0, 2], [1]], [[0, 1, 2], []], [[], [0, 1, 2]]])
def test_ranks_gather_the_problems_of_all(tmp_path, shares):
    problems = group_by_problem(SOME)
    expected = summarise(
        per_problem([row for share in shares for i in share for row in problems[i]])
    )

    def rank(number: int) -> bool:
        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=number, world_size=2)
        metrics = PerProblem(4)
        metrics.update([row for i in shares[number] for row in problems[i]])
        local = per_problem(SOME[:4])["pass@1"].tolist() == [0.5]  # of this process alone
        return local and summarise(metrics.compute()) == expected == summarise(metrics.compute())

    children = []
    for number in range(2):
        if not (child := os.fork()):
            code = 1
            try:
                code = 0 if rank(number) else 3
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
