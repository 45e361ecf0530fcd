"""The commands end to end on a tiny policy: fit, validate, test, predict, evaluate, and what they write."""

import gc
import inspect
import json
import math
import re
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, make_policy, make_trajectories, observe_microbatches, write
from huggingface_hub import ModelCard
from lightning import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate
import train
from topr import callbacks, losses
from topr.datamodule import TrajectoryDataModule
from topr.module import PolicyModule
from topr.policy import export_policy, load_policy, policy_fingerprint
from topr.sampling import LocalSampler
from topr.tasks import Arithmetic
from topr.trajectories import read_metadata, read_trajectories

CONFIG = ["--config", ROOT / "configs" / "arithmetic.yaml"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "configs" / "loss").glob("*.yaml"))
GLOSSARY = ROOT / "topr" / "callbacks" / "README.md"  # explains every metric that is logged


@pytest.fixture
def setting(tiny):
    policy, arguments = tiny
    return policy, [*arguments, "--trainer.enable_progress_bar=false"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_parsed(run, config):
    code, out, err = run(train.main, "fit", *CONFIG, "--config", config, "--print_config")
    assert code == 0, err
    assert "class_path: topr.losses." in out


def test_loss_overlays_write_every_argument():
    assert {path.stem for path in OVERLAYS} >= {"topr", "ppo", "dpo", "red_drop"}
    for path in OVERLAYS:
        loss = yaml.safe_load(path.read_text())["model"]["loss"]
        kind = getattr(losses, loss["class_path"].removeprefix("topr.losses."))
        assert set(loss["init_args"]) == set(inspect.signature(kind).parameters)
        kind(**loss["init_args"])


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_sgd_step_by_an_overlay_follows_the_gradient_of_its_loss(
    run, setting, monkeypatch, overlay
):
    policy, arguments = setting
    trajectories = make_trajectories(policy, shift=2.0)
    data = write(run.folder / "shifted.parquet", policy, trajectories, policy="another")
    batches = []
    observe_microbatches(monkeypatch, lambda trainer, module, batch: batches.append(batch))
    code, _, err = run(
        train.main, "fit", *arguments, "--config", overlay, f"--data.train={data}", "--data.val=null",
        "--data.test=null", "--data.batch_size=99", "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.init_args.lr=8.0", "--trainer.gradient_clip_val=null")  # fmt: skip
    assert code == 0, err
    (batch,) = batches
    chosen = [trajectories[i] for i in batch.trajectory_B.tolist()]
    written = yaml.safe_load(overlay.read_text())["model"]["loss"]
    loss = getattr(losses, written["class_path"].removeprefix("topr.losses."))(
        **written["init_args"]
    )
    model = load_policy(str(policy)).model.double()
    log_probs = []
    for t in chosen:
        logits = model(torch.tensor([t.prompt_ids + t.response_ids])).logits[
            0, len(t.prompt_ids) - 1 : -1
        ]
        log_probs.append(
            logits.log_softmax(-1).gather(1, torch.tensor(t.response_ids)[:, None])[:, 0]
        )
    ref_log_probs_N = torch.tensor(
        [value for t in chosen for value in t.ref_logprobs], dtype=torch.float64
    )
    lengths = torch.tensor([len(t.response_ids) for t in chosen])
    output = loss(torch.cat(log_probs), ref_log_probs_N, lengths, batch.advantage_B.double())
    gradients = torch.autograd.grad(output.loss_B.sum() / batch.divisor, list(model.parameters()))
    folder = run.folder / "runs" / f"arithmetic-{overlay.stem}" / "version_0"
    trained = load_policy(str(folder / "policy")).model
    moved = [
        after - before
        for after, before in zip(trained.parameters(), model.parameters(), strict=True)
    ]
    found, expected = (
        torch.cat([part.flatten() for part in parts]) for parts in (moved, gradients)
    )
    assert (found + 8.0 * expected).norm() < 1e-4 * (8.0 * expected).norm()
    if loss.grouping == "group" and not isinstance(
        loss, losses.AsymRE
    ):  # which learns from equal rewards, too
        events = EventAccumulator(str(folder)).Reload()
        rewards = [{t.reward for t in trajectories if t.group == str(group)} for group in range(6)]
        (silent,) = events.Scalars("train/groups_without_signal")
        assert silent.value == sum(len(group) == 1 for group in rewards)


def test_fit_writes_policy_summary_and_events(run, setting):
    policy, arguments = setting
    code, out, err = run(
        train.main, "fit", *arguments, "--data.batch_size=8", "--trainer.val_check_interval=0.5",
        "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.callbacks.init_args.every_n_train_steps=1")  # fmt: skip
    assert code == 0, err
    folder = run.folder / "runs" / "arithmetic" / "version_0"
    assert {"policy", "summary.json", "checkpoints", "config.yaml"} <= {
        path.name for path in folder.iterdir()
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert {
        "before",
        "after",
        "steps",
        "trajectories",
        "tokens_per_s",
        "max_abs_log_ratio_at_start",
    } <= set(summary)
    for when in ("before", "after"):
        assert {"pass@1", "pass@3", "maj@3", "invalid", "problems", "samples"} <= set(summary[when])
        assert (summary[when]["problems"], summary[when]["samples"]) == (5, 3)
    assert (summary["steps"], summary["trajectories"]) == (3, 23)
    assert summary["max_abs_log_ratio_at_start"] < 1e-4
    card = ModelCard.load(folder / "policy" / "README.md")
    assert (
        card.data.base_model == str(policy)
        and "trained with TOPR" in card.text
        and "torch 2." in card.text
    )
    for when in ("before", "after"):
        assert f"| {when} | {100 * summary[when]['pass@1']:.1f} [" in card.text
    assert (folder / "config.yaml").read_text() in card.text

    exported = AutoModelForCausalLM.from_pretrained(folder / "policy").eval()
    weights = torch.load(next((folder / "checkpoints").glob("*.ckpt")), weights_only=True)[
        "state_dict"
    ]
    trained = load_policy(str(policy))
    trained.load_state_dict(
        {name.removeprefix("policy."): value for name, value in weights.items()}
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(exported(ids).logits, trained.eval().logits(ids))
    assert not torch.equal(exported(ids).logits, load_policy(str(policy)).logits(ids))
    assert AutoTokenizer.from_pretrained(folder / "policy")("1+1>")["input_ids"]

    events = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}
    ).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {
        "train/loss", "train/objective", "train/reward", "train/positive_share", "train/effective_positive_share",
        "log_ratio/positives_mean", "log_ratio/positives_min", "log_ratio/positives_max", "log_ratio/negatives_mean",
        "weight/negatives_below_0.01", "weight/negatives_truncated", "weight/effective_sample_size", "gradient/norm",
        "gradient/positive_share", "drift/positives", "drift/negatives", "speed/tokens_per_s", "speed/utilisation",
        "speed/peak_memory_gb", "speed/computed_share", "val/pass@1", "val/maj@4", "val/invalid",
        "val_interval/pass@1_low", "val_interval/pass@1_high", "train/lr",
    } <= scalars  # fmt: skip
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2]
    assert [event.step for event in events.Scalars("val/pass@1")] == [
        0,
        1,
        2,
        3,
    ]  # before training, then thrice
    assert all(math.isfinite(event.value) for name in scalars for event in events.Scalars(name))
    assert {"log_ratio/positives", "log_ratio/negatives"} <= set(events.Tags()["histograms"])
    assert any("samples" in tag for tag in events.Tags()["tensors"])
    glossary = GLOSSARY.read_text()
    for tag in scalars:
        name = (
            tag.replace("_interval", "")
            .removesuffix("_low")
            .removesuffix("_high")
            .replace("test/", "val/")
        )
        name = name.replace("@4", "@k").replace("@3", "@k")
        assert f"`{name}`" in glossary, tag


