"""The iterations: what lies where, what a kill at any stage changes, and which commands are rejected."""

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

from topr import iterate
from topr.evaluation import SamplingJob, pipeline, report
from topr.evaluation.metrics import bootstrap_interval
from topr.evaluation.pipeline import read_parts
from topr.policy import load_policy, policy_fingerprint
from topr.sampling import LocalSampler, Sampling
from topr.tasks import Grade, Task
from topr.trajectories import read_metadata, read_trajectories

STAGES = ["config", "test", "samples", "fit", "test", "samples", "fit", "test"]  # of two iterations
UPDATES = 3  # of each fit
CONFIG = {
    "model.policy": "base", "model.task": {"class_path": "test_iterate.Parity"}, "model.sampler": None,
    "model.optimizer.init_args.lr": 0.01, "data.test": "test.jsonl", "data.problems": "problems.jsonl",
    "data.samples": 4, "data.microbatch_tokens": 4096, "trainer.devices": 1, "trainer.fast_dev_run": False,
    "trainer.logger.class_path": "TensorBoardLogger", "trainer.logger.init_args.name": "x",
    "trainer.logger.init_args.save_dir": "runs",
}  # fmt: skip


class Parity(Task):
    """What a random policy gets right now and then: a response of an even number of characters."""

    def grade(self, response, gold):
        length = len(response)
        return Grade(
            1.0 if length % 2 == 0 else -1.0, length > 3, str(length % 4) if length > 3 else None
        )


class Train:
    """In place of `iterate.train`: samples as train.py predict does; its fit exports another random policy."""

    def __init__(self):
        self.stages: list[str] = []
        self.killed_at, self.half_done = (
            None,
            False,
        )  # number of a stage, and whether it has written something by then

    def __call__(self, stage, rest, given, read=False):
        folder = Path(given.get("data.out", "config" if read else "fit"))
        self.stages.append(folder.name.removesuffix(".partial"))
        killed = len(self.stages) - 1 == self.killed_at
        if killed and not self.half_done:
            raise KeyError("killed here")
        if read:
            return configuration(rest)
        if stage == "predict":
            policy, task, seed = given["model.policy"], Parity(), given["seed_everything"]
            samples, problems = given["data.samples"], task.problems(given["data.problems"])
            job = SamplingJob(
                policy, task, problems, samples, Sampling(top_k=0, max_new_tokens=12), seed
            )
            for path, part in job.missing_parts(folder)[: 1 if killed else None]:
                job.sample_part(path, part, LocalSampler(), load_policy(policy))
        else:
            logger = iterate.LOGGER
            version = Path(given[f"{logger}.save_dir"], given[f"{logger}.name"], "version_0")
            assert given["ckpt_path"] == "last" and given["data.test"] == "null"
            assert read_metadata(given["data.train"])["policy"] == policy_fingerprint(
                given["model.policy"]
            )
            make_policy(version / "policy", seed=given["seed_everything"], scale=0.3)
            if not killed:
                (version / "summary.json").write_text(json.dumps({"steps": UPDATES}))
        if killed:
            raise KeyError("killed here")


