"""One update through the command line, against the paper's equation in float64, however the batch is cut."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TWO_RANKS, make_policy, make_trajectories, write
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_logprobs import FAMILIES, SMALL

import train
from topr import policy as policies
from topr.logprobs import response_log_probs
from topr.losses import TOPR
from topr.monitor import Monitor
from topr.policy import export_policy, load_policy
from topr.tasks.imitation import SYMBOLS, make_tokenizer
from topr.trajectories import add_log_probs

collect = Monitor.collect

LIMITS = {  # Table 1
    "topr": (1, 1, 0, 1),
    "reinforce": (1, 1, 1, 1),
    "positives_only": (1, 1, 0, 0),
    "is": (0, math.exp(20), 0, math.exp(20)),
    "tis": (0, 1, 0, 1),
}
QUIET = [
    "--data.val=null", "--data.test=null",
    "--trainer.enable_progress_bar=false", "--trainer.logger.init_args.save_dir=runs",
]  # fmt: skip


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
EVERY_STEP = [
    "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.init_args.every_n_train_steps=1",
]


def fit(run, policy, data, *arguments):
    """`train.py fit` with the shipped config on the test's own files; returns the version folder."""
    config = ["--config", ROOT / "configs" / "arithmetic.yaml"]
    files = [f"--model.policy={policy}", f"--data.train={data}"]
    code, out, err = run(train.main, "fit", *config, *QUIET, *files, *arguments)
    assert code == 0, err
    return max((path for path in (run.folder / "runs" / "arithmetic").iterdir()), key=lambda p: p.stat().st_mtime)


def movement(before, folder) -> dict[str, torch.Tensor]:
    old, new = load_file(before / "model.safetensors"), load_file(folder / "policy" / "model.safetensors")
    return {name: new[name].double() - old[name].double() for name in old}


def expected_gradient(policy, trajectories, limits) -> dict[str, torch.Tensor]:
    """Sum over trajectories of A [pi/mu]_a^b grad log pi / T / B: the paper's equation, one forward each, float64."""
    model = load_policy(str(policy)).double()
    a_plus, b_plus, a_minus, b_minus = limits
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for t in trajectories:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        log_probs = model(ids).logits[0].log_softmax(-1)
        start = len(t.prompt_ids) - 1
        log_pi = sum(log_probs[start + i, token] for i, token in enumerate(t.response_ids))
        ratio = math.exp(log_pi.item() - np.float32(t.ref_logprobs).sum(dtype=np.float64))
        low, high = (a_plus, b_plus) if t.reward >= 0 else (a_minus, b_minus)
        factor = t.reward * min(max(ratio, low), high) / len(t.response_ids) / len(trajectories)
        for (name, _), gradient in zip(
            model.named_parameters(), torch.autograd.grad(log_pi, list(model.parameters())), strict=True
        ):
            total[name] += factor * gradient
    return total


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """A policy, and trajectories whose log mu is shifted so that ratios lie on both sides of every limit."""
    folder = tmp_path_factory.mktemp("shifted")
    policy = make_policy(folder / "base")
    trajectories = make_trajectories(policy, shift=2.0)
    return policy, write(folder / "train.parquet", policy, trajectories, policy="another"), trajectories


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
@pytest.mark.parametrize("microbatch_tokens", [10_000, 50])
@pytest.mark.parametrize("loss", LIMITS)
def test_one_sgd_step_moves_every_tensor_as_the_paper_says(run, shifted, loss, microbatch_tokens, accelerator):
    policy, data, trajectories = shifted
    lr = 8.0
    folder = fit(
        run, policy, data, "--config", ROOT / "configs" / "loss" / f"{loss}.yaml", "--model.optimizer=torch.optim.SGD",
        f"--model.optimizer.init_args.lr={lr}", "--trainer.gradient_clip_val=null",
        f"--data.microbatch_tokens={microbatch_tokens}", f"--trainer.accelerator={accelerator}",
    )  # fmt: skip
    expected = expected_gradient(policy, trajectories, LIMITS[loss])
    for name, moved in movement(policy, folder).items():
        error = (moved - lr * expected[name]).norm() / (lr * expected[name]).norm()
        assert error <= 1e-5, (name, error)


def test_micro_batches_padding_and_workers_do_not_change_the_update(run, shifted):
    policy, data, _ = shifted
    results = []
    for arguments in (
        [],
        ["--data.microbatch_tokens=60"],
        ["--data.microbatch_tokens=23"],
        ["--data.microbatch_tokens=60", "--data.num_workers=2"],
    ):
        arguments += ["--data.batch_size=9", "--trainer.max_epochs=2", "--trainer.val_check_interval=1.0"]
        folder = fit(run, policy, data, "--model.optimizer.init_args.lr=3.0e-4", *arguments)
        results.append(load_file(folder / "policy" / "model.safetensors"))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)
    assert all(torch.equal(results[1][name], results[3][name]) for name in results[1])  # workers: to the bit