def test_a_plain_lightning_trainer_trains_validates_and_tests(setting, monkeypatch):
    """No callback of the project is passed; the sanity check runs before training."""
    policy, _ = setting
    folder, task, loss = policy.parent, Arithmetic(), losses.TOPR()
    module = PolicyModule(str(policy), task, loss, partial(torch.optim.AdamW, lr=3e-3))
    problems = str(folder / "problems.jsonl")
    data = TrajectoryDataModule(
        train=str(folder / "train.parquet"), val=problems, test=problems, samples=2, val_samples=2, batch_size=8,
        sampling=task.sampling, policy=str(policy), loss=loss, task=task,
    )  # fmt: skip
    trial = PolicyModule(str(policy), task, loss, partial(torch.optim.AdamW, lr=3e-3))
    Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False).fit(trial, data)
    assert len(data.read_problems("val")) == 2
    sanity_checks, measure = [], callbacks.Evaluate.measure

    def observed(self, trainer, *arguments):
        sanity_checks.append(trainer.sanity_checking)
        return measure(self, trainer, *arguments)

    monkeypatch.setattr(callbacks.Evaluate, "measure", observed)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False
    )
    trainer.fit(module, data)
    assert trainer.global_step == 3 and sanity_checks == [
        True,
        False,
        False,
    ]  # then before and after the epoch
    assert (
        len(data.read_problems("val"))
        == len((folder / "problems.jsonl").read_text().splitlines())
        > 2
    )
    before, after = load_policy(str(policy)).state_dict(), module.policy.state_dict()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    for split, method in (("val", trainer.validate), ("test", trainer.test)):
        (figures,) = method(module, data, verbose=False)
        assert 0 <= figures[f"{split}_interval/pass@1_low"] <= figures[f"{split}/pass@1"] <= 1
    weights = weakref.ref(module.policy)
    del trainer, trial, module, data, method
    gc.collect()
    assert weights() is None  # a notebook trains several times


