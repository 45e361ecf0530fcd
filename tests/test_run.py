"""The commands end to end on a tiny policy: fit, validate, test, predict, evaluate; their files."""

import gc
import json
import math
import re
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, listing, slow, write
from huggingface_hub import ModelCard
from lightning import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from topr import losses
from topr.datamodule import TrajectoryDataModule
from topr.module import PolicyModule
from topr.policy.model import load_policy
from topr.run.identity import file_hash, policy_hash
from topr.tasks import Arithmetic
from topr.trajectories import add_log_probs, read_metadata, read_trajectories

GLOSSARY = ROOT / "topr" / "callbacks" / "README.md"  # explains every metric that is logged
MEASURED = {"pass@1", "pass@3", "maj@3", "invalid", "length", "problems", "samples"}


@pytest.fixture
def setting(tiny):
    policy, arguments = tiny
    return policy, [*arguments, "--trainer.enable_progress_bar=false"]


@pytest.fixture
def fitted(run, setting):
    """A run of three updates: the policy before, its folder, what it printed."""
    policy, arguments = setting
    often = ["--data.batch_size=8", "--trainer.val_check_interval=1"]
    save = "--trainer.callbacks.init_args.every_n_train_steps=1"
    code, out, err = run(train.main, "fit", *arguments, *often, save)
    assert code == 0, err
    return policy, run.folder / "runs" / "arithmetic" / "version_0", out


def test_fit_writes_a_summary(fitted):
    _, folder, _ = fitted
    names = {path.name for path in folder.iterdir()}
    assert {"policy", "summary.json", "checkpoints", "config.yaml"} <= names
    summary = json.loads((folder / "summary.json").read_text())
    for when in ("before", "after"):
        assert set(summary[when]) >= MEASURED
        assert (summary[when]["problems"], summary[when]["samples"]) == (5, 3)
    assert (summary["steps"], summary["trajectories"]) == (3, 23)
    assert summary["max_abs_log_ratio_at_start"] < 1e-4


def test_the_exported_policy_is_that_of_the_last_checkpoint(fitted):
    policy, folder, _ = fitted
    exported = AutoModelForCausalLM.from_pretrained(folder / "policy").eval()
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    trained = load_policy(str(policy))
    start = trained.model(torch.tensor([[5, 6, 7, 8]])).logits
    trained.load_state_dict({name.removeprefix("policy."): w for name, w in weights.items()})
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(exported(ids).logits, trained.eval().model(ids).logits)
    assert not torch.equal(exported(ids).logits, start)
    assert AutoTokenizer.from_pretrained(folder / "policy")("1+1>")["input_ids"]


def test_the_exported_policy_says_what_it_is(fitted):
    policy, folder, _ = fitted
    card = ModelCard.load(folder / "policy" / "README.md")
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert card.data.library_name == "transformers"
    assert re.search(r"\| after \| (\S+) \[", card.text)[1] == f"{100 * after['pass@1']:.1f}"
    (data,) = policy.parent.glob("train.parquet")
    for part in (policy, "3 updates of TOPR", "topr.losses.topr.TOPR", file_hash(data)):
        assert str(part) in card.text


