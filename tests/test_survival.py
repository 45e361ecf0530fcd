"""Runs that end before they should: killed, asked to stop, without memory or disk, with numbers that are not finite."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, make_policy, make_trajectories, write
from safetensors.torch import load_file
from torture import curves

import evaluate
import train
from topr import module
from topr.io import InputError
from topr.logprobs import OnePassLoss
from topr.losses import TOPR
from topr.module import PolicyModule
from topr.monitor import Monitor
from topr.sampling import LocalSampler
from topr.trajectories import read_trajectories

collect, sample = Monitor.collect, LocalSampler.sample
SAVE = [
    "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.init_args.every_n_train_steps=2",
]


@pytest.fixture
def fit(run):
    """`train.py fit` on a small set: exit code, what was told, the folder of the run."""
    policy = make_policy(run.folder / "base")
    data = write(run.folder / "train.parquet", policy, make_trajectories(policy))
    problems = run.folder / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)))

    def fit(name: str, *more):
        code, out, err = run(
            train.main, "fit", "--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}",
            f"--data.train={data}", f"--data.val={problems}", f"--data.test={problems}", "--data.samples=2",
            "--data.batch_size=4", "--data.microbatch_tokens=60", "--trainer.val_check_interval=0.34",
            "--trainer.enable_progress_bar=false", f"--trainer.logger.init_args.name={name}", *SAVE,
            "--ckpt_path=last", *more,
        )  # fmt: skip
        return code, out + err, run.folder / "runs" / name / "version_0"

    fit.policy, fit.problems, fit.folder = policy, problems, run.folder
    return fit


def same(one, other) -> None:
    """Two finished runs cannot be told apart."""
    weights = [load_file(folder / "policy" / "model.safetensors") for folder in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert curves(one) == curves(other)
    summaries = [json.loads((folder / "summary.json").read_text()) | {"tokens_per_s": 0} for folder in (one, other)]
    assert summaries[0] == summaries[1]


def test_a_few_kills_at_random_moments(tmp_path):
    """The short version of `python tests/torture.py --kills 100`."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "torture.py", "--kills=8", "--seed=3"],
        capture_output=True, text=True, cwd=tmp_path, timeout=500, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "those of an undisturbed run" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["before", "update", "validation", "after"])
