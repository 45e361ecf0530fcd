"""Compiled decoder layers: the same update, and sampling as it was."""

import shutil

import pytest
import torch
from conftest import ROOT, make_trajectories, write
from safetensors.torch import load_file
from test_update import QUIET, fit
from torch._dynamo.utils import counters

import train


@pytest.fixture
def data(run, policy):
    return write(run.folder / "a.parquet", policy, make_trajectories(policy))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_layers_do_not_change_the_update(run, policy, data, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(run.folder / "inductor"))
    (run.folder / "val.jsonl").write_text('{"id": "a", "prompt": "3+4=", "gold": "7"}\n')
    more = ["--data.batch_size=8", "--model.activation_checkpointing=selective", "--data.val=val.jsonl"]
    plain = fit(run, policy, data, *more)
    counters.clear()
    compiled = fit(run, policy, data, *more, "--model.compile=true")
    # norm, MLP, attention before and behind its spans, what tries the compiler: one for all layers, none for sampling
    assert 4 <= counters["stats"]["unique_graphs"] <= 6
    for name, weight in load_file(plain / "policy" / "model.safetensors").items():
        found = load_file(compiled / "policy" / "model.safetensors")[name]
        torch.testing.assert_close(found, weight, atol=1e-6, rtol=0, msg=name)


def test_a_missing_compiler_is_told_in_one_sentence(run, policy, data, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no g++ here\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", *QUIET]
    files = [f"--model.policy={policy}", f"--data.train={data}"]
    code, _, err = run(train.main, "fit", *config, *files, "--model.compile=true")
    assert code == 2 and err.count("\n") == 1 and "model.compile" in err and "no g++ here" in err and "more" not in err
