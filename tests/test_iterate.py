"""The iterations: what lies where, what a kill at any stage changes, which commands are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, make_policy

from topr import io, iterate
from topr.evaluation import SamplingJob, report
from topr.evaluation.metrics import bootstrap_interval
from topr.evaluation.pipeline import read_parts
from topr.identity import policy_hash
from topr.policy import load_policy
from topr.sampling import LocalSampler, Sampling
from topr.tasks import Grade, Task
from topr.trajectories import read_metadata, read_trajectories, write_trajectories

STAGES = ["config", "test", "samples", "fit", "test", "samples", "fit", "test"]  # of two iterations
CONFIG = """
model:
  policy: base
  task: {class_path: test_iterate.Parity}
  sampler: null
  optimizer: {init_args: {lr: 0.01}}
data: {test: test.jsonl, problems: problems.jsonl, samples: 4, microbatch_tokens: 4096}
trainer: {devices: 1, logger: {init_args: {name: x, save_dir: runs}}}
"""


class Parity(Task):
    """What a random policy gets right now and then: a response of an even number of characters."""

    def grade(self, response, gold):
        length = len(response)
        answer = str(length % 4) if length > 3 else None
        return Grade(1.0 if length % 2 == 0 else -1.0, answer is not None, answer)


class Train:
    """In place of `iterate.train`. It samples as `predict` does; its `fit` exports another random
    policy. It dies at stage `killed_at`, having written a part of the stage's output."""

    def __init__(self):
        self.stages: list[str] = []
        self.killed_at = None

    def __call__(self, command, *arguments, capture=False):
        given = dict(argument[2:].split("=") for argument in arguments if "=" in argument)
        folder = Path(given.get("data.out", "config" if capture else "fit"))
        self.stages.append(folder.name.removesuffix(".partial"))
        killed = len(self.stages) - 1 == self.killed_at
        if capture:
            return configuration(given)
        policy = given["model.policy"]
        seed = int(given["seed_everything"])
        if command == "predict":
            task = Parity()
            problems = task.problems(given["data.problems"])
            sampling = Sampling(top_k=0, max_new_tokens=12)
            job = SamplingJob(policy, task, problems, int(given["data.samples"]), sampling, seed)
            for path, part in job.missing_parts(folder):
                if killed:
                    folder.mkdir(parents=True)
                    raise KeyError("killed here")
                rows = job.sample(part, LocalSampler(), load_policy(policy))
                write_trajectories(path, rows, job.metadata)
        else:
            logger = "trainer.logger.init_args"
            version = Path(given[f"{logger}.save_dir"], given[f"{logger}.name"], "version_0")
            assert given["ckpt_path"] == "last" and given["data.test"] == "null"
            assert read_metadata(given["data.train"])["policy"] == policy_hash(policy)
            make_policy(version / "policy", seed=seed, scale=0.3)
            if killed:
                raise KeyError("killed here")
            (version / "summary.json").write_text("{}")


def configuration(given: dict[str, str]) -> str:
    """What train.py --print_config prints."""
    config = yaml.safe_load(CONFIG)
    for key, value in given.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    return yaml.safe_dump(config)


def arrange(folder: Path, patch) -> Train:
    """Policy and problems in the current folder, and a stand-in for train.py."""
    make_policy(folder / "base", scale=0.3)
    for name, start, stop in (("problems", 0, 5), ("test", 50, 54)):
        lines = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(start, stop)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    train = Train()
    patch.setattr(iterate, "train", train)
    patch.setattr(report, "draw", lambda *_: None)  # takes long
    patch.chdir(folder)
    return train


ARGUMENTS = ["--out=out", "--iterations", "2", "--curate=anna_karenina", "--pool=6", "--seed=7"]


def drive() -> None:
    """`iterate.main` without its handlers of signals."""
    with io.command():
        iterate.parse().run()


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


def results(folder: Path) -> list[dict]:
    return json.loads((folder / "out" / "results.json").read_text())["iterations"]


def test_every_stage_works_on_the_newest_policy(whole):
    policy = whole / "base"
    for i, row in enumerate(results(whole)):
        folder = whole / "out" / f"iteration_{i}"
        assert whole / row["policy"] == policy
        test = read_metadata(folder / "test" / "part-00000.parquet")
        assert test["policy"] == policy_hash(str(policy))
        assert test["sampling"]["seed"] == 7999  # of every test
        assert len(read_parts(folder / "test")) == 4 * 4
        if i == 2:
            assert "curation" not in row and {path.name for path in folder.iterdir()} == {"test"}
            break
        for path in (folder / "samples" / "part-00000.parquet", folder / "train.parquet"):
            metadata = read_metadata(path)
            assert metadata["policy"] == test["policy"]
            assert metadata["sampling"]["seed"] == 7000 + i
        assert metadata["iteration"] == i
        assert metadata["sampling"]["curation"] == row["curation"]
        assert row["curation"]["before"]["trajectories"] == 5 * 6
        assert (row["curation"]["budget"], row["curation"]["seed"]) == (4, 7000 + i)
        kept = read_trajectories(folder / "train.parquet")
        assert {t.group for t in kept} == {f"{i}/{problem}" for problem in range(5)}
        assert len(kept) <= 5 * 4
        policy = folder / "fit" / "version_0" / "policy"


