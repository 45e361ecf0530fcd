"""Adapters are trained instead of the weights, checkpoints hold them alone, and the export merges them exactly."""

import json

import pytest
import torch
from conftest import ROOT, make_trajectories, rejected, write
from peft import PeftModel
from safetensors.torch import load_file
from test_update import EVERY_STEP, assert_close_weights, fit, fit_arguments, same_weights
from torch._subclasses import FakeTensor
from transformers.models.llama.modeling_llama import LlamaMLP

import train
from topr.policy import load_policy

LORA = [
    "--config", ROOT / "configs" / "lora.yaml", "--model.lora.rank=2", "--model.lora.alpha=3", "--data.batch_size=8",
    "--model.optimizer.init_args.lr=0.02", *EVERY_STEP,
]  # fmt: skip


@pytest.fixture
def data(run, policy):
    return write(run.folder / "a.parquet", policy, make_trajectories(policy))


def test_export_is_the_policy_plus_scaled_adapters(run, policy, data):
    folder = fit(run, policy, data, *LORA)
    assert json.loads((folder / "summary.json").read_text())["max_abs_log_ratio_at_start"] < 1e-5
    base, merged, adapter = (
        load_file(path / name)
        for path, name in (
            (policy, "model.safetensors"),
            (folder / "policy", "model.safetensors"),
            (folder / "adapter", "adapter_model.safetensors"),
        )
    )
    assert base.keys() == merged.keys()
    moved = 0
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in adapter:
            weight = weight + adapter[f"{key}B.weight"] @ adapter[f"{key}A.weight"] * 3 / 2
            assert (weight - base[name]).abs().max() > 1e-4
            moved += 1
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=0)
    assert moved == 2 * 7  # all linear layers of two decoder layers, no other
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(load_policy(str(policy)).model, folder / "adapter")(
            ids
        ).logits
        torch.testing.assert_close(
            load_policy(str(folder / "policy")).logits(ids), expected, atol=1e-5, rtol=1e-5
        )


@pytest.mark.slow
def test_checkpoints_hold_adapters_alone_and_resume_exactly(run, policy, data):
    whole = fit(run, policy, data, *LORA)
    (checkpoint,) = (whole / "checkpoints").glob("*.ckpt")
    names = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert names and all("lora_" in name for name in names)
    name = "--trainer.logger.init_args.name=killed"
    fit(run, policy, data, *LORA, name, "--trainer.max_steps=1")
    code, _, err = run(train.main, *fit_arguments(policy, data, *LORA, name, "--ckpt_path=last"))
    assert code == 0, err
    assert same_weights(whole, run.folder / "runs" / "killed" / "version_0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["--model.lora.rank=3", "--model.lora.alpha=5", "--model.lora=null"]
)
def test_adapters_of_another_shape_do_not_resume(run, policy, data, change):
    fit(run, policy, data, *LORA, "--trainer.max_steps=1")
    rejected(
        run, "another model.lora", *fit_arguments(policy, data, *LORA, change, "--ckpt_path=last")
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["true", "selective"])
def test_activation_checkpointing_does_not_change_the_update(run, policy, data, monkeypatch, kind):
    forward, calls = LlamaMLP.forward, []

    def counted(self, hidden):
        calls.extend([1] * (not isinstance(hidden, FakeTensor)))  # not in the estimate of memory
        return forward(self, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    plain, once = fit(run, policy, data, "--data.batch_size=8"), len(calls)
    less = fit(run, policy, data, "--data.batch_size=8", f"--model.activation_checkpointing={kind}")
    assert len(calls) - once > 1.4 * once  # activations are computed again
    assert_close_weights(plain, less)


def test_targets_that_fit_no_layer_are_rejected(run, policy, data):
    rejected(
        run, "model.lora.targets", *fit_arguments(policy, data, "--model.lora.targets=[nowhere]")
    )
