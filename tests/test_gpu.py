"""`gpu.py` on a CPU, in small."""

import json
import os
import subprocess
import sys

import gpu
import pytest
from conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_part_runs_without_a_gpu(tmp_path):
    command = [sys.executable, ROOT / "tests" / "gpu.py", "--small", "--out", tmp_path]
    options = {
        "capture_output": True,
        "text": True,
        "env": os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    }
    done = subprocess.run(command, **options)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert done.returncode == 0 and list(parts) == list(gpu.PARTS), done.stdout + done.stderr
    for name, part in parts.items():
        assert part["outcome"] == "ran" and part["rows"], (name, part["log"])
        assert not any("error" in row for row in part["rows"])
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("\n## ") == len(gpu.PARTS) and "| ours | 4 | 16 |" in text
    assert "no GPU; --small" in subprocess.run([*command[:2], "--out", tmp_path], **options).stderr


def test_a_part_that_fails_or_takes_too_long_leaves_what_it_recorded(tmp_path):
    (tmp_path / "1B").mkdir()
    (tmp_path / "sample.jsonl").write_text('{"engine": "ours", "rows": 4}\n')
    failed = gpu.run_part("sample", tmp_path, small=True, limit=100)
    assert failed["outcome"].startswith("failed: topr.io.InputError: policy") and failed[
        "rows"
    ] == [{"engine": "ours", "rows": 4}]
    stopped = gpu.run_part("attention", tmp_path, small=True, limit=0.1)
    assert stopped["outcome"] == "stopped after 0 s"
    text = gpu.report({"device": "", "command": "", "commit": "", "date": ""} | dict.fromkeys(VERSIONS, ""), {
        "sample": failed, "attention": stopped,
    })  # fmt: skip
    assert (
        "**This part failed: topr.io" in text and "| ours | 4 |" in text and "stopped after" in text
    )


VERSIONS = ("torch", "lightning", "transformers", "python")
