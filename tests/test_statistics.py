"""What training logs of an update, and the check of log mu before the first one."""

import math

import numpy as np
import pytest
from conftest import make_trajectories, rejected, write
from test_update import fit, fit_arguments

from topr.losses.statistics import statistics

COLUMNS = ["reward", "advantage", "length", "loss", "objective", "log_ratio", "weight"]
COLUMNS += ["truncated", "gradient", "group"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def by_hand(rows: list[dict]) -> dict[str, float]:
    """The glossary of callbacks/README.md, row by row."""
    positives = [row for row in rows if row["advantage"] >= 0]
    negatives = [row for row in rows if row["advantage"] < 0]
    total = sum(abs(row["advantage"]) for row in rows)
    gradient = sum(row["gradient"] for row in rows)
    weights = [row["weight"] for row in rows]
    with_signal = {row["group"] for row in rows if row["advantage"] != 0}
    found = {
        "train/positive_share": len(positives) / len(rows),
        "train/effective_positive_share": sum(row["advantage"] for row in positives) / total,
        "train/groups_without_signal": len({row["group"] for row in rows} - with_signal),
        "weight/effective_sample_size": mean(weights) ** 2 / mean([w * w for w in weights]),
        "weight/negatives_below_0.01": mean([row["weight"] < 0.01 for row in negatives]),
        "gradient/positive_share": sum(row["gradient"] for row in positives) / gradient,
    }
    for name in ("loss", "objective", "reward"):
        found[f"train/{name}"] = mean([row[name] for row in rows])
    for sign, chosen in (("positives", positives), ("negatives", negatives)):
        ratios = [row["log_ratio"] for row in chosen]
        found |= {
            f"log_ratio/{sign}_mean": mean(ratios),
            f"log_ratio/{sign}_min": min(ratios, default=math.nan),
            f"log_ratio/{sign}_max": max(ratios, default=math.nan),
            f"drift/{sign}": mean([row["log_ratio"] / row["length"] for row in chosen]),
            f"weight/{sign}_truncated": mean([row["truncated"] for row in chosen]),
        }
    return found


@pytest.mark.parametrize("lowest", [-2, 0])
def test_statistics_are_those_of_a_plain_loop(lowest):
    """An advantage of 0 is positive; without negatives, there is nothing to say about them."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(40):
        row = {name: float(rng.normal()) for name in COLUMNS}
        row |= {"group": i // 4, "length": i + 1, "gradient": row["gradient"] ** 2}
        row["advantage"] = int(rng.integers(lowest, 3)) if i // 4 not in (3, 7) else 0
        row["weight"] = 10.0 ** rng.uniform(-4, 1)
        rows.append(row)
    found = statistics({name: np.array([row[name] for row in rows]) for name in COLUMNS})
    assert found == pytest.approx(by_hand(rows), nan_ok=True)
    assert found["train/groups_without_signal"] >= 2


def test_log_mu_must_be_that_of_the_policy_which_the_file_names(run, policy):
    trajectories = make_trajectories(policy)
    fit(run, policy, write(run.folder / "right.parquet", policy, trajectories))
    trajectories[5].ref_logprobs[0] -= 0.05  # the mean of all 23 is below the bound of 0.01
    wrong = write(run.folder / "wrong.parquet", policy, trajectories)
    sentence = rejected(run, "|log pi - log mu|", *fit_arguments(policy, wrong))
    assert "is 0.05, expected at most 0.01" in sentence and f"row 5 of {wrong}" in sentence
    fit(run, policy, write(run.folder / "other.parquet", policy, trajectories, policy="another"))
    half = write(run.folder / "half.parquet", policy, trajectories, precision="bf16-mixed")
    fit(run, policy, half)  # whose bound is the median of a token
    for trajectory in trajectories:
        trajectory.ref_logprobs = [value - 0.05 for value in trajectory.ref_logprobs]
    write(half, policy, trajectories, precision="bf16-mixed")
    rejected(run, "the median |log pi - log mu| per token", *fit_arguments(policy, half))
