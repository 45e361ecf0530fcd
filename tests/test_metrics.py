"""Metrics against enumeration, intervals against a plain loop, synchronisation across ranks."""

import itertools
import math
import os
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from topr.datamodule import ProblemBatch
from topr.evaluation import live
from topr.evaluation.metrics import maj_at_k, pass_at_k, per_problem, summarise
from topr.trajectories import Trajectory


def responses(problem: str, *given: tuple[str | None, float]) -> list[Trajectory]:
    """Responses from (answer, reward), the i-th of i + 1 tokens; invalid without an answer."""
    rows = []
    for i, (answer, reward) in enumerate(given):
        ids = [3] * (i + 1)
        valid = answer is not None
        rows.append(
            Trajectory(problem, problem, "?", [3], "", ids, [], reward, True, valid, answer)
        )
    return rows


SOME = [
    *responses("p", ("a", 1), ("a", 1), ("b", -1), (None, -1)),
    *responses("q", ("c", -1), ("d", 1), ("d", 1), ("d", 1)),
    *responses("r", (None, -1), (None, -1), (None, -1), ("e", -1)),
]


def test_pass_at_k_equals_enumeration():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
            expected = np.mean([any(some) for some in drawn])
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_majority_counts_ties_by_expectation_and_ignores_invalid_votes():
    assert maj_at_k(["a", "b", "a"], [True, False, True], 3) == 1
    assert maj_at_k(["a", "b"], [True, False], 2) == maj_at_k(["b", "a"], [False, True], 2) == 0.5
    assert maj_at_k(["a", "b", "c"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert maj_at_k([None, None, "a"], [False, False, True], 3) == 1
    assert maj_at_k([None, None], [False, False], 2) == 0
    two_votes = maj_at_k(["a", "a", "b", "b"], [True, True, False, False], 2)
    assert two_votes == 0.5
    assert maj_at_k(["a", "b", "b"], [True, False, False], 3, weights=[3, 1, 1]) == 1


def test_values_of_each_problem():
    expected = {
        "pass@1": [1 / 2, 3 / 4, 0],
        "pass@2": [5 / 6, 1, 0],
        "maj@2": [(1 + 0) / 2, (0.5 + 1) / 2, 0],
        "pass@4": [1, 1, 0],
        "maj@4": [1, 1, 0],
        "invalid": [1 / 4, 0, 3 / 4],
        "length": [2.5, 2.5, 2.5],
        "ungraded": [0, 0, 0],
    }
    values = per_problem(SOME, ks=(2, 4))
    assert list(values) == list(expected)  # the order of the columns of a table
    for name, column in expected.items():
        np.testing.assert_allclose(values[name], column, atol=1e-12, err_msg=name)
    assert "maj@4" in per_problem(SOME)  # all responses


def test_weights_belong_to_the_responses_in_their_order():
    weighted = per_problem(SOME, (2, 4), [0.1, 0.1, 0.9, 5, 5, 1, 1, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(weighted["weighted@4"], [0, 0, 0])
    np.testing.assert_allclose(weighted["weighted@2"], [0.5, 0.5, 0])
    np.testing.assert_allclose(weighted["maj@4"], [1, 1, 0])


def test_ungraded_is_reported_where_a_grader_gave_up():
    assert "ungraded" not in summarise(per_problem(SOME))
    rows = responses("p", ("a", 1), ("b", -1), ("b", -1), ("c", -1))
    rows[1].valid = rows[2].valid = None
    found = summarise(per_problem(rows))
    assert found["ungraded"] == {"mean": 0.5, "interval": [0.5, 0.5]}  # one problem
    assert found["invalid"]["mean"] == found["maj@4"]["mean"] == 0.5  # b does not vote


def test_intervals_equal_those_of_a_loop():
    values = np.random.default_rng(3).random(37)

    def interval(seed, column=values):
        return summarise(pd.DataFrame({"x": column}), seed)["x"]["interval"]

    rng = np.random.default_rng(5)
    means = sorted(values[row].mean() for row in rng.integers(37, size=(2000, 37)))
    low, high = interval(5)
    assert means[49] <= low <= means[50] and means[1949] <= high <= means[1950]
    assert interval(6) != [low, high]
    normal = 1.96 * values.std() / math.sqrt(37)  # 90% would be 1.64
    assert (high - low) / 2 == pytest.approx(normal, rel=0.06)


@pytest.mark.parametrize("shares", [[[0, 2], [1]], [[2, 1, 0], []]])
def test_ranks_gather_the_problems_of_all(tmp_path, shares):
    problems = [SOME[:4], SOME[4:8], SOME[8:]]
    expected = summarise(per_problem(SOME))

    def gathered(rank: int) -> bool:
        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        rows = [row for i in shares[rank] for row in problems[i]]
        batch = ProblemBatch(SimpleNamespace(samples=4), shares[rank])
        return live.metrics_of_all_ranks(batch, rows) == expected

    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if gathered(rank) else 3
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0]
