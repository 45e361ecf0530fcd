"""Runs that end before they should: killed, asked to stop, without memory or disk, with numbers that are not finite."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, make_policy, make_trajectories, observe_microbatches, write
from safetensors.torch import load_file
from torture import curves

import evaluate
import train
from topr import callbacks
from topr.batching import MicroBatches, TrainLoader
from topr.callbacks import AtomicCheckpointIO, Evaluate, Monitor
from topr.callbacks.resume import updates
from topr.datamodule import TrajectoryDataModule
from topr.evaluation import pipeline
from topr.io import InputError
from topr.losses import TOPR
from topr.module import PolicyModule
from topr.policy import Policy
from topr.policy.logprobs import Head
from topr.sampling import LocalSampler
from topr.trajectories import read_trajectories

on_after_backward, sample = Monitor.on_after_backward, LocalSampler.sample
SAVE = [
    "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.init_args.every_n_train_steps=2",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy, its trajectories, problems."""
    folder = tmp_path_factory.mktemp("files")
    policy = make_policy(folder / "base")
    data = write(folder / "train.parquet", policy, make_trajectories(policy))
    problems = folder / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)))
    return policy, data, problems


@pytest.fixture(scope="module")
def finished():
    """Folders of runs that nobody interrupted, by their arguments: they are made once."""
    return {}


@pytest.fixture
def fit(run, files, finished):
    """`train.py fit` on a small set: exit code, what it printed, the folder of the run."""
    policy, data, problems = files

    def fit(name: str, *more):
        code, out, err = run(
            train.main, "fit", "--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}",
            f"--data.train={data}", f"--data.val={problems}", f"--data.test={problems}", "--data.samples=2",
            "--data.batch_size=4", "--data.microbatch_tokens=60", "--trainer.val_check_interval=0.34",
            "--data.sampling.max_new_tokens=9", "--trainer.enable_progress_bar=false",
            f"--trainer.logger.init_args.name={name}", *SAVE, "--ckpt_path=last", *more,
        )  # fmt: skip
        return code, out + err, run.folder / "runs" / name / "version_0"

    def whole(*more):
        if more not in finished:
            code, output, finished[more] = fit("whole", *more)
            assert code == 0, output
        return finished[more]

    fit.policy, fit.data, fit.problems, fit.folder, fit.whole = (
        policy,
        data,
        problems,
        run.folder,
        whole,
    )
    return fit


