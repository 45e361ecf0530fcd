"""Metrics against enumeration."""

import itertools
import math

import numpy as np
import pytest

from topr.metrics import bootstrap_interval, maj_at_k, pass_at_k, training_statistics


def test_pass_at_k_equals_enumeration():
    for n, c in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1):
            if c <= n:
                drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(d) for d in drawn]), abs=1e-12)
    with pytest.raises(ValueError, match="k <= n"):
        pass_at_k(2, 1, 3)


def test_majority_counts_ties_by_expectation_and_ignores_invalid_votes():
    assert maj_at_k(["a", "b", "a"], [True, False, True], 3) == 1
    assert maj_at_k(["a", "b"], [True, False], 2) == maj_at_k(["b", "a"], [False, True], 2) == 0.5
    assert maj_at_k(["a", "b", "c"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert maj_at_k([None, None, "a"], [False, False, True], 3) == 1
    assert maj_at_k([None, None], [False, False], 2) == 0
    assert maj_at_k(["a", "a", "b", "b"], [True, True, False, False], 2) == 0.5  # two disjoint votes
    assert maj_at_k(["a", "b", "b"], [True, False, False], 3, weights=[3, 1, 1]) == 1
    with pytest.raises(ValueError, match="maj@k"):
        maj_at_k(["a"], [True], 2)


def test_bootstrap_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(300):
        low, high = bootstrap_interval(rng.random(100) < 0.3, resamples=400, seed=seed)
        covered += low <= 0.3 <= high
    assert 0.90 <= covered / 300 <= 0.98
    assert bootstrap_interval(np.ones(5)) == (1, 1)


def test_training_statistics_by_hand():
    rows = {
        "reward": [1, -1, -1, -1], "advantage": [1, -1, -1, -1], "length": [2, 4, 5, 10], "loss": [0.1, 0.2, 0.3, 0.4],
        "objective": [1, -1, -0.5, 0], "log_ratio": [1, 2, -1, -20], "weight": [1, 1, math.exp(-1), math.exp(-20)],
        "truncated": [1, 1, 0, 0], "gradient": [3, 1, 0, 0],
    }  # fmt: skip
    found = training_statistics({name: np.array(values, dtype=float) for name, values in rows.items()})
    total = 2 + math.exp(-1) + math.exp(-20)
    expected = {
        "train/loss": 0.25, "train/objective": -0.125, "train/reward": -0.5, "train/positive_share": 0.25,
        "train/effective_positive_share": 0.25, "gradient/positive_share": 0.75, "log_ratio/positives_mean": 1,
        "log_ratio/negatives_min": -20, "log_ratio/negatives_max": 2, "drift/positives": 0.5,
        "drift/negatives": (0.5 - 0.2 - 2) / 3, "weight/negatives_below_0.01": 1 / 3,
        "weight/negatives_truncated": 1 / 3,
        "weight/effective_sample_size": total**2 / (4 * (2 + math.exp(-2) + math.exp(-40))),
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name
