"""The iterations: what lies where, what a kill at any stage changes, which commands are refused."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, make_policy, slow

from topr import iterate
from topr.evaluation.pipeline import SamplingJob, read_parts
from topr.io import commands
from topr.policy import load_policy
from topr.run.identity import policy_hash
from topr.sampling import LocalSampler, Sampling
from topr.tasks import Grade, Task
from topr.trajectories import add_log_probs, read_metadata, read_trajectories, write_trajectories

STAGES = ["predict", "fit", "predict", "fit"]  # of two iterations
ARGUMENTS = [
    "--model.policy=base",
    "--model.weights=start.ckpt",
    "--out=out",
    "--iterations=2",
    "--curate",
    "anna_karenina",
    "--budget=3",
    "--seed=7",
]


class Parity(Task):
    """What a random policy gets right now and then: a response of an even number of characters."""

    def grade(self, response, gold):
        return Grade(1.0 if len(response) % 2 == 0 else -1.0, True, str(len(response) % 4))


class Train:
    """In place of `iterate.train`. It samples as `predict` does; its `fit` exports another random
    policy. It dies at stage `killed_at`, having written a part of the stage's output."""

    def __init__(self):
        self.stages = []
        self.killed_at = None

    def __call__(self, command, *arguments):
        killed = len(self.stages) == self.killed_at
        self.stages.append(command)
        given = dict(argument[2:].split("=") for argument in arguments)
        policy = given.get("model.policy", "base")
        seed = int(given["seed_everything"])
        # a checkpoint of the user's would lie over the newest policy
        assert policy == "base" or given["model.weights"] == "null"
        assert given["ckpt_path"] == {"predict": "null", "fit": "last"}[command]
        if command == "predict":
            task = Parity()
            sampling = Sampling(top_k=0, max_new_tokens=12)
            problems = task.problems("problems.jsonl")
            job = SamplingJob(policy, task, problems, 6, sampling, seed)
            for path, part in job.parts_to_write(Path(given["data.out"])):
                if not part:  # its file is there
                    continue
                if killed and path.name != "part-00000.parquet":
                    raise KeyError("killed here")
                loaded = load_policy(policy)
                rows = next(job.sample_parts([part], LocalSampler(), loaded))
                add_log_probs(loaded, rows)
                write_trajectories(path, rows, job.metadata)
        else:
            logger = "trainer.logger.init_args"
            run = Path(given[f"{logger}.save_dir"], given[f"{logger}.name"], "version_0")
            assert given["trainer.logger"] == "TensorBoardLogger"
            assert read_metadata(given["data.train"])["policy"] == policy_hash(policy)
            make_policy(run / "policy", seed=seed, scale=0.3)
            if killed:
                raise KeyError("killed here")
            (run / "summary.json").write_text(f'{{"after": {{"pass@1": {seed}}}}}')


def arrange(folder: Path, patch) -> Train:
    """Policy and problems in the current folder, and a stand-in for train.py."""
    make_policy(folder / "base", scale=0.3)
    lines = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(34)]
    (folder / "problems.jsonl").write_text("".join(lines))
    train = Train()
    patch.setattr(iterate, "train", train)
    patch.chdir(folder)
    return train


def drive() -> None:
    """`iterate.main` without its handlers of signals."""
    with commands.command():
        iterate.iterate(*iterate.make_parser().parse_known_args())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        arrange(folder, patch)
        patch.setattr(sys, "argv", ["iterate", *ARGUMENTS])
        drive()
    return folder


@pytest.fixture
def train(tmp_path, monkeypatch):
    return arrange(tmp_path, monkeypatch)


