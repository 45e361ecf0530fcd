"""Compiled decoder layers: the same update, and sampling is not compiled."""

import shutil

import pytest
import torch
from conftest import make_trajectories, rejected, write
from test_update import assert_close_weights, fit, fit_arguments
from torch._dynamo.utils import counters


@pytest.fixture
def data(run, policy):
    return write(run.folder / "a.parquet", policy, make_trajectories(policy))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_layers_do_not_change_the_update(run, policy, data, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(run.folder / "inductor"))
    (run.folder / "val.jsonl").write_text('{"id": "a", "prompt": "3+4=", "gold": "7"}\n')
    more = ["--data.batch_size=8", "--model.activation_checkpointing=true", "--data.val=val.jsonl"]
    plain = fit(run, policy, data, *more)
    counters.clear()
    compiled = fit(run, policy, data, *more, "--model.compile=true")
    # norm, MLP, attention before and behind its spans, the trial of the compiler: one for all
    # layers, none for sampling
    assert 4 <= counters["stats"]["unique_graphs"] <= 6
    assert_close_weights(plain, compiled)


def test_a_missing_compiler_is_explained_in_one_sentence(run, policy, data, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no g++ here\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    message = rejected(run, "no g++ here", *fit_arguments(policy, data, "--model.compile=true"))
    assert "model.compile" in message and "more" not in message
