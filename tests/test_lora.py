"""Adapters are trained instead of the weights; checkpoints hold them alone; the export merges
them."""

import json

import pytest
import torch
from conftest import ROOT, make_policy, make_trajectories, rejected, write
from peft import PeftModel
from safetensors.torch import load_file
from test_update import assert_close_weights, fit, fit_arguments, same_weights
from torture import summary
from transformers.models.llama.modeling_llama import LlamaMLP

import train
from topr import PolicyModule
from topr.policy import load_policy

LORA = ["--config", ROOT / "configs" / "lora.yaml", "--model.lora.rank=2", "--model.lora.alpha=3"]
LORA += ["--model.optimizer.init_args.lr=0.02", "--data.batch_size=8"]
LORA += ["--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint"]
LORA += ["--trainer.callbacks.init_args.every_n_train_steps=1"]
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def data(run, policy):
    return write(run.folder / "a.parquet", policy, make_trajectories(policy))


def test_export_is_the_policy_plus_scaled_adapters(run, policy, data):
    folder = fit(run, policy, data, *LORA)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["max_abs_log_ratio_at_start"] < 1e-5
    base = load_file(policy / "model.safetensors")
    merged = load_file(folder / "policy" / "model.safetensors")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert base.keys() == merged.keys()
    moved = 0
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in adapter:
            change = adapter[f"{key}B.weight"] @ adapter[f"{key}A.weight"] * 3 / 2
            assert change.abs().max() > 1e-4
            weight = weight + change
            moved += 1
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=0)
    assert moved == 2 * 7  # all linear layers of two decoder layers, no other
    with_adapter = PeftModel.from_pretrained(load_policy(str(policy)).model, folder / "adapter")
    exported = load_policy(str(folder / "policy"))
    torch.testing.assert_close(exported.logits(IDS), with_adapter(IDS).logits)


def test_checkpoints_hold_adapters_alone(run, policy, data):
    folder = fit(run, policy, data, *LORA)
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert weights
    assert all("lora_" in name for name in weights)
    module = PolicyModule.load_from_checkpoint(checkpoint)
    exported = load_policy(str(folder / "policy"))
    torch.testing.assert_close(module.policy.logits(IDS), exported.logits(IDS))
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert trained == list(weights)


@pytest.mark.slow
def test_adapters_resume_exactly(run, policy, data):
    whole = fit(run, policy, data, *LORA)
    name = "--trainer.logger.init_args.name=arithmetic-again"
    arguments = [policy, data, *LORA, name]
    stopped = fit_arguments(*arguments, "--trainer.max_steps=1", "--ckpt_path=last")
    resumed = fit_arguments(*arguments, "--ckpt_path=last")
    for given in (stopped, resumed):
        code, out, err = run(train.main, *given)
        assert code == 0, err
    assert "resuming" in out
    assert same_weights(whole, run.folder / "runs" / "arithmetic-again" / "version_0")


@pytest.mark.slow
def test_activation_checkpointing_does_not_change_updates_and_samples(
    run, policy, data, monkeypatch
):
    forward = LlamaMLP.forward
    calls = 0

    def counted(self, hidden):
        nonlocal calls
        calls += self.training
        return forward(self, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    (run.folder / "problems.jsonl").write_text('{"prompt": "1+1>", "gold": "2"}\n')
    more = ["--data.batch_size=8", "--data.test=problems.jsonl"]
    plain = fit(run, policy, data, *more)
    once = calls
    less = fit(run, policy, data, *more, "--model.activation_checkpointing=true")
    assert calls - once > 1.4 * once  # activations are computed again
    assert_close_weights(plain, less)
    before = [summary(folder)["before"] for folder in (plain, less)]
    assert before[0] == before[1]


@pytest.mark.parametrize("targets", ["nowhere", "lm_head", "q_proj,embed_tokens"])
def test_targets_that_fit_no_layer_or_the_output_projection_are_rejected(run, targets):
    policy = make_policy(run.folder / "tied", tie_word_embeddings=True)
    data = write(run.folder / "a.parquet", policy, make_trajectories(policy))
    given = fit_arguments(policy, data, f"--model.lora.targets=[{targets}]")
    rejected(run, "model.lora.targets", *given)