@pytest.mark.parametrize("lora", [[], slow(["--config", ROOT / "configs" / "lora.yaml"])])
def test_an_export_in_bfloat16_is_the_rounded_policy(run, setting, lora):
    _, arguments = setting
    policies = []
    for wide in ("false", "true"):
        kto = ["--config", ROOT / "configs" / "loss" / "kto.yaml"]
        given = [*arguments, *kto, *lora, "--data.batch_size=8", "--data.test=null"]
        code, _, err = run(train.main, "fit", *given, f"--export.bfloat16={wide}")
        assert code == 0, err
        policies.append(
            run.folder / "runs" / "arithmetic-kto" / f"version_{len(policies)}" / "policy"
        )
        assert "updates of KTO" in (policies[-1] / "README.md").read_text()
    full, rounded = map(AutoModelForCausalLM.from_pretrained, policies)
    assert (full.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    for (name, weight), other in zip(full.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(weight.bfloat16(), other), name
    assert load_policy(str(policies[1])).model.dtype == torch.float32  # to compute with
    assert len(set(map(policy_hash, map(str, policies)))) == 2


def test_tensorboard_shows_every_figure_that_the_glossary_explains(fitted):
    _, folder, _ = fitted
    sizes = {"scalars": 0, "histograms": 0, "tensors": 0}
    events = EventAccumulator(str(folder), size_guidance=sizes).Reload()
    scalars = set(events.Tags()["scalars"])
    families = {name.split("/")[0] for name in scalars}
    assert families >= {"train", "log_ratio", "weight", "gradient", "drift", "speed", "val", "test"}
    assert {"train/loss", "train/reward", "train/lr", "gradient/norm", "val/pass@1"} <= scalars
    assert {"weight/negatives_truncated", "val_interval/pass@1_low"} <= scalars
    assert {"speed/tokens_per_s", "speed/computed_share"} <= scalars
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2]
    # before training, then after each update
    assert [event.step for event in events.Scalars("val/pass@1")] == [0, 1, 2, 3]
    assert all(math.isfinite(event.value) for name in scalars for event in events.Scalars(name))
    assert {"log_ratio/positives", "log_ratio/negatives"} <= set(events.Tags()["histograms"])
    assert any("samples" in tag for tag in events.Tags()["tensors"])
    glossary = GLOSSARY.read_text()
    for name in scalars - {"epoch"}:
        explained = re.sub(r"_interval|_low$|_high$", "", name).replace("test/", "val/")
        assert f"`{re.sub(r'@[0-9]+', '@k', explained)}`" in glossary.replace("@1", "@k"), name


def test_a_plain_lightning_trainer_frees_the_policy(setting):
    """A notebook trains several times, without a callback of this project."""
    policy, _ = setting
    folder, task = policy.parent, Arithmetic()

    def trained() -> weakref.ref:
        module = PolicyModule(str(policy), task, losses.TOPR(), partial(torch.optim.SGD, lr=3e-3))
        files = {"train": str(folder / "train.parquet"), "val": str(folder / "problems.jsonl")}
        data = TrajectoryDataModule(str(policy), task, **files, sampling=task.sampling)
        plain = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": folder}
        Trainer(max_epochs=1, **plain).fit(module, data)
        return weakref.ref(module.policy)

    weights = trained()
    gc.collect()
    assert weights() is None


def test_the_readme_s_lines_of_python_train_the_embedded_task(run):
    readme = (ROOT / "README.md").read_text()
    snippet = re.search(r"```python\n(from functools.*?)```", readme, re.DOTALL)[1]
    assert len([line for line in snippet.splitlines() if line]) <= 11
    snippet = snippet.replace("data/arithmetic/", f"{ROOT}/data/arithmetic/")
    trained: dict = {}
    exec(snippet.replace("max_epochs=1", "max_steps=2, limit_val_batches=0"), trained)
    assert trained["module"].trainer.global_step == 2


class Casts(TorchDispatchMode):
    """Counts what is cast to bfloat16, by size."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        dtype = (keywords or {}).get("dtype")
        if function is torch.ops.aten._to_copy.default and dtype == torch.bfloat16:
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
    layers = [part for part in load_policy(str(policy)).modules() if isinstance(part, Linear)]
    shapes = Counter(tuple(layer.weight.shape) for layer in layers)
    assert {shape: casts.count[shape] for shape in shapes} == dict(shapes)


def test_a_trial_run_does_everything_once_and_leaves_nothing(run, setting):
    _, arguments = setting
    before, trial = listing(run.folder), "--trainer.fast_dev_run=true"
    code, out, err = run(train.main, "fit", *arguments, trial, "--data.samples=1000000")
    assert code == 0, err
    code, out, err = run(train.main, "predict", *arguments, trial, "--data.out=sampled")
    assert code == 0, err
    assert listing(run.folder) == before


@pytest.mark.parametrize("split", ["val", "test"])
def test_validate_and_test_print_their_figures_and_write_nothing(run, setting, split):
    before = listing(run.folder)
    command = "validate" if split == "val" else "test"
    code, out, err = run(train.main, command, *setting[1])
    assert code == 0 and f"{split}/pass@1" in out, err
    assert "warning" not in err
    assert listing(run.folder) == before


def test_predicted_trajectories_are_trained_on_by_the_policy_that_sampled_them(run, setting):
    policy, arguments = setting
    code, out, err = run(train.main, "predict", *arguments, "--data.out=sampled")
    assert code == 0 and "trajectories are under" in out, err
    (file,) = (run.folder / "sampled").glob("*.parquet")
    trajectories, metadata = read_trajectories(file), read_metadata(file)
    assert len(trajectories) == 15 and len({t.prompt_id for t in trajectories}) == 5
    assert metadata["policy"] == policy_hash(str(policy))
    assert metadata["sampling"]["samples"] == 3
    for t in trajectories:
        assert t.reward == (Arithmetic().grade(t.response, t.gold).reward if t.finished else -1)
    trajectories[0].reward = 1.0
    write(file, policy, trajectories)
    code, out, err = run(train.main, "fit", *arguments, "--data.train=sampled/*.parquet")
    assert code == 0, err  # the check of log mu before the first update has passed
    assert "another or an unknown policy" not in out + err


def test_mu_is_scored_in_the_precision_that_the_file_names(run, setting):
    policy, arguments = setting
    precision = "--trainer.precision=bf16-mixed"
    code, _, err = run(train.main, "predict", *arguments, precision, "--data.out=sampled")
    assert code == 0, err
    (file,) = (run.folder / "sampled").glob("*.parquet")
    assert read_metadata(file)["precision"] == "bf16-mixed"
    trajectories = read_trajectories(file)
    stored = np.concatenate([t.ref_logprobs for t in trajectories])
    scorer = load_policy(str(policy))
    errors = []
    for bfloat16 in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            add_log_probs(scorer, trajectories)
        scored = np.concatenate([t.ref_logprobs for t in trajectories])
        errors.append(abs(scored - stored).max())
    assert errors[0] < 1e-6 and errors[1] > 1e-4


def test_predict_samples_only_what_is_missing(run, setting):
    policy, arguments = setting
    lines = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(40)]
    (run.folder / "many.jsonl").write_text("".join(lines))
    predict = ["predict", *arguments, "--data.problems=many.jsonl", "--data.samples=1"]
    code, _, err = run(train.main, *predict, "--data.out=sampled")
    assert code == 0, err
    whole = {path: path.read_bytes() for path in Path("sampled").glob("*.parquet")}
    assert len(whole) > 1
    kept = listing(run.folder)
    lost = next(iter(whole))
    lost.unlink()
    code, out, err = run(train.main, *predict, "--data.out=sampled")
    assert code == 0 and "trajectories are under" in out, err
    assert {path: path.read_bytes() for path in Path("sampled").glob("*.parquet")} == whole
    again = listing(run.folder)
    assert [path for path in kept if kept[path] != again[path]] == [str(lost.absolute())]
    # a limit counts what is there, or a killed run would end with more than one that was not
    last = max(whole)
    last.unlink()
    limit = "--trainer.limit_predict_batches=1"
    code, _, err = run(train.main, *predict, "--data.out=sampled", limit)
    assert code == 0 and not last.exists() and min(whole).exists(), err