def test_the_readme_s_lines_of_python_train_the_embedded_task(run, monkeypatch):
    snippet = re.search(
        r"```python\n(# from a notebook.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )[1]
    assert len([line for line in snippet.splitlines() if line]) <= 11
    for name in ("base", "train.parquet", "val.jsonl"):
        snippet = snippet.replace(
            f"data/arithmetic/{name}", str(ROOT / "data" / "arithmetic" / name)
        )
    trained: dict = {}
    exec(snippet.replace("max_epochs=1", "max_steps=2, limit_val_batches=0"), trained)
    assert trained["module"].trainer.global_step == 2


@pytest.mark.slow
def test_sampling_and_utilisation_are_in_the_precision_of_training(run, setting, monkeypatch):
    seen = []

    def watch(where, name):
        def watched(*arguments, **keywords):
            seen.append((name, torch.is_autocast_enabled("cpu")))
            return function(*arguments, **keywords)

        function = getattr(where, name)
        monkeypatch.setattr(where, name, watched)

    watch(callbacks.monitor, "peak_flops")
    watch(callbacks.evaluate, "sample_and_grade")
    code, out, err = run(train.main, "fit", *setting[1], "--trainer.precision=bf16-mixed")
    assert code == 0, err
    assert set(seen) == {("peak_flops", True), ("sample_and_grade", True)}


class Casts(TorchDispatchMode):
    """Counts what is cast to bfloat16, by size."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if (
            function is torch.ops.aten._to_copy.default
            and (keywords or {}).get("dtype") == torch.bfloat16
        ):
            self.count[tuple(arguments[0].shape)] += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--model.lora.rank=3"]])
@pytest.mark.parametrize("command", ["predict", "validate"])
def test_sampling_casts_a_weight_once_and_not_at_every_token(run, setting, command, more):
    policy, arguments = setting
    arguments = [*arguments, "--trainer.precision=bf16-mixed", "--data.out=out", *more]
    with Casts() as casts:
        code, out, err = run(train.main, command, *arguments)
    assert code == 0, err
    shapes = Counter(
        tuple(part.weight.shape)
        for part in load_policy(str(policy)).modules()
        if isinstance(part, Linear)
    )
    assert {shape: casts.count[shape] for shape in shapes} == dict(shapes)


def test_a_trial_run_does_everything_once_and_leaves_nothing(run, setting, monkeypatch):
    _, arguments = setting
    before, trial, exported = set(run.folder.rglob("*")), "--trainer.fast_dev_run=true", []
    monkeypatch.setattr(
        "topr.callbacks.evaluate.export_policy", lambda *_: exported.append(export_policy(*_))
    )
    code, out, err = run(train.main, "fit", *arguments, trial, "--data.samples=1000000")
    assert code == 0 and exported == [None], err
    assert "pass@2" in out  # of two problems, whatever data.samples is
    code, out, err = run(train.main, "predict", *arguments, trial, "--data.out=sampled")
    assert code == 0 and "6 trajectories: mean reward" in out, err
    assert set(run.folder.rglob("*")) == before


def test_a_sampler_that_leaves_out_everything_is_named(run, setting, monkeypatch):
    monkeypatch.setattr(
        LocalSampler, "sample", lambda self, policy, prompts, *_: [[] for _ in prompts]
    )
    code, _, err = run(train.main, "predict", *setting[1], "--data.out=sampled")
    assert code == 2 and "the sampler left out every response" in err


def test_validate_and_test_print_their_figures(run, setting):
    _, arguments = setting
    for command, metric in (("validate", "val/pass@1"), ("test", "test/pass@1")):
        code, out, err = run(train.main, command, *arguments)
        assert code == 0, err
        assert metric in out


def test_predicted_trajectories_are_trained_on_by_the_policy_that_sampled_them(run, setting):
    policy, arguments = setting
    code, out, err = run(train.main, "predict", *arguments, "--data.out=sampled")
    assert code == 0, err
    (file,) = (run.folder / "sampled").glob("*.parquet")
    assert "15 trajectories" in out
    trajectories, metadata = read_trajectories(file), read_metadata(file)
    assert len(trajectories) == 15 and len({t.prompt_id for t in trajectories}) == 5
    assert (
        metadata["policy"] == policy_fingerprint(str(policy))
        and metadata["sampling"]["samples"] == 3
    )
    for t in trajectories:
        assert t.reward == (Arithmetic().grade(t.response, t.gold).reward if t.finished else -1)
    trajectories[0].reward = 1.0
    write(file, policy, trajectories)
    code, out, err = run(train.main, "fit", *arguments, "--data.train=sampled/*.parquet")
    assert code == 0, err  # the check of log mu before the first update has passed


def test_evaluate_writes_results_with_intervals(run, setting):
    policy, _ = setting
    problems = run.folder / "problems.jsonl"
    arguments = ["--benchmark", f"arithmetic={problems}", "--samples", 4, "--out", "results"]
    code, out, err = run(evaluate.main, "--policy", policy, *arguments)
    assert code == 0, err
    results = json.loads((run.folder / "results" / "results.json").read_text())
    row = results[str(policy)]["arithmetic"]
    assert (row["problems"], row["samples"]) == (5, 4)
    trajectories = read_trajectories(run.folder / "results" / "responses.parquet")
    assert len(trajectories) == 20
    mean = np.mean([t.reward > 0 for t in trajectories])
    assert row["pass@1"]["mean"] == pytest.approx(mean)
    assert row["invalid"]["mean"] == pytest.approx(np.mean([not t.valid for t in trajectories]))
    for metric in ("pass@1", "pass@4", "maj@4", "invalid"):
        low, high = row[metric]["interval"]
        assert 0 <= low <= row[metric]["mean"] <= high <= 1
    assert "pass@1" in (run.folder / "results" / "results.md").read_text()
    other = make_policy(run.folder / "other", seed=1, scale=0.5)
    code, out, err = run(evaluate.main, "--policy", policy, other, *arguments)
    assert code == 0, err
    both = json.loads((run.folder / "results" / "results.json").read_text())
    assert both[str(policy)]["arithmetic"] == row  # the same seed, the same samples
    mine, theirs = both[str(policy)]["arithmetic"], both[str(other)]["arithmetic"]
    difference = theirs["difference_to_first"]["length"]["mean"]
    assert difference == pytest.approx(theirs["length"]["mean"] - mine["length"]["mean"])
    assert f"Difference to {policy}" in out
    assert all(len(t.ref_logprobs) == len(t.response_ids) for t in trajectories)