def configuration(rest: list[str]) -> str:
    """What train.py --print_config prints."""
    config: dict = {}
    for key, value in (CONFIG | dict(argument[2:].split("=", 1) for argument in rest)).items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value) if isinstance(value, str) else value
    return yaml.safe_dump(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        arrange(folder, patch)
        patch.setattr(sys, "argv", command())
        iterate.main()
    return folder


def arrange(folder: Path, patch) -> Train:
    """Policy and problems in the current folder, a stand-in for train.py; no figures are drawn, which takes long."""
    make_policy(folder / "base", scale=0.3)
    for name, count, first in (("problems", 5, 0), ("test", 4, 50)):
        lines = [
            f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    train = Train()
    for where, name, value in (
        (iterate, "train", train),
        (pipeline, "PART", 2),
        (report, "draw", lambda *_: None),
    ):
        patch.setattr(where, name, value)
    patch.chdir(folder)
    patch.setattr(signal, "signal", lambda *_: None)
    return train


def command(*more: str) -> list[str]:
    return [
        "iterate",
        "--out=out",
        "--iterations",
        "2",
        "--curate=anna_karenina",
        "--pool=6",
        "--seed=7",
        *more,
    ]


@pytest.fixture
def train(tmp_path, monkeypatch):
    return arrange(tmp_path, monkeypatch)


def results(folder: Path) -> list[dict]:
    return json.loads((folder / "out" / "results.json").read_text())["iterations"]


def test_results_of_a_loss_overlay_are_named_after_both(train, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["iterate", "--iterations=1", "--config=configs/loss/reinforce.yaml"]
    )
    iterate.main()
    assert [path.name for path in Path("runs").iterdir()] == ["x-reinforce-iterated"]


def test_every_stage_works_on_the_newest_policy(whole):
    policy = whole / "base"
    for i, row in enumerate(results(whole)):
        folder = whole / "out" / f"iteration_{i}"
        assert whole / row["policy"] == policy and (row["iteration"], row["updates"]) == (
            i,
            UPDATES * i,
        )
        test = read_metadata(folder / "test" / "part-00000.parquet")
        assert test["policy"] == policy_fingerprint(str(policy))
        assert (test["sampling"]["seed"], test["sampling"]["samples"]) == (
            7999,
            4,
        )  # the seed of every test
        assert len(read_parts(folder / "test")) == 4 * 4
        if i == 2:
            assert row["curation"] is None and {path.name for path in folder.iterdir()} == {"test"}
            break
        for path in (folder / "samples" / "part-00000.parquet", folder / "train.parquet"):
            about = read_metadata(path)
            assert about["policy"] == test["policy"] and about["sampling"]["seed"] == 7000 + i
        assert about["iteration"] == i and about["sampling"]["curation"] == row["curation"]
        assert row["curation"]["before"]["trajectories"] == 5 * 6 and row["curation"]["budget"] == 4
        assert row["curation"]["seed"] == 7000 + i
        kept = read_trajectories(folder / "train.parquet")
        assert {t.group for t in kept} == {f"{i}/{problem}" for problem in range(5)} and len(
            kept
        ) <= 5 * 4
        policy = folder / "fit" / "version_0" / "policy"
    assert {path.name for path in (whole / "out").iterdir()} == {
        ".lock", "iterate.json", "results.json", "results.md", *(f"iteration_{i}" for i in range(3)),
    }  # fmt: skip


def test_figures_against_a_computation_from_the_responses(whole):
    values = []
    for i, row in enumerate(results(whole)):
        rows = read_parts(whole / "out" / f"iteration_{i}" / "test")
        scores = {
            problem: [t.reward > 0 for t in rows if t.prompt_id == problem]
            for problem in map(str, range(4))
        }
        values.append(np.array([np.mean(scores[problem]) for problem in scores]))
        assert row["pass@1"]["mean"] == pytest.approx(values[i].mean())
        assert row["pass@1"]["interval"] == pytest.approx(bootstrap_interval(values[i], seed=7))
        assert row["invalid"]["mean"] == pytest.approx(np.mean([not t.valid for t in rows]))
        assert (row["problems"], row["samples"]) == (4, 4) and "maj@4" in row
        for name, other in (("difference_to_previous", i - 1), ("difference_to_first", 0)):
            assert (name in row) == (i > 0)
            if i:
                difference = values[i] - values[other]
                assert row[name]["pass@1"]["mean"] == pytest.approx(difference.mean())
                assert row[name]["pass@1"]["interval"] == pytest.approx(
                    bootstrap_interval(difference, seed=7)
                )
    assert len({tuple(column) for column in values}) == 3  # so that a mixed-up reference would show


def test_differences_are_of_the_problems_and_metrics_that_both_have(whole):
    rows = read_parts(whole / "out" / "iteration_0" / "test")
    two = [row for row in rows if row.prompt_id in "03"][
        :6
    ]  # four responses to one problem, two to the other
    found = iterate.compare([rows, two], 0)
    assert (
        found["problems"] == 2
        and "maj@2" in found
        and found["difference_to_first"] == found["difference_to_previous"]
    )
    before = {
        problem: np.mean([row.reward > 0 for row in rows if row.prompt_id == problem])
        for problem in "03"
    }
    now = {
        problem: np.mean([row.reward > 0 for row in two if row.prompt_id == problem])
        for problem in "03"
    }
    expected = np.mean([now[problem] - before[problem] for problem in "03"])
    assert found["difference_to_first"]["pass@1"]["mean"] == pytest.approx(expected)
    assert found["difference_to_first"].keys() == {"pass@1", "invalid", "length"}


def test_the_report_holds_figures_and_differences(whole):
    rows, markdown = results(whole), (whole / "out" / "results.md").read_text()
    change = rows[2]["difference_to_first"]["pass@1"]
    assert report.cell(rows[1]["pass@1"]) in markdown and report.cell(change, sign="+") in markdown
    assert "Difference to previous, paired by problem" in markdown


KILLS = [(2, False), *(pytest.param(stage, True, marks=pytest.mark.slow) for stage in (1, 3, 7))]


@pytest.mark.parametrize(("stage", "half_done"), KILLS)
def test_killed_at_any_stage_it_ends_with_the_same_results(whole, train, run, stage, half_done):
    train.killed_at, train.half_done = stage, half_done
    with pytest.raises(KeyError, match="killed here"):
        run(iterate.main, *command()[1:])
    out = Path("out")
    assert STAGES[stage] == "fit" or not (out / f"iteration_{stage // 3}" / STAGES[stage]).exists()
    train.killed_at = None
    code, printed, error = run(iterate.main, *command()[1:])
    assert code == 0, error
    assert train.stages == STAGES[: stage + 1] + [
        "config",
        *STAGES[stage:],
    ]  # and none that was complete again
    for name in ("results.json", "results.md", "iterate.json", "iteration_1/train.parquet"):
        assert (out / name).read_bytes() == (whole / "out" / name).read_bytes(), name
    assert (out / "results.md").read_text() in printed
    files = [
        sorted(str(p.relative_to(of)) for p in of.rglob("*.parquet")) for of in (out, whole / "out")
    ]
    assert files[0] == files[1] and not list(out.rglob("*.partial"))


@pytest.mark.slow
def test_more_iterations_follow_those_that_are_there(whole, train, run):
    shutil.copytree(whole / "out", "out")
    Path("out/results.json").unlink()
    moved = [
        "--trainer.devices=2",
        "--data.microbatch_tokens=512",
    ]  # where it runs, not what it computes
    assert run(iterate.main, *command(*moved)[1:])[0] == 0 and train.stages == ["config"]
    assert results(Path(".")) == results(whole)
    assert run(iterate.main, *command("--iterations=3")[1:])[0] == 0
    assert train.stages == ["config", "config", "samples", "fit", "test"]
    assert [row["policy"] for row in results(Path("."))[:3]] == [
        row["policy"] for row in results(whole)
    ]
    assert len(results(Path("."))) == 4
    code, _, error = run(iterate.main, *command()[1:])
    assert code == 2 and "with --iterations = 3, now it is 2" in error


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("--seed=8", "with --seed = 7, now it is 8"),
        ("--pool=7", "with --pool = 6, now it is 7"),
        ("--curate=uniform", "with --curate = 'anna_karenina', now it is 'uniform'"),
        ("--budget=3", "with --budget = 4, now it is 3"),
        ("--data.sampling.top_p=0.5", "with data.sampling.top_p = None, now it is 0.5"),
        (
            "--model.optimizer.init_args.lr=0.1",
            "with model.optimizer.init_args.lr = 0.01, now it is 0.1",
        ),
    ],
)
def test_another_command_for_the_same_folder_is_rejected(whole, train, run, changed, words):
    Path("out/iteration_0").mkdir(parents=True)
    before = shutil.copy(whole / "out" / "iterate.json", "out/iterate.json")
    code, _, error = run(iterate.main, *command(changed)[1:])
    assert code == 2 and error.startswith("error: out holds results with") and words in error
    assert (
        train.stages == ["config"]
        and Path(before).read_text() == (whole / "out" / "iterate.json").read_text()
    )


