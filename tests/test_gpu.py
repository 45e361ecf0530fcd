"""`gpu.py` on a CPU, in small."""

import json
import os
import subprocess
import sys

import gpu
import pytest
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_runs_without_a_gpu():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "tests" / "gpu.py", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["part"] for row in rows if "part" in row] == list(gpu.PARTS)
    assert {row["updates"] for row in rows if "model" in row} == {6}
    assert [row["engine"] for row in rows if "engine" in row] == ["ours", "generate"]
    done = subprocess.run(command[:2], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "no GPU; --small" in done.stderr