def test_sigterm_ends_a_fit_that_goes_on_as_if_nothing_had_been(fit, monkeypatch, moment):
    code, told, whole = fit("whole")
    assert code == 0, told
    calls = []

    def interrupt(at: int) -> None:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)

    if moment == "update":
        monkeypatch.setattr(Monitor, "collect", lambda *given: (interrupt(6), collect(*given)))
    else:  # val, test, then three validations, then test
        at = {"before": 2, "validation": 4, "after": 6}[moment]
        monkeypatch.setattr(LocalSampler, "sample", lambda *given: (interrupt(at), sample(*given))[1])
    code, told, folder = fit("ended")
    assert code == 143 and "ended by SIGTERM" in told and "Traceback" not in told
    assert not (folder / "summary.json").exists()
    assert (folder / "checkpoints" / "preempted.ckpt").is_file() == (moment in ("update", "validation"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.undo()
    os.chdir(fit.folder)
    code, told, folder = fit("ended")
    assert code == 0, told
    same(folder, whole)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch=0-step=6.ckpt"]


def test_sigterm_ends_a_prediction_at_once(run, fit, monkeypatch):
    monkeypatch.setattr(LocalSampler, "sample", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    arguments = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--data.problems={fit.problems}", "--data.out=out"]
    code, out, err = run(train.main, "predict", *arguments, f"--model.policy={fit.policy}")
    assert code == 143 and not list((fit.folder / "out").rglob("*"))


def test_a_validation_between_a_checkpoint_and_a_kill_is_made_up_for(fit, monkeypatch):
    whole = fit("whole")[2]
    monkeypatch.setattr(PolicyModule, "validation_step", lambda *_: (_ for _ in ()).throw(KeyError("killed here")))
    with pytest.raises(KeyError, match="killed here"):
        fit("killed", "--trainer.val_check_interval=0.34")
    monkeypatch.undo()
    os.chdir(fit.folder)
    code, told, folder = fit("killed")
    assert code == 0 and "resuming runs/killed/version_0/checkpoints/epoch=0-step=2.ckpt" in told, told
    same(folder, whole)


def test_a_run_killed_in_both_epochs_and_at_their_border_is_the_undisturbed_one(fit, monkeypatch):
    whole = fit("whole", "--trainer.max_epochs=2")[2]
    for update in (3, 7, 9, 11):  # the checkpoints before them: 2, 6 (the end of an epoch), 8, 10

        def killed(*given, update=update):
            if given[0].module.global_step == update:
                raise KeyError("killed here")
            collect(*given)

        monkeypatch.setattr(Monitor, "collect", killed)
        with pytest.raises(KeyError, match="killed here"):
            fit("killed", "--trainer.max_epochs=2")
    monkeypatch.setattr(Monitor, "collect", collect)
    code, told, folder = fit("killed", "--trainer.max_epochs=2")
    assert code == 0, told
    same(folder, whole)


def test_the_newest_complete_checkpoint_is_found(fit):
    whole = fit("whole")[2]
    folder = fit("cut", "--trainer.max_steps=4")[2]
    (good,) = (folder / "checkpoints").iterdir()
    contents = good.read_bytes()
    for name, part in (("half", contents[: len(contents) // 2]), ("empty", b""), ("end", contents[-5000:])):
        (folder / "checkpoints" / f"{name}.ckpt").write_bytes(part)
    (folder / "checkpoints" / "shards.ckpt").mkdir()
    (folder / "checkpoints" / ".step=9.ckpt.99999999.tmp").write_bytes(b"what a killed process leaves")
    (folder / "summary.json").unlink()
    code, told, folder = fit("cut")
    assert code == 0 and f"resuming {good.relative_to(fit.folder)}" in told, told
    same(folder, whole)
    assert not list((folder / "checkpoints").glob(".*"))
    shutil.rmtree(folder / "policy")
    code, told, _ = fit("cut", f"--ckpt_path={folder / 'checkpoints' / 'half.ckpt'}")
    assert code == 2 and "not all of it is there" in told


def test_a_config_that_was_half_written_does_not_stand_in_the_way(fit, small_disk):
    cut = fit("cut", "--trainer.max_steps=4")[2]
    before = (cut / "config.yaml").read_text()
    small_disk(1000)
    code, told, _ = fit("cut")
    small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert code == 2 and "the disk is full" in told.splitlines()[-1] and "Traceback" not in told, told
    assert (cut / "config.yaml").read_text() == before
    code, told, _ = fit("cut")
    assert code == 0 and "resuming" in told, told


def test_a_run_killed_before_it_wrote_its_config_begins_again_in_its_folder(fit):
    version = fit.folder / "runs" / "cut" / "version_0"
    version.mkdir(parents=True)
    (version / "events.out.tfevents.1.host.1.0").write_bytes(b"")
    code, told, _ = fit("cut")
    assert code == 0 and "starting afresh" in told, told
    assert [path.name for path in version.parent.iterdir()] == ["version_0"]
    same(version, fit("whole")[2])


def test_a_run_that_is_refused_leaves_the_runs_beside_it(fit, monkeypatch):
    def refused(*_):
        (fit.folder / "runs" / "other").mkdir()
        raise InputError("refused")

    monkeypatch.setattr(PolicyModule, "on_train_start", refused)
    assert fit("refused")[0] == 2
    assert [path.name for path in (fit.folder / "runs").iterdir()] == ["other"]


def test_nothing_in_a_checkpoint_is_executed(fit):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch executed",)

    torch.save({"global_step": 1, "state_dict": Evil()}, fit.folder / "evil.ckpt")
    code, told, _ = fit("evil", "--ckpt_path=evil.ckpt")
    assert code == 2 and "is no checkpoint" in told
    assert not (fit.folder / "executed").exists()


def test_best_metric_and_random_state_come_back(fit):
    monitored = ["--trainer.callbacks.init_args.monitor=val/length", "--trainer.callbacks.init_args.mode=max"]
    state = fit("whole", *monitored, "--trainer.max_steps=4")[2]
    (checkpoint,) = (state / "checkpoints").iterdir()
    kept = torch.load(checkpoint, weights_only=True)
    (callback,) = kept["callbacks"].values()
    torch.manual_seed(5)  # whatever ran before
    code, told, folder = fit("whole", *monitored)
    assert code == 0, told
    assert callback["best_model_score"] is not None and kept["random"]["cpu"].dtype == torch.uint8
    (after,) = torch.load(next((folder / "checkpoints").iterdir()), weights_only=True)["callbacks"].values()
    assert after["best_model_score"] >= callback["best_model_score"]


class Poisoned(TOPR):
    """TOPR whose loss of the third and later updates holds a NaN for every trajectory with a negative advantage."""

    updates = 0

    def __call__(self, log_probs_N, *given):
        output = super().__call__(log_probs_N, *given)
        Poisoned.updates += 1
        if Poisoned.updates < 6:
            return output
        poison = torch.where(given[2] < 0, float("nan"), 1.0)
        return output._replace(loss_B=output.loss_B * poison)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_trajectories(fit):
    Poisoned.updates = 0
    code, told, folder = fit("poisoned", "--model.loss=test_survival.Poisoned")
    error = told.splitlines()[-1]
    assert code == 2 and error.startswith("error: update ") and "the loss is NaN or infinite for" in error, told
    rows = [int(row) for row in re.findall(rf"row (\d+) of {fit.folder / 'train.parquet'}", error)]
    rewards = [trajectory.reward for trajectory in read_trajectories(fit.folder / "train.parquet")]
    assert rows and all(rewards[row] < 0 for row in rows)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]
    assert len(error) < 600


def test_a_gradient_that_is_not_finite_ends_the_run(fit, monkeypatch):
    def poisoned(*given):
        collect(*given)
        given[0].module.policy.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient / 0)

    monkeypatch.setattr(Monitor, "collect", poisoned)
    code, told, folder = fit("poisoned")
    assert code == 2 and "update 1: the gradient of the weights is NaN or infinite" in told
    assert not folder.exists()


def test_weights_that_are_not_finite_are_no_checkpoint(fit):
    sgd = ["--model.optimizer=torch.optim.SGD", "--trainer.gradient_clip_val=null"]
    code, told, folder = fit("huge", *sgd, "--model.optimizer.init_args.lr=3.0e38")
    assert code == 2 and ("are NaN or infinite after update" in told or "log-probs is NaN" in told), told
    assert not list(folder.glob("checkpoints/*"))


@pytest.mark.parametrize("where", ["update", "sampling", "evaluate"])
def test_running_out_of_memory_says_where_and_which_key_to_lower(run, fit, monkeypatch, where):
    def exhausted(*_):
        torch.empty(2**50)

    monkeypatch.setattr(*((OnePassLoss, "_forward") if where == "update" else (LocalSampler, "sample")), exhausted)
    if where == "evaluate":
        arguments = ["--benchmark", f"arithmetic={fit.problems}", "--samples", 2, "--out", "results"]
        code, out, told = run(evaluate.main, "--policy", fit.policy, *arguments)
        assert code == 2 and "lower --rows, now 512, or --microbatch-tokens" in told
        return
    code, told, folder = fit("exhausted", *(["--data.val=null", "--data.test=null"] if where == "update" else []))
    error = told.splitlines()[-1]
    assert code == 2 and error.startswith("error: out of memory in ") and "Traceback" not in told
    key = {"update": "data.microbatch_tokens, now 60", "sampling": "model.sampler.init_args.rows, now 512"}[where]
    assert key in error and not folder.exists()
    words = {"update": "update 1, a forward or backward of", "sampling": "4 responses to each of 5 problems"}
    assert words[where] in error


@pytest.fixture
def small_disk():
    """No file may grow beyond a size, which is what a full disk does to its writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_under_the_cache_is_told(fit, monkeypatch, small_disk):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", fit.folder / "cache")
    small_disk(3000)
    code, told, folder = fit("full")
    assert code == 2 and "the cache of data.train cannot be written to" in told.splitlines()[-1], told
    assert "Traceback" not in told and not folder.exists()


@pytest.mark.parametrize("what", ["checkpoint", "export", "trajectories"])
def test_a_full_disk_is_told_and_what_was_complete_is_kept(run, fit, monkeypatch, small_disk, what):
    def limited(owner, name, at: int):
        original, calls = getattr(owner, name), []

        def call(*given, **more):
            calls.append(1)
            if len(calls) == at:
                small_disk(2000)
            try:
                return original(*given, **more)
            finally:
                small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])

        monkeypatch.setattr(owner, name, call)

    if what == "trajectories":
        from topr import evaluation

        monkeypatch.setattr(evaluation, "PART", 2)
        limited(evaluation, "write_trajectories", 2)
        config = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--data.problems={fit.problems}"]
        code, out, told = run(train.main, "predict", *config, f"--model.policy={fit.policy}", "--data.out=out")
        assert code == 2 and told.splitlines()[-1].startswith("error: "), told
        assert [path.name for path in (fit.folder / "out").iterdir()] == ["part-00000.parquet"]
        return
    limited(*((torch, "save", 2) if what == "checkpoint" else (module, "export_policy", 1)))
    code, told, folder = fit("full")
    assert code == 2 and told.splitlines()[-1].startswith("error: ") and "Traceback" not in told, told
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name}
    kept = "step=2" if what == "checkpoint" else "step=6"
    assert left == {"checkpoints", f"checkpoints/epoch=0-{kept}.ckpt", "config.yaml", "hparams.yaml"}
    monkeypatch.undo()
    os.chdir(fit.folder)
    code, told, folder = fit("full")
    assert code == 0 and "resuming" in told, told
    same(folder, fit("whole")[2])