def two_passes(model, tokens, loss, ref_log_probs_N, advantage_B, scale_B):
    """`response_loss` by way of all log-probs."""
    log_probs_N, hidden_ND = response_log_probs(model, tokens)
    output = loss(log_probs_N, ref_log_probs_N, tokens.length_B, advantage_B)
    return (scale_B * output.loss_B).sum(), output, hidden_ND


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2", "Phi3"])
def test_shared_prompts_and_one_pass_make_the_update_of_padded_rows(run, monkeypatch, family):
    base = run.folder / "base"
    torch.manual_seed(0)
    sizes = SMALL | FAMILIES[family] | {"vocab_size": len(SYMBOLS), "initializer_range": 0.1}
    config = getattr(transformers, f"{family}Config")(**sizes)
    export_policy(getattr(transformers, f"{family}ForCausalLM")(config), make_tokenizer(), base)
    trajectories = make_trajectories(base, 40, shift=1.0)
    for one, other in zip(trajectories[::2], trajectories[1::2], strict=True):
        other.prompt, other.prompt_ids = one.prompt, one.prompt_ids
    add_log_probs(load_policy(str(base)), trajectories, 16384)
    data = write(run.folder / "train.parquet", base, trajectories)
    more = ["--data.whole_groups=true", "--data.batch_size=8", "--data.microbatch_tokens=80", "--trainer.max_epochs=2"]
    shared = fit(run, base, data, *more)
    monkeypatch.setattr(policies, "response_loss", two_passes)
    monkeypatch.setattr(two_passes, "__name__", "response_loss")
    monkeypatch.setattr(policies, "check_forward", lambda *_: None)
    monkeypatch.setattr(Monitor, "_check_start", lambda *_: None)
    padded = fit(run, base, data, *more, "--data.microbatch_tokens=10000", "--trainer.logger.init_args.version=1")
    one, other = (load_file(path / "policy" / "model.safetensors") for path in (shared, padded))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)
        assert not torch.equal(value, load_file(base / "model.safetensors")[name]), name


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("microbatch_tokens", [10_000, 40])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(run, shifted, epochs, microbatch_tokens):
    policy, data, _ = shifted
    common = [
        "--data.batch_size=4", f"--trainer.max_epochs={epochs}", f"--data.microbatch_tokens={microbatch_tokens}",
        *EVERY_STEP,
    ]  # fmt: skip
    whole = fit(run, policy, data, *common)
    for stop in {1: (1, 4), 2: (2, 6, 9)}[epochs]:
        name = f"--trainer.logger.init_args.name=arithmetic/stop{stop}"
        config = ["--config", ROOT / "configs" / "arithmetic.yaml", *QUIET, name, "--ckpt_path=last"]
        files = [f"--model.policy={policy}", f"--data.train={data}"]
        for limit in (stop, -1):
            code, out, err = run(train.main, "fit", *config, *files, *common, f"--trainer.max_steps={limit}")
            assert code == 0, err
            assert ("starting afresh" in out) == (limit == stop)
        (folder,) = (run.folder / "runs" / "arithmetic" / f"stop{stop}").iterdir()  # the same version_N
        assert folder.name == "version_0"
        one, other = (load_file(path / "policy" / "model.safetensors") for path in (whole, folder))
        assert all(torch.equal(one[key], other[key]) for key in one), stop


def test_last_goes_on_with_no_other_run(run, shifted):
    policy, data, _ = shifted
    fit(run, policy, data, "--data.batch_size=4", *EVERY_STEP)
    arguments = ["--config", ROOT / "configs" / "arithmetic.yaml", *QUIET, f"--model.policy={policy}"]
    arguments += [f"--data.train={data}", "--ckpt_path=last"]
    before = {path: path.stat().st_mtime_ns for path in (run.folder / "runs").rglob("*")}
    for more, words in (
        (["--data.batch_size=4", "--config", ROOT / "configs" / "loss" / "tis.yaml"], "another model.loss"),
        (["--data.batch_size=5"], "another data.batch_size"),
        (["--data.batch_size=4", "--seed_everything=1"], "another seed_everything"),
    ):
        code, out, err = run(train.main, "fit", *arguments, *more)
        assert code == 2 and words in err and err.splitlines()[-1].startswith("error: ")
    assert before == {path: path.stat().st_mtime_ns for path in (run.folder / "runs").rglob("*")}
    problems = f"--data.test={ROOT / 'data' / 'arithmetic' / 'val.jsonl'}"
    code, out, err = run(train.main, "test", *arguments, problems, "--data.samples=1", "--data.batch_size=4")
    assert code == 0 and "test/pass@1" in out, err
    (run.folder / "not.ckpt").write_text("x")
    code, out, err = run(train.main, "fit", *arguments[:-1], "--ckpt_path=not.ckpt")
    assert code == 2 and "is no checkpoint" in err


