"""What training logs of a global batch, and the check of log mu before the first update."""

import numpy as np
import pytest
import torch
from conftest import make_trajectories, rejected, write
from test_update import fit, fit_arguments

from topr.callbacks import monitor
from topr.callbacks.monitor import training_statistics


def test_statistics_of_a_global_batch_computed_by_hand():
    rows = {
        "reward": [1.0, 1.0, -1.0, -1.0],
        "advantage": [1.0, 0.0, -1.0, -2.0],
        "length": [2.0, 4.0, 5.0, 10.0],
        "loss": [0.5, 0.0, -0.25, -0.75],
        "objective": [-1.0, 0.0, 2.0, 3.0],
        "log_ratio": [0.2, -0.4, -5.0, 1.0],
        "weight": [1.0, 1.0, 0.005, 1.0],
        "truncated": [0.0, 0.5, 0.0, 1.0],
        "gradient": [1.0, 3.0, 4.0, 2.0],
    }
    rows = {name: np.array(column) for name, column in rows.items()}
    expected = {
        "train/loss": -0.125,
        "train/objective": 1.0,
        "train/reward": 0.0,
        "train/positive_share": 0.5,  # an advantage of 0 is positive
        "train/effective_positive_share": 0.25,
        "weight/effective_sample_size": 3.005**2 / (3.000025 * 4),
        "weight/negatives_below_0.01": 0.5,
        "weight/positives_truncated": 0.25,
        "weight/negatives_truncated": 0.5,
        "gradient/positive_share": 0.4,
        "log_ratio/positives_mean": -0.1,
        "log_ratio/positives_min": -0.4,
        "log_ratio/positives_max": 0.2,
        "log_ratio/negatives_mean": -2.0,
        "log_ratio/negatives_min": -5.0,
        "log_ratio/negatives_max": 1.0,
        "drift/positives": 0.0,
        "drift/negatives": -0.45,
    }
    assert training_statistics(rows) == pytest.approx(expected)
    # an advantage of 0 within a group has no sign
    changed = {
        "train/positive_share": 0.25,
        "gradient/positive_share": 0.1,
        "log_ratio/positives_mean": 0.2,
    }
    found = training_statistics(rows, of_group=True)
    assert {name: found[name] for name in changed} == pytest.approx(changed)


def test_one_wrong_log_prob_among_many_is_found(run, policy):
    trajectories = make_trajectories(policy)
    arguments = ["--data.batch_size=64", "--trainer.max_steps=1"]
    fit(run, policy, write(run.folder / "right.parquet", policy, trajectories), *arguments)
    trajectories[5].ref_logprobs[0] -= 0.05  # the mean of all 23 is below the bound of 0.01
    data = write(run.folder / "wrong.parquet", policy, trajectories)
    rejected(run, "the largest |log pi - log mu| is 0.05", *fit_arguments(policy, data, *arguments))


def test_a_model_that_needs_data_is_trained_without_an_estimate(run, policy, tmp_path, monkeypatch):
    data = write(tmp_path / "train.parquet", policy, make_trajectories(policy))
    told, errors = [], iter([False, True])
    monkeypatch.setattr(monitor, "rank_zero_info", told.append)
    estimate = monitor.estimate

    def sometimes(*arguments, **keywords):
        if next(errors):
            raise RuntimeError("experts need data")
        return estimate(*arguments, **keywords)

    monkeypatch.setattr(monitor, "estimate", sometimes)
    fit(run, policy, data)
    fit(run, policy, data)
    first, second = (text for text in told if "memory" in text)
    assert first.startswith("estimated memory: 0.")
    assert second == "the memory of training cannot be estimated: experts need data"


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA B200", 2250e12),
    ]
    + [("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40S", 362e12)],
)
def test_the_peak_of_known_gpus_is_that_of_their_data_sheet(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    assert monitor.peak_flops(torch.device("cuda")) == peak
