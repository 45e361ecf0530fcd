"""The benchmark against the peers goes on working: our arm alone, on a few trajectories."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_benchmark_trains_on_every_token():
    command = [sys.executable, ROOT / "tests" / "benchmark.py", "train", "--quick", "--peers", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (
        done.stderr
    )  # it refuses an arm that takes other tokens than the file holds
    (row,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (row["case"], row["arm"], row["ratio"], row["updates"]) == ("tiny gsm", "ours", [1.0], 1)
    assert all(
        row[name][0] > 0 for name in ("tokens_per_cpu_s", "tokens_per_wall_s", "utilisation")
    )
    assert 10 < row["memory_mb"] < 2000
