"""Runs that end before they should: killed, asked to stop, without memory or disk, with NaNs."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, make_policy, make_trajectories, slow, write
from torch.optim.lr_scheduler import OneCycleLR
from torture import Command, assert_same_run, check_fit, curves

import train
from topr.io import InputError
from topr.run.checkpoints import AtomicCheckpointIO, updates_before
from topr.sampling import LocalSampler

CHECKPOINT = "--trainer.callbacks.init_args"
TWO_EPOCHS = "--trainer.max_epochs=2"
NAME = "--trainer.logger.init_args.name=arithmetic"
KILL = signal.SIGKILL
STOP = signal.SIGTERM


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a policy, its 23 trajectories (six updates an epoch) and five problems."""
    folder = tmp_path_factory.mktemp("files")
    policy = make_policy(folder / "base")
    write(folder / "train.parquet", policy, make_trajectories(policy))
    problems = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)]
    (folder / "problems.jsonl").write_text("".join(problems))
    return folder


def arguments(files, *more) -> list:
    """Of a fit with three validations an epoch, and a checkpoint every second update."""
    policy = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={files / 'base'}"]
    problems = [f"--data.{split}={files / 'problems.jsonl'}" for split in ("val", "test")]
    sampling = ["--data.samples=2", "--data.sampling.max_new_tokens=9"]
    sizes = ["--data.batch_size=4", "--data.microbatch_tokens=60"]
    trainer = ["--trainer.val_check_interval=0.34", "--trainer.enable_progress_bar=false", NAME]
    callback = "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint"
    saving = [callback, f"{CHECKPOINT}.every_n_train_steps=2", "--ckpt_path=last"]
    data = [f"--data.train={files / 'train.parquet'}", *problems, *sampling, *sizes]
    return ["fit", *policy, *data, *trainer, *saving, *more]


@pytest.fixture(scope="module")
def whole(files):
    """Runs that nobody interrupted, by their arguments; each is made once."""
    finished = {}

    def run(*more) -> Command:
        if more not in finished:
            command = Command(files / f"whole-{len(finished)}", *arguments(files, *more))
            assert command.run() == 0, command.log
            finished[more] = command
        return finished[more]

    return run


def version(command: Command):
    return command.folder / "runs" / "arithmetic" / "version_0"


AT_VALIDATIONS = [f"{CHECKPOINT}.every_n_train_steps=null"]
AT_EPOCHS = [*AT_VALIDATIONS, f"{CHECKPOINT}.save_on_train_epoch_end=true"]
SCHEDULE = [
    "--model.optimizer=topr.optim.Adafactor",
    "--model.optimizer.init_args.lr=3e-4",
    "--model.lr_scheduler=OneCycleLR",
    "--model.lr_scheduler.max_lr=3e-4",
    "--model.lr_scheduler.total_steps=6",
    "--model.lr_scheduler.cycle_momentum=false",
]
# sampling 1 to 6: sanity check, test before, three validations in the epoch, test after
MOMENTS = {
    "update": ([], [("update", 4, STOP)]),
    "before": ([], [("sampling", 2, STOP)]),
    "validation twice": ([], [("sampling", 4, STOP), ("sampling", 1, KILL)]),
    "behind a checkpoint": ([], [("sampling", 4, KILL)]),
    "test after": ([], [("sampling", 6, STOP)]),
    "export": ([], [("export", 1, KILL)]),
    "epochs": ([TWO_EPOCHS], [("update", 5, KILL), ("update", 2, STOP), ("update", 1, STOP)]),
    "end of an epoch": ([TWO_EPOCHS], [("update", 6, STOP), ("update", 5, STOP)]),
    "without validation": (
        [TWO_EPOCHS, "--data.val=null"],
        [("update", 6, STOP), ("update", 1, STOP)],
    ),
    "last validation": ([TWO_EPOCHS], [("sampling", 5, KILL), ("sampling", 5, KILL)]),
    "saved at validations": ([TWO_EPOCHS, *AT_VALIDATIONS], [("update", 8, STOP)]),
    "saved at epochs": ([TWO_EPOCHS, *AT_EPOCHS], [("update", 9, KILL), ("export", 1, KILL)]),
    "steps": (["--trainer.max_steps=4"], [("sampling", 5, STOP), ("export", 1, KILL)]),
    "metric": ([*AT_VALIDATIONS, f"{CHECKPOINT}.monitor=val/length"], [("update", 5, STOP)]),
    "schedule": (SCHEDULE, [("update", 4, KILL)]),
    "groups": (["--data.whole_groups=true"], [("update", 4, KILL)]),
    "pairs": (["--config", ROOT / "configs" / "loss" / "dpo.yaml"], [("update", 3, STOP)]),
    "worker": (["--data.num_workers=1"], [("update", 4, STOP)]),
}
FAST = ["update", "behind a checkpoint"]