def test_figures_against_a_computation_from_the_responses(whole):
    values = []
    markdown = (whole / "out" / "results.md").read_text()
    for i, row in enumerate(results(whole)):
        rows = read_parts(whole / "out" / f"iteration_{i}" / "test")
        values.append(np.reshape([t.reward > 0 for t in rows], (4, 4)).mean(axis=1))
        assert row["pass@1"]["mean"] == pytest.approx(values[i].mean())
        assert row["pass@1"]["interval"] == pytest.approx(bootstrap_interval(values[i], seed=7))
        assert row["invalid"]["mean"] == pytest.approx(np.mean([not t.valid for t in rows]))
        assert row["problems"] == 4 and "maj@4" in row
        assert report.cell(row["pass@1"]) in markdown
        for name, other in (("difference_to_previous", i - 1), ("difference_to_first", 0)):
            assert (name in row) == (i > 0)
            if i > 0:
                difference = values[i] - values[other]
                found = row[name]["pass@1"]
                assert found["mean"] == pytest.approx(difference.mean())
                assert found["interval"] == pytest.approx(bootstrap_interval(difference, seed=7))
                assert report.cell(found, sign="+") in markdown
    assert len({tuple(column) for column in values}) == 3  # so that a mixed-up reference would show


def test_differences_are_of_the_problems_and_metrics_that_both_have(whole):
    rows = read_parts(whole / "out" / "iteration_0" / "test")
    # four responses to one problem, two to another
    fewer = [row for row in rows if row.prompt_id in "03"][:6]
    found = iterate.compare([iterate.by_problem(rows), iterate.by_problem(fewer)], 0)
    assert found["problems"] == 2 and "maj@2" in found
    assert found["difference_to_first"] == found["difference_to_previous"]
    assert found["difference_to_first"].keys() == {"pass@1", "invalid", "length"}
    changes = []
    for problem in "03":
        before = np.mean([row.reward > 0 for row in rows if row.prompt_id == problem])
        now = np.mean([row.reward > 0 for row in fewer if row.prompt_id == problem])
        changes.append(now - before)
    assert found["difference_to_first"]["pass@1"]["mean"] == pytest.approx(np.mean(changes))


SLOW_STAGES = [pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 3, 7)]


@pytest.mark.parametrize("stage", [2, *SLOW_STAGES])
def test_killed_at_any_stage_it_ends_with_the_same_results(whole, train, run, stage):
    train.killed_at = stage
    with pytest.raises(KeyError, match="killed here"):
        run(drive, *ARGUMENTS)
    train.killed_at = None
    code, printed, error = run(drive, *ARGUMENTS)
    assert code == 0, error
    # no stage that was complete is repeated
    assert train.stages == [*STAGES[: stage + 1], "config", *STAGES[stage:]]
    for name in ("results.json", "results.md", "iterate.json", "iteration_1/train.parquet"):
        assert Path("out", name).read_bytes() == (whole / "out" / name).read_bytes(), name
    assert Path("out/results.md").read_text() in printed
    assert not list(Path("out").rglob("*.partial"))


def test_more_iterations_follow_those_that_are_there(whole, train, run):
    shutil.copytree(whole / "out", "out")
    moved = ["--trainer.devices=2", "--data.microbatch_tokens=512"]  # computes the same
    assert run(drive, *ARGUMENTS, *moved)[0] == 0 and train.stages == ["config"]
    assert run(drive, *ARGUMENTS, "--iterations=3")[0] == 0
    assert train.stages == ["config", "config", "samples", "fit", "test"]
    before = results(whole)
    now = results(Path("."))
    assert len(now) == 4 and now[:2] == before[:2] and now[2]["policy"] == before[2]["policy"]


@pytest.mark.parametrize(
    "changed",
    ["--seed=8", "--curate=uniform", "--budget=3", "--model.optimizer.init_args.lr=0.1"]
    + ["--data.test=problems.jsonl", "--model.policy=other"],
)
def test_another_command_for_the_same_folder_is_rejected(whole, train, run, changed):
    make_policy(Path("other"), seed=5)
    Path("out/iteration_0").mkdir(parents=True)
    settings = Path(shutil.copy(whole / "out" / "iterate.json", "out/iterate.json"))
    code, _, error = run(drive, *ARGUMENTS, changed)
    assert code == 2 and error.startswith("error: out holds results of other settings")
    assert train.stages == ["config"]
    assert settings.read_text() == (whole / "out" / "iterate.json").read_text()