def test_every_stage_works_on_the_newest_policy(whole):
    policy = whole / "base"
    for i in range(2):
        folder = whole / "out" / f"iteration_{i}"
        rows = read_parts(folder / "samples")
        kept = read_trajectories(folder / "train.parquet")
        metadata = read_metadata(folder / "train.parquet")
        assert metadata["policy"] == policy_hash(str(policy))
        assert metadata["sampling"]["seed"] == 7000 + i
        assert len(rows) == 34 * 6 and {t.group for t in kept} == set(map(str, range(34)))
        correct = {t.prompt_id for t in rows if t.reward > 0}  # of each problem, the first is kept
        assert sum(t.reward > 0 for t in kept) == len(correct)
        assert len(kept) <= 34 * 3
        policy = folder / "fit" / "version_0" / "policy"
    results = pd.read_csv(whole / "out" / "results.csv", index_col=0)
    assert results.loc["after.pass@1"].tolist() == [7000, 7001]


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_killed_at_any_stage_it_ends_with_the_same_results(whole, train, run, stage):
    train.killed_at = stage
    with pytest.raises(KeyError, match="killed here"):
        run(drive, *ARGUMENTS)
    train.killed_at = None
    code, _, error = run(drive, *ARGUMENTS)
    assert code == 0, error
    assert train.stages == [*STAGES[: stage + 1], *STAGES]
    for name in ("results.csv", "iteration_1/train.parquet"):
        assert Path("out", name).read_bytes() == (whole / "out" / name).read_bytes(), name


def test_more_iterations_follow_those_that_are_there(train, run):
    assert run(drive, *ARGUMENTS)[0] == 0
    assert run(drive, *ARGUMENTS, "--iterations=3")[0] == 0
    assert train.stages == [*STAGES, *STAGES, "predict", "fit"]
    make_policy(Path("base"), seed=1)
    code, _, error = run(drive, *ARGUMENTS)
    assert code == 2 and "holds responses of another policy" in error


def test_changed_arguments_replace_no_policy(train, run):
    assert run(drive, *ARGUMENTS)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*.*")}
    for more in (["--trainer.max_steps=3"], ["--budget=2"]):
        code, _, error = run(drive, *ARGUMENTS, *more)
        assert code == 2 and "out holds results of other arguments" in error
    after = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*.*")}
    assert after == before
    assert run(drive, *ARGUMENTS)[0] == 0


@pytest.mark.parametrize(
    ("more", "words"), [(["--iterations=0"], "iterations"), (["--curate=best"], "best")]
)
def test_bad_input_is_rejected_before_anything_is_written(train, run, more, words):
    code, _, error = run(drive, *ARGUMENTS, *more)
    assert code == 2 and len(error.splitlines()) == 1 and words in error, error
    assert not Path("out").exists()


@pytest.mark.slow
def test_the_command_itself_obeys_signals_and_resumes(tmp_path):
    """The one test whose stages are processes of train.py."""
    with pytest.MonkeyPatch.context() as patch:
        arrange(tmp_path, patch)
    arguments = [f"--config={ROOT / 'configs' / 'arithmetic.yaml'}", "--model.policy=base"]
    arguments += ["--data.problems=problems.jsonl", "--data.test=problems.jsonl"]
    arguments += ["--data.val=null", "--trainer.max_epochs=9"]
    arguments += ["--model.task=test_iterate.Parity", "--data.samples=4", "--data.batch_size=4"]
    arguments += ["--data.sampling.max_new_tokens=12", "--out=out", "--iterations=2"]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def start():
        command = [sys.executable, "-m", "topr.iterate", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=environment)

    fits = [tmp_path / "out" / f"iteration_{i}" / "fit" / "version_0" for i in range(2)]
    for number, fit, code in ((signal.SIGTERM, fits[0], 143), (signal.SIGKILL, fits[1], -9)):
        driver = start()
        while driver.poll() is None and not list(fit.glob("checkpoints/*.ckpt")):
            time.sleep(0.01)
        driver.send_signal(number)
        assert driver.wait(60) == code
        # only a stage that the driver waits for can save itself
        assert (fit / "checkpoints" / "preempted.ckpt").exists() == (number == signal.SIGTERM)
    assert start().wait(120) == 0  # a stage that had outlived its driver would hold the lock
    assert "after.pass@1,0." in (tmp_path / "out" / "results.csv").read_text()
    config = (fits[1] / "config.yaml").read_text()
    assert "policy: out/iteration_0/fit/version_0/policy" in config