@pytest.mark.parametrize("second", [40, 25, 10_000])
def test_resumption_within_a_step_or_with_other_micro_batches(run, shifted, second):
    policy, data, _ = shifted
    common = [
        "--data.batch_size=4", "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
        f"--data.val={ROOT / 'data' / 'arithmetic' / 'val.jsonl'}",
        "--data.val_samples=1", "--data.sampling.max_new_tokens=1",
    ]  # fmt: skip
    whole = fit(run, policy, data, *common, "--data.val=null")
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", *QUIET, "--trainer.logger.init_args.name=arithmetic/b"]
    files = [f"--model.policy={policy}", f"--data.train={data}", *common, "--ckpt_path=last"]
    # the validation after five micro-batches writes its checkpoint between those of the third update
    first = ["--data.microbatch_tokens=40", "--trainer.val_check_interval=5", "--trainer.max_steps=3"]
    code, _, err = run(train.main, "fit", *config, *files, *first)
    assert code == 0, err
    (checkpoint,) = (run.folder / "runs" / "arithmetic" / "b").rglob("*.ckpt")
    loop = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]
    assert loop["epoch_loop.batch_progress"]["current"]["ready"] == 5
    code, out, err = run(train.main, "fit", *config, *files, f"--data.microbatch_tokens={second}", "--data.val=null")
    assert code == 0 and "resuming" in out, err
    (folder,) = (run.folder / "runs" / "arithmetic" / "b").iterdir()
    one, other = (load_file(path / "policy" / "model.safetensors") for path in (whole, folder))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["tokens_per_s"] > 0


class Grouped(TOPR):
    """TOPR on batches of whole groups."""

    grouping = "group"


def test_every_trajectory_of_every_epoch_is_used_once_by_whole_groups(run, tmp_path, monkeypatch):
    policy = make_policy(tmp_path / "base")
    rng, trajectories = np.random.default_rng(0), make_trajectories(policy, 60)
    for trajectory in trajectories:
        trajectory.group = str(rng.integers(25))  # so uneven that the epochs differ in their number of batches
    data, used = write(tmp_path / "a.parquet", policy, trajectories), []
    monkeypatch.setattr(
        Monitor, "collect",
        lambda self, output, hidden, batch: (
            used.append((self.module.current_epoch, batch.trajectory_B[batch.real_B > 0].tolist())),
            collect(self, output, hidden, batch),
        ),
    )  # fmt: skip
    fit(
        run, policy, data, "--model.loss=test_update.Grouped", "--data.batch_size=8", "--trainer.max_epochs=4",
        "--data.microbatch_tokens=60",
    )  # fmt: skip
    counts = set()
    for epoch in range(4):
        rows = [rows for number, rows in used if number == epoch]
        assert sorted(sum(rows, [])) == list(range(60))
        counts.add(len(rows))
    assert len(counts) > 1


@pytest.mark.parametrize("loss", ["topr", "grpo", "dpo"])  # trajectories, whole groups, pairs
def test_two_ddp_ranks_make_the_update_of_one(shifted, tmp_path, loss):
    """For FSDP2 see test_sharding.py; here Lightning starts the second process."""
    policy, data, _ = shifted
    problems = ROOT / "data" / "arithmetic" / "val.jsonl"
    command = [
        sys.executable, ROOT / "train.py", "fit", "--config", ROOT / "configs" / "arithmetic.yaml", *QUIET,
        f"--model.policy={policy}", f"--data.train={data}", "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.init_args.lr=0.5", "--data.batch_size=10", "--data.microbatch_tokens=60",
        "--config", ROOT / "configs" / "loss" / f"{loss}.yaml", "--data.samples=1",
        f"--data.test={problems if loss == 'topr' else 'null'}", "--model.sampler.init_args.rows=99",
    ]  # fmt: skip
    for name, more in (
        ("one", []),
        ("two", TWO_RANKS["ddp"]),
    ):  # batches of 10, 10 and 3: the last leaves fillers on either rank
        more = [*command, *more, f"--trainer.logger.init_args.name={name}"]
        done = subprocess.run(more, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    folders = [tmp_path / "runs" / name / "version_0" for name in ("one", "two")]
    one, other = (load_file(folder / "policy" / "model.safetensors") for folder in folders)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)
    events = [EventAccumulator(str(folder)).Reload() for folder in folders]
    tags = ["train/loss", "train/reward", "train/objective", "gradient/norm", "gradient/positive_share"]
    for tag in tags + ["train/groups_without_signal"] * (loss == "grpo"):
        one, other = ([event.value for event in run.Scalars(tag)] for run in events)
        assert len(one) == (1 if loss == "dpo" else 3)
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


def test_gradient_clipping_bounds_the_update(run, shifted):
    policy, data, trajectories = shifted
    folder = fit(
        run, policy, data, "--model.optimizer=torch.optim.SGD", "--model.optimizer.init_args.lr=8.0",
        "--trainer.gradient_clip_val=0.01",
    )  # fmt: skip
    moved = torch.cat([value.flatten() for value in movement(policy, folder).values()])
    assert moved.norm() == pytest.approx(8.0 * 0.01, rel=1e-3)