@pytest.mark.parametrize("moment", [name if name in FAST else slow(name) for name in MOMENTS])
def test_an_interrupted_run_ends_as_if_it_had_not_been(files, whole, tmp_path, moment):
    more, interruptions = MOMENTS[moment]
    command = Command(tmp_path / "run", *arguments(files, *more))
    for phase, entry, number in interruptions:
        expected = 143 if number == STOP else -KILL
        assert command.run(phase, entry, kill=number) == expected, command.log
    assert command.run() == 0, command.log
    assert "Traceback" not in command.log
    check_fit(command, whole(*more))


@pytest.mark.slow
def test_a_schedule_is_stepped_once_an_update(whole):
    rates = [float(value) for _, value in curves(version(whole(*SCHEDULE)))["train/lr"]]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    schedule = OneCycleLR(optimizer, max_lr=3e-4, total_steps=6, cycle_momentum=False)
    expected = []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected)


@pytest.mark.slow
def test_a_few_kills_at_random_moments(tmp_path):
    """The short version of `python tests/torture.py --kills 100`."""
    program = [sys.executable, ROOT / "tests" / "torture.py", "--kills=8", "--seed=3"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "are those of runs that were not killed" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_a_fit_that_can_be_resumed(files, tmp_path):
    checkpoints = tmp_path / "runs" / "arithmetic" / "version_0" / "checkpoints"
    more = [TWO_EPOCHS.replace("2", "200"), "--trainer.limit_val_batches=0"]
    program = [sys.executable, ROOT / "train.py", *arguments(files, *more)]
    with (tmp_path / "log.txt").open("w") as log:
        fit = subprocess.Popen(program, cwd=tmp_path, stdout=log, stderr=log)
        while fit.poll() is None and not list(checkpoints.glob("*.ckpt")):
            time.sleep(0.01)
        fit.send_signal(signal.SIGINT)
        assert fit.wait(60) == 143, (tmp_path / "log.txt").read_text()
    assert (checkpoints / "preempted.ckpt").is_file()


@pytest.fixture
def predict(files):
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", "--data.samples=1"]
    policy = [f"--model.policy={files / 'base'}", "--data.out=out"]
    return ["predict", *config, *policy, f"--data.problems={files / 'problems.jsonl'}"]


def test_sigterm_ends_a_prediction_at_once(predict, tmp_path):
    command = Command(tmp_path / "run", *predict)
    assert command.run("sampling", 1, kill=STOP) == 143
    assert [path.name for path in (command.folder / "out").iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", ["fit", "predict"])
def test_a_second_process_stays_out(run, files, predict, kind):
    folder = {"fit": "runs/arithmetic/version_0", "predict": "out"}[kind]
    command = {"fit": arguments(files, "--trainer.max_steps=1"), "predict": predict}[kind]
    program = f"from topr.io import lock; lock('{folder}'); print(flush=True); input()"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = [sys.executable, "-c", program]
    with subprocess.Popen(holder, cwd=run.folder, env=environment, **pipes) as other:
        other.stdout.readline()
        code, _, err = run(train.main, *command)
        assert code == 2, err
        assert f"another process is writing to {folder}; " in err
        other.kill()  # however it ends
    code, _, err = run(train.main, *command)
    assert code == 0, err


@pytest.mark.slow
def test_the_newest_complete_checkpoint_is_found(files, whole, tmp_path):
    command = Command(tmp_path / "run", *arguments(files))
    assert command.run("update", 5) == -KILL
    folder = version(command) / "checkpoints"
    (good,) = folder.iterdir()
    contents = good.read_bytes()
    halves = {"half": contents[: len(contents) // 2], "empty": b"", "end": contents[-5000:]}
    for name, part in halves.items():
        (folder / f"{name}.ckpt").write_bytes(part)
    (folder / "shards.ckpt").mkdir()
    (folder / ".step=9.ckpt.tmp").write_bytes(b"what a killed process leaves")
    assert command.run() == 0, command.log
    assert f"resuming {good.relative_to(command.folder)}" in command.log
    assert not list(folder.glob(".*"))
    for name in halves:
        (folder / f"{name}.ckpt").unlink()
    (folder / "shards.ckpt").rmdir()
    assert_same_run(version(command), version(whole()))


def test_a_checkpoint_of_weights_alone_is_not_resumed(files, run):
    saved = ["--data.val=null", "--data.test=null", f"{CHECKPOINT}.save_weights_only=true"]
    code, _, err = run(train.main, *arguments(files, *saved))
    assert code == 0, err
    (checkpoint,) = run.folder.glob("runs/arithmetic/version_0/checkpoints/*.ckpt")
    assert updates_before(checkpoint) is None
    code, out, err = run(train.main, *arguments(files, *saved), "--ckpt_path=last")
    assert code == 0 and "starting afresh" in out, err


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/executed",)

    content = {"global_step": 1, "lr_schedulers": [], "pytorch-lightning_version": "2.6"}
    torch.save(content, tmp_path / "good.ckpt")
    torch.save(content | {"state_dict": Evil()}, tmp_path / "evil.ckpt")
    assert updates_before(tmp_path / "good.ckpt") == 1
    assert updates_before(tmp_path / "evil.ckpt") is None
    shards = tmp_path / "shards.ckpt"
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=shards, no_dist=True)
    torch.save(content, shards / "meta.pt")
    assert updates_before(shards) == 1
    (shards / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert updates_before(shards) is None
    (shards / ".metadata").write_bytes(b"ctorch.hub\nos.system\n(S'touch executed'\ntR.")
    assert updates_before(shards) is None
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def small_disk():
    """No file may grow beyond a size: a full disk does the same to its writer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_checkpoint_appears_when_it_is_complete(tmp_path, small_disk):
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)
    small_disk(5000)
    with pytest.raises(InputError, match="cannot be written .*; earlier ones are kept"):
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(9999)}, path)
    assert torch.load(path) == {"global_step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_full_disk_ends_a_run_that_can_be_resumed(files, whole, tmp_path, small_disk):
    command = Command(tmp_path / "run", *arguments(files))
    assert command.run("update", 4) == -KILL
    config = version(command) / "config.yaml"
    for size in (1000, 50_000):  # too little for config.yaml, for a checkpoint
        small_disk(size)
        assert command.run() == 2
        assert command.log.splitlines()[-1].startswith("error: ")
        assert "seed_everything" in config.read_text()
        (kept,) = (version(command) / "checkpoints").iterdir()
        assert updates_before(kept) == 2
    small_disk(resource.RLIM_INFINITY)
    assert command.run() == 0, command.log
    check_fit(command, whole())


def exhausted(*_):
    torch.empty(2**50)


def test_running_out_of_memory_in_an_update_names_the_key_to_lower(files, run, monkeypatch):
    more = ["--data.val=null", "--data.test=null"]
    monkeypatch.setattr("topr.policy.model.choose_forward", lambda *_: None)
    monkeypatch.setattr("topr.policy.model.token_log_probs", exhausted)
    code, _, err = run(train.main, *arguments(files, *more))
    error = err.splitlines()[-1]
    assert code == 2
    assert error.startswith("error: out of memory (")
    assert "lower microbatch_tokens" in error
    assert not list(run.folder.glob("runs/arithmetic/version_*"))


def test_running_out_of_memory_in_sampling_names_the_key_to_lower(files, run, monkeypatch):
    monkeypatch.setattr(LocalSampler, "sample", exhausted)
    code, _, err = run(train.main, *arguments(files))
    error = err.splitlines()[-1]
    assert code == 2
    assert "out of memory (" in error
    assert "the sampler's rows" in error