def assert_same(one, other) -> None:
    """Two finished runs have the same weights, bit for bit, curves and summary."""
    weights = [load_file(folder / "policy" / "model.safetensors") for folder in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert curves(one) == curves(other)
    summaries = [
        json.loads((folder / "summary.json").read_text()) | {"tokens_per_s": 0}
        for folder in (one, other)
    ]
    assert summaries[0] == summaries[1]


def kill(patch, update: int) -> None:
    """End the process, as far as a test can, in the update of this number."""

    def killed(trainer, module, batch) -> None:
        if trainer.global_step == update:
            raise KeyError("killed here")

    observe_microbatches(patch, killed)


def loader(epoch: int, plan: list[list[int]], count: int = 2) -> TrainLoader:
    """A loader whose micro-batches are pairs of the global batch and their number in it."""

    class Numbers(MicroBatches):
        def __getitem__(self, number: int):
            update, part = divmod(number, self.count)
            return self.plan[update], part

    return TrainLoader(
        Numbers(None, None, None, plan, count=count, unit=1, rank=0, ranks=1), epoch, workers=0
    )


def test_the_loader_resumes_behind_the_last_whole_global_batch():
    plan = [[0], [1], [2]]
    first, second = loader(0, plan), loader(0, plan)
    batches = iter(first)
    seen = [next(batches) for _ in range(3)]  # one global batch and a half
    assert first.state_dict() == {"epoch": 0, "global_batches": 1}
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert seen[:2] + rest == list(loader(0, plan)) and len(rest) == 4
    assert second.state_dict() == {"epoch": 0, "global_batches": 3}
    other = loader(0, plan, count=5)  # other micro-batches of the same global batches
    other.load_state_dict(first.state_dict())
    assert [batch for batch, _ in other] == [[1]] * 5 + [[2]] * 5


def test_the_loader_of_the_next_epoch_starts_at_its_beginning():
    plan = [[0], [1], [2]]
    first, second = loader(0, plan), loader(1, plan)
    assert len(list(first)) == 6
    second.load_state_dict(first.state_dict())  # of a checkpoint from the end of the epoch
    assert list(second) == list(loader(1, plan))
    assert second.state_dict() == {"epoch": 1, "global_batches": 3}


def test_a_checkpoint_appears_when_it_is_complete(tmp_path, monkeypatch):
    io, path = AtomicCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint({"global_step": 1}, path)
    save = torch.save

    def interrupted(content, where) -> None:
        save(content, where)
        assert torch.load(path) == {"global_step": 1}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(InputError, match="cannot be written .*No space left"):
        io.save_checkpoint({"global_step": 2}, path)
    assert torch.load(path) == {"global_step": 1} and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_few_kills_at_random_moments(tmp_path):
    """The short version of `python tests/torture.py --kills 100`."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "torture.py", "--kills=8", "--seed=3"],
        capture_output=True, text=True, cwd=tmp_path, timeout=280, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "are those of runs that were not killed" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "moment",
    [
        "update",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("before", "validation", "after")),
    ],
)
def test_sigterm_ends_a_fit_that_resumes_exactly(fit, monkeypatch, moment):
    whole, calls = fit.whole(), []

    def interrupt(at: int) -> None:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)

    if moment == "update":
        observe_microbatches(monkeypatch, lambda *_: interrupt(6))
    else:  # val, test, then three validations, then test
        at = {"before": 2, "validation": 4, "after": 6}[moment]
        monkeypatch.setattr(
            LocalSampler, "sample", lambda *arguments: (interrupt(at), sample(*arguments))[1]
        )
    code, output, folder = fit("ended")
    assert code == 143 and "ended by a signal" in output and "Traceback" not in output
    assert not (folder / "summary.json").exists()
    assert (folder / "checkpoints" / "preempted.ckpt").is_file() == (
        moment in ("update", "validation")
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.undo()
    os.chdir(fit.folder)
    code, output, folder = fit("ended")
    assert code == 0, output
    assert_same(folder, whole)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch=0-step=6.ckpt"]


@pytest.mark.slow
def test_a_second_process_stays_out_of_a_run(fit, monkeypatch):
    """The first is asked to stop in its fourth update; until then a second one is started."""
    whole, second = fit.whole(), []

    def start(trainer, module, batch) -> None:
        if trainer.global_step == 3 and not second:
            command = [sys.executable, ROOT / "train.py", *sys.argv[1:]]
            second.append(subprocess.run(command, capture_output=True, text=True))

    observe_microbatches(monkeypatch, start)
    code, output, folder = fit("shared")
    assert code == 0, output
    assert second[0].returncode == 2
    assert second[0].stderr.endswith(
        f"another process is writing to runs/shared/{folder.name}; {REMEDY}\n"
    )
    assert_same(folder, whole)


REMEDY = "wait for it, end it, or name another place"


def test_two_predictions_do_not_write_into_one_folder(run, fit, monkeypatch):
    arguments = [
        "--config",
        ROOT / "configs" / "arithmetic.yaml",
        f"--data.problems={fit.problems}",
        "--data.out=out",
    ]
    arguments = ["predict", *arguments, f"--model.policy={fit.policy}", "--data.samples=1"]
    holder = (
        "import sys, time; from topr.io import lock; lock('out'); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdout=subprocess.PIPE, cwd=fit.folder, env=IMPORTS
    ) as other:
        other.stdout.readline()
        code, _, err = run(train.main, *arguments)
        assert code == 2 and err.endswith(f"another process is writing to out; {REMEDY}\n"), err
        other.kill()  # however it ends
    code, output, err = run(train.main, *arguments)
    assert code == 0, err


IMPORTS = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_a_schedule_is_stepped_at_each_update_and_resumed_exactly(fit, monkeypatch):
    schedule = ["--model.lr_scheduler=topr.optim.Schedule", "--model.lr_scheduler.name=linear"]
    schedule += [
        "--model.lr_scheduler.num_warmup_steps=2",
        "--model.lr_scheduler.num_training_steps=6",
    ]
    whole = fit.whole(*schedule)
    rates = [value for _, value in curves(whole)["train/lr"]]
    assert rates == pytest.approx([3e-4 * share for share in (0, 0.5, 1, 0.75, 0.5, 0.25)])
    kill(monkeypatch, update=5)
    with pytest.raises(KeyError, match="killed here"):
        fit("killed", *schedule)
    monkeypatch.undo()
    os.chdir(fit.folder)
    code, output, _ = fit("killed")
    assert code == 2 and "another model.lr_scheduler" in output
    code, output, folder = fit("killed", *schedule)
    assert code == 0 and "step=4.ckpt" in output, output
    assert_same(folder, whole)


@pytest.mark.slow
def test_ctrl_c_ends_a_fit_that_can_be_resumed(tmp_path):
    checkpoints = tmp_path / "arithmetic" / "version_0" / "checkpoints"
    options = [
        f"--trainer.logger.init_args.save_dir={tmp_path}",
        "--trainer.callbacks.init_args.every_n_train_steps=2",
    ]
    with (tmp_path / "log.txt").open("w") as log:
        start = [sys.executable, "train.py", "fit", "--config=configs/arithmetic.yaml", *options]
        fit = subprocess.Popen(start, cwd=ROOT, stdout=log, stderr=log)
        while fit.poll() is None and not list(checkpoints.glob("*.ckpt")):
            time.sleep(0.01)
        fit.send_signal(signal.SIGINT)
        assert fit.wait(60) == 143, (tmp_path / "log.txt").read_text()
    assert (checkpoints / "preempted.ckpt").is_file()


def test_sigterm_ends_a_prediction_at_once(run, fit, monkeypatch):
    monkeypatch.setattr(LocalSampler, "sample", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    arguments = [
        "--config",
        ROOT / "configs" / "arithmetic.yaml",
        f"--data.problems={fit.problems}",
        "--data.out=out",
    ]
    code, _, _ = run(train.main, "predict", *arguments, f"--model.policy={fit.policy}")
    assert code == 143 and [path.name for path in (fit.folder / "out").rglob("*")] == [".lock"]


@pytest.mark.slow
def test_a_validation_between_a_checkpoint_and_a_kill_is_made_up_for(fit, monkeypatch):
    whole = fit.whole()
    monkeypatch.setattr(Evaluate, "on_validation_batch_end", lambda *_: {}["killed here"])
    with pytest.raises(KeyError, match="killed here"):
        fit("killed")
    monkeypatch.undo()
    os.chdir(fit.folder)
    code, output, folder = fit("killed")
    assert (
        code == 0 and "resuming runs/killed/version_0/checkpoints/epoch=0-step=2.ckpt" in output
    ), output
    assert_same(folder, whole)


AT_THE_END_OF_AN_EPOCH = [  # behind its last validation, where Lightning counts the next epoch already
    "--trainer.callbacks.init_args.every_n_train_steps=null",
    "--trainer.callbacks.init_args.save_on_train_epoch_end=true",
    "--trainer.max_steps=12",  # only now Lightning loads the state of the loader
]


@pytest.mark.parametrize(
    ("kills", "saved"),
    [
        ([7], []),
        pytest.param([7], AT_THE_END_OF_AN_EPOCH, marks=pytest.mark.slow),
        pytest.param([3, 7, 9, 11], [], marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_in_both_epochs_and_at_their_border_has_the_same_results(
    fit, monkeypatch, kills, saved
):
    whole = fit.whole("--trainer.max_epochs=2")
    for (
        update
    ) in kills:  # the checkpoints before them: 2, 6 (of the last update of an epoch), 8, 10
        with monkeypatch.context() as patch, pytest.raises(KeyError, match="killed here"):
            kill(patch, update)
            fit("killed", "--trainer.max_epochs=2", *saved)
    code, output, folder = fit("killed", "--trainer.max_epochs=2", *saved)
    assert code == 0 and "resuming" in output, output
    assert_same(folder, whole)


@pytest.mark.slow
def test_the_newest_complete_checkpoint_is_found(fit):
    whole = fit.whole()
    folder = fit("cut", "--trainer.max_steps=4")[2]
    (good,) = (folder / "checkpoints").iterdir()
    contents = good.read_bytes()
    for name, part in (
        ("half", contents[: len(contents) // 2]),
        ("empty", b""),
        ("end", contents[-5000:]),
    ):
        (folder / "checkpoints" / f"{name}.ckpt").write_bytes(part)
    (folder / "checkpoints" / "shards.ckpt").mkdir()
    (folder / "checkpoints" / ".step=9.ckpt.99999999.tmp").write_bytes(
        b"what a killed process leaves"
    )
    (folder / "summary.json").unlink()
    code, output, folder = fit("cut")
    assert code == 0 and f"resuming {good.relative_to(fit.folder)}" in output, output
    assert_same(folder, whole)
    assert not list((folder / "checkpoints").glob(".*"))
    shutil.rmtree(folder / "policy")
    code, output, _ = fit("cut", f"--ckpt_path={folder / 'checkpoints' / 'half.ckpt'}")
    assert code == 2 and "is incomplete or not a checkpoint" in output


@pytest.mark.slow
def test_a_full_disk_leaves_the_config_of_an_earlier_start(fit, small_disk):
    cut = fit("cut", "--trainer.max_steps=4")[2]
    before = (cut / "config.yaml").read_text()
    small_disk(1000)
    code, output, _ = fit("cut")
    small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert (
        code == 2 and "the disk is full" in output.splitlines()[-1] and "Traceback" not in output
    ), output
    assert (cut / "config.yaml").read_text() == before
    code, output, _ = fit("cut")
    assert code == 0 and "resuming" in output, output


def test_a_run_killed_before_it_wrote_its_config_starts_over_in_its_folder(fit):
    version = fit.folder / "runs" / "cut" / "version_0"
    version.mkdir(parents=True)
    (version / "events.out.tfevents.1.host.1.0").write_bytes(b"")
    code, output, _ = fit("cut")
    assert code == 0 and "starting afresh" in output, output
    assert [path.name for path in version.parent.iterdir()] == ["version_0"]
    assert_same(version, fit.whole())


@pytest.mark.slow
def test_a_policy_that_pads_has_as_many_micro_batches_when_it_is_resumed(fit, monkeypatch):
    counts, count = [], TrajectoryDataModule.microbatches

    def counted(self, epoch: int) -> int:
        counts.append((self.padded, count(self, epoch)))
        return counts[-1][1]

    monkeypatch.setattr(Policy, "padded", True)
    monkeypatch.setattr(TrajectoryDataModule, "microbatches", counted)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError, match="killed here"):
        kill(patch, 4)
        fit("padded")
    assert fit("padded")[0] == 0
    assert len(counts) >= 2 and len(set(counts)) == 1 and counts[0][0]


def test_a_rejected_run_leaves_the_runs_beside_it_and_no_empty_folder(fit, monkeypatch):
    def rejected(*_):
        for name in ("other", "kept/version_7"):
            (fit.folder / "runs" / name).mkdir(parents=True, exist_ok=True)
        raise InputError("rejected")

    monkeypatch.setattr(PolicyModule, "on_train_start", rejected)
    assert fit("kept")[0] == fit("rejected")[0] == 2
    left = {str(path.relative_to(fit.folder / "runs")) for path in (fit.folder / "runs").rglob("*")}
    assert left == {"other", "kept", "kept/version_7"}


def test_nothing_in_a_checkpoint_is_executed(fit):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch executed",)

    content = {"global_step": 1, "loops": {}, "pytorch-lightning_version": "2.6"}
    torch.save(content, fit.folder / "good.ckpt")
    torch.save(content | {"state_dict": Evil()}, fit.folder / "evil.ckpt")
    assert updates(fit.folder / "good.ckpt") == 1
    code, output, _ = fit("evil", "--ckpt_path=evil.ckpt")
    assert code == 2 and "is incomplete or not a checkpoint" in output
    assert not (fit.folder / "executed").exists()


@pytest.mark.slow
def test_best_metric_and_random_state_are_restored(fit, monkeypatch):
    monitored = [
        "--trainer.callbacks.init_args.monitor=val/length",
        "--trainer.callbacks.init_args.mode=max",
    ]
    states = []
    # a loss may draw random numbers
    observe_microbatches(
        monkeypatch, lambda *_: states.append(torch.get_rng_state()) or torch.rand(3)
    )
    folder = fit("cut", *monitored, "--trainer.max_steps=4")[2]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    kept = torch.load(checkpoint, weights_only=True)
    (callback,) = (state for state in kept["callbacks"].values() if "best_model_score" in state)
    before = len(states)
    code, output, folder = fit("cut", *monitored)
    assert code == 0, output
    assert torch.equal(states[before], kept["random"]["cpu"]) and not torch.equal(
        states[before], states[0]
    )
    after = torch.load(next((folder / "checkpoints").iterdir()), weights_only=True)[
        "callbacks"
    ].values()
    (after,) = (state for state in after if "best_model_score" in state)
    assert after["best_model_score"] >= callback["best_model_score"] is not None


class Poisoned(TOPR):
    """TOPR whose loss of the third and later updates holds a NaN for every trajectory with a negative advantage."""

    calls = 0

    def __call__(self, log_probs_N, *arguments):
        output = super().__call__(log_probs_N, *arguments)
        Poisoned.calls += 1
        if Poisoned.calls < 6:
            return output
        poison = torch.where(arguments[2] < 0, float("nan"), 1.0)
        return output._replace(loss_B=output.loss_B * poison)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_trajectories(fit):
    Poisoned.calls = 0
    code, output, folder = fit("poisoned", "--model.loss=test_resume.Poisoned")
    error = output.splitlines()[-1]
    assert (
        code == 2
        and error.startswith("error: update ")
        and "the loss is NaN or infinite for" in error
    ), output
    rows = [int(row) for row in re.findall(rf"row (\d+) of {fit.data}", error)]
    rewards = [trajectory.reward for trajectory in read_trajectories(fit.data)]
    assert rows and all(rewards[row] < 0 for row in rows)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]
    assert len(error) < 600


def test_a_gradient_that_is_not_finite_ends_the_run(fit, monkeypatch):
    def poison(trainer, module, batch) -> None:
        weight = module.policy.model.model.layers[0].mlp.up_proj.weight
        weight.register_hook(lambda gradient: gradient / 0)

    observe_microbatches(monkeypatch, poison)
    code, output, folder = fit("poisoned")
    assert code == 2 and "update 1: the gradient of the weights is NaN or infinite" in output
    assert not folder.exists()


def exhausted(*_):
    torch.empty(2**50)


def test_running_out_of_memory_in_an_update_names_the_key_to_lower(fit, monkeypatch):
    monkeypatch.setattr(Head, "logits", exhausted)
    monkeypatch.setattr("topr.policy.model.check_forward", lambda *_: None)
    code, output, folder = fit("exhausted", "--data.val=null", "--data.test=null")
    error = output.splitlines()[-1]
    assert (
        code == 2
        and error.startswith("error: out of memory in update 1 (")
        and "Traceback" not in output
    )
    assert "lower data.microbatch_tokens, now 60" in error and not folder.exists()


@pytest.mark.parametrize("where", ["fit", "evaluate"])
def test_running_out_of_memory_in_sampling_names_the_key_to_lower(run, fit, monkeypatch, where):
    monkeypatch.setattr(LocalSampler, "sample", exhausted)
    if where == "evaluate":
        arguments = [
            "--benchmark",
            f"arithmetic={fit.problems}",
            "--samples",
            2,
            "--out",
            "results",
        ]
        code, _, output = run(evaluate.main, "--policy", fit.policy, *arguments)
        assert code == 2 and "lower --rows, now automatic" in output
        return
    code, output, folder = fit("exhausted")
    error = output.splitlines()[-1]
    assert code == 2 and error.startswith(
        "error: out of memory in 2 responses to each of 5 problems"
    )  # of data.test
    assert (
        "model.sampler.init_args.rows, now 512" in error
        and "Traceback" not in output
        and not folder.exists()
    )


@pytest.fixture
def small_disk():
    """No file may grow beyond a size: a full disk does the same to its writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_under_the_cache_is_explained(fit, monkeypatch, small_disk):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", fit.folder / "cache")
    small_disk(3000)
    code, output, folder = fit("full")
    assert code == 2 and "the cache of data.train cannot be written (" in output.splitlines()[-1], (
        output
    )
    assert "Traceback" not in output and not folder.exists()


def limit_call(patch, small_disk, owner, name: str, number: int) -> None:
    """Let the disk be full during one call of a function."""
    original, calls = getattr(owner, name), []

    def limited(*arguments, **more):
        calls.append(1)
        if len(calls) == number:
            small_disk(2000)
        try:
            return original(*arguments, **more)
        finally:
            small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])

    patch.setattr(owner, name, limited)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "number", "kept"),
    [(torch, "save", 2, 2), (callbacks.evaluate, "export_policy", 1, 6)],
)
def test_a_full_disk_is_explained_and_complete_checkpoints_are_kept(
    fit, monkeypatch, small_disk, owner, name, number, kept
):
    with monkeypatch.context() as patch:
        limit_call(patch, small_disk, owner, name, number)
        code, output, folder = fit("full")
    assert (
        code == 2 and output.splitlines()[-1].startswith("error: ") and "Traceback" not in output
    ), output
    left = {
        str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name
    }
    assert left == {
        "checkpoints",
        f"checkpoints/epoch=0-step={kept}.ckpt",
        "config.yaml",
        "hparams.yaml",
        ".lock",
    }
    code, output, folder = fit("full")
    assert code == 0 and "resuming" in output, output
    assert_same(folder, fit.whole())


def test_a_full_disk_keeps_complete_trajectories(run, fit, monkeypatch, small_disk):
    monkeypatch.setattr(pipeline, "PART", 2)
    limit_call(monkeypatch, small_disk, pipeline, "write_trajectories", 2)
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--data.problems={fit.problems}"]
    code, _, err = run(
        train.main, "predict", *config, f"--model.policy={fit.policy}", "--data.out=out"
    )
    assert code == 2 and err.splitlines()[-1].startswith("error: "), err
    assert sorted(path.name for path in (fit.folder / "out").iterdir()) == [
        ".lock",
        "part-00000.parquet",
    ]