def test_settings_are_compared_by_content(whole, train, run):
    shutil.copytree(whole / "out", "out")
    shutil.copy("test.jsonl", "copy.jsonl")
    assert run(drive, *ARGUMENTS, "--data.test=copy.jsonl")[0] == 0
    Path("test.jsonl").write_text(Path("problems.jsonl").read_text())
    assert run(drive, *ARGUMENTS)[0] == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--iterations=0"], "iterations"),
        (["--curate=best"], "best"),
        (["--curate=share"], "--share"),
        (["--data.train=x.parquet"], "--data.train=x.parquet cannot be given"),
        (["--seed_everything", "3"], "--seed_everything cannot be given"),
        (["--trainer.logger.init_args.name=x"], "cannot be given"),
        (["--model.sampler=topr.sampling.ServerSampler"], "needs --before-sampling COMMAND"),
    ],
)
def test_bad_input_is_rejected_before_anything_is_written(train, run, more, words):
    code, _, error = run(drive, *ARGUMENTS, *more)
    assert code == 2 and len(error.splitlines()) == 1 and words in error, error
    assert not Path("out").exists()


def test_arguments_of_train_keep_their_order(monkeypatch):
    given = ["--config", "a.yaml", "--seed", "3", "--config=b.yaml"]
    more = ["--before-sampling", "x -y", "--data.n", "-1"]
    monkeypatch.setattr(sys, "argv", ["iterate", *given, *more])
    found = iterate.parse()
    assert found.rest == ["--config", "a.yaml", "--config=b.yaml", "--data.n", "-1"]
    assert (found.seed, found.before_sampling, found.iterations) == (3, "x -y", 4)


def test_each_policy_is_served_once_before_it_is_sampled(train, run):
    more = ["--model.sampler=ServerSampler", "--iterations=1", "--before-sampling"]
    code, _, error = run(drive, *ARGUMENTS, *more, "exit 3")
    assert code == 2 and "--before-sampling failed" in error
    assert train.stages == ["config"]
    assert run(drive, *ARGUMENTS, *more, 'echo "$POLICY" >> served.txt')[0] == 0
    policies = [Path("base"), Path("out/iteration_0/fit/version_0/policy")]
    served = Path("served.txt").read_text().splitlines()
    assert served == [str(policy.absolute()) for policy in policies]


STAND_IN = """
import os, signal, sys, time
from pathlib import Path
def end(*_):
    time.sleep(0.3)
    Path("saved").touch()
    sys.exit(143)
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, end)
    Path("begun").write_text(str(os.getpid()))
    time.sleep(60)
print(*sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """In place of train.py, a script that ends with a code or waits for a signal."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(iterate, "TRAIN", str(tmp_path / "stand_in.py"))


def test_exit_codes_of_stages(stand_in):
    assert iterate.train("0", "-x", "--y=1", capture=True) == "0 -x --y=1\n"
    for code, own in ((2, 2), (143, 143), (1, 1), (7, 1)):
        with pytest.raises(SystemExit) as end:
            iterate.train(str(code))
        assert end.value.code == own


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_ends_with_its_driver(stand_in, tmp_path, monkeypatch, number):
    monkeypatch.setattr(sys, "argv", ["iterate"])
    monkeypatch.setattr(iterate.Driver, "load_config", lambda _: iterate.train("wait"))
    driver = os.fork()
    if driver == 0:
        code = 1
        try:
            iterate.main()
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    begun = tmp_path / "begun"
    while not begun.exists() or not begun.read_text():
        time.sleep(0.01)
    os.kill(driver, number)
    code = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    assert code == (143 if number == signal.SIGTERM else -number)
    assert (tmp_path / "saved").exists() == (number == signal.SIGTERM)  # the stage was waited for
    for _ in range(100):
        if not is_alive(int(begun.read_text())):
            return
        time.sleep(0.02)
    raise AssertionError("the stage outlived its driver")


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_the_command_itself_obeys_sigterm_and_resumes(tmp_path):
    """The one test whose stages are processes of train.py."""
    with pytest.MonkeyPatch.context() as patch:
        arrange(tmp_path, patch)
    arguments = [f"--config={ROOT / 'configs' / 'arithmetic.yaml'}", "--model.policy=base"]
    arguments += ["--model.task=test_iterate.Parity", "--data.problems=problems.jsonl"]
    arguments += ["--data.test=test.jsonl", "--data.val=test.jsonl", "--data.samples=4"]
    arguments += ["--data.sampling.max_new_tokens=12", "--data.batch_size=4"]
    arguments += ["--trainer.enable_progress_bar=false", "--out=out", "--iterations=1"]
    command = [sys.executable, "-m", "topr.iterate", *arguments]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log.txt"
    config = tmp_path / "out" / "iteration_0" / "fit" / "version_0" / "config.yaml"
    with log.open("w") as file:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
        while first.poll() is None and not config.exists():
            time.sleep(0.01)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143, log.read_text()[-3000:]
        second = subprocess.run(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
        assert second.returncode == 0, log.read_text()[-3000:]
    rows = results(tmp_path)
    assert len(rows) == 2 and rows[1]["policy"] == "out/iteration_0/fit/version_0/policy"
    assert (tmp_path / "out" / "results.png").exists()