def test_a_command_that_made_no_result_may_be_corrected(train, run):
    for train.killed_at, policy in ((1, "nowhere"), (3, "base")):
        with pytest.raises(KeyError, match="killed here"):
            run(iterate.main, *command(f"--model.policy={policy}")[1:])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--iterations=0"], "iterations"),
        (["--seed=-1"], "seed"),
        (["--share=0.1"], "anna_karenina takes --budget"),
        (["--curate=best"], "best"),
        (["--curate=share"], "--share"),
        (["--data.train=x.parquet"], "--data.train is set anew for each iteration"),
        (["--seed_everything", "3"], "--seed_everything is set anew"),
        (["--trainer.logger.init_args.name=x"], "--trainer.logger.init_args.name is set anew"),
        (["--data.test=null"], "data.test or data.problems is not set"),
        (["--data.problems=null"], "data.test or data.problems is not set"),
        (["--trainer.fast_dev_run=true"], "no trainer.fast_dev_run"),
        (["--model.sampler=topr.sampling.ServerSampler"], "puts the one in $POLICY on the server"),
    ],
)
def test_bad_input_is_rejected_before_anything_is_written(train, run, more, words):
    code, _, error = run(iterate.main, *command(*more)[1:])
    assert code == 2 and len(error.splitlines()) == 1 and words in error, error
    assert not Path("out").exists()


def test_the_driver_is_no_rank(train, run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, error = run(iterate.main, *command()[1:])
    assert code == 2 and "start topr.iterate once" in error and not train.stages


def test_arguments_of_train_keep_their_order(monkeypatch):
    given = [
        "--config",
        "a.yaml",
        "--seed",
        "3",
        "--config=b.yaml",
        "--before-sampling",
        "x -y",
        "--data.n",
        "-1",
    ]
    monkeypatch.setattr(sys, "argv", ["iterate", *given])
    found = iterate.parse()
    assert found["rest"] == ["--config", "a.yaml", "--config=b.yaml", "--data.n", "-1"]
    assert (found["seed"], found["before_sampling"], found["iterations"]) == (3, "x -y", 4)


def test_each_policy_is_served_before_it_is_sampled(train, run):
    served = Path("served.txt")
    more = (
        "--model.sampler=ServerSampler",
        "--before-sampling",
        f'echo "$POLICY" >> {served}',
        "--iterations=1",
    )
    assert run(iterate.main, *command(*more)[1:])[0] == 0
    policies = [Path("base").absolute(), Path("out/iteration_0/fit/version_0/policy").absolute()]
    assert served.read_text().splitlines() == [
        str(policy) for policy in policies
    ]  # once for test and samples
    code, _, error = run(iterate.main, *command("--out=other", "--before-sampling=exit 3")[1:])
    assert code == 2 and "--before-sampling ended with code 3" in error


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


def test_exit_codes_of_stages(stand_in, capfd):
    assert iterate.train("0", ["-x"], {"y": 1}, read=True) == "0 -x --y=1\n"
    for code, own, words in (
        (2, 2, ""),
        (143, 143, ""),
        (1, 1, "ended with code 1"),
        (7, 1, "ended with code 7"),
    ):
        with pytest.raises(SystemExit) as end:
            iterate.train(str(code), [], {})
        lines = capfd.readouterr().err.splitlines()
        assert end.value.code == own and len(lines) == bool(words) and words in "".join(lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stage_ends_with_its_driver(stand_in, tmp_path, monkeypatch, number):
    if not (driver := os.fork()):
        monkeypatch.setattr(iterate, "parse", dict)
        monkeypatch.setattr(iterate, "iterate", lambda: iterate.train("wait", [], {}))
        code = 1
        try:
            iterate.main()
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    while not (tmp_path / "begun").exists() or not (child := (tmp_path / "begun").read_text()):
        time.sleep(0.01)
    os.kill(driver, number)
    code = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    assert code == (-number if number == signal.SIGKILL else 143)
    assert (tmp_path / "saved").exists() == (number != signal.SIGKILL)  # it was waited for
    for _ in range(100):
        if not is_alive(int(child)):
            return
        time.sleep(0.02)
    raise AssertionError("the stage outlived its driver")


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_the_command_itself_obeys_sigterm_and_resumes(tmp_path, monkeypatch):
    """The one test whose stages are processes of train.py."""
    with pytest.MonkeyPatch.context() as patch:
        arrange(tmp_path, patch)
    out = tmp_path / "out"
    arguments = [
        f"--config={ROOT / 'configs' / 'arithmetic.yaml'}", "--model.policy=base", "--model.task=test_iterate.Parity",
        "--data.problems=problems.jsonl", "--data.test=test.jsonl", "--data.val=test.jsonl", "--data.samples=4",
        "--data.sampling.max_new_tokens=12", "--data.batch_size=4", "--trainer.enable_progress_bar=false",
        "--out=out", "--iterations=1",
    ]  # fmt: skip
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))

    def start(log) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "topr.iterate", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
        )

    log = tmp_path / "log.txt"
    with log.open("w") as file:
        first = start(file)
        while (
            first.poll() is None
            and not (out / "iteration_0" / "fit" / "version_0" / "config.yaml").exists()
        ):
            time.sleep(0.01)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143, log.read_text()[-3000:]
        assert start(file).wait(200) == 0, log.read_text()[-3000:]
    assert "deprecated" not in log.read_text()
    rows = results(tmp_path)
    assert [row["iteration"] for row in rows] == [0, 1] and rows[1]["updates"] == 5
    assert (
        rows[1]["policy"] == "out/iteration_0/fit/version_0/policy"
        and (out / "results.png").exists()
    )
