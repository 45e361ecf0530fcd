"""The iterations: what lies where, what a kill at any moment changes (nothing), and what is refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, make_policy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torture import curves

import train
from topr import iterate
from topr.io import InputError
from topr.metrics import bootstrap_interval
from topr.policy_files import policy_fingerprint
from topr.progress import logged, summary
from topr.tasks import Grade, Task
from topr.trajectories import read_metadata, read_trajectories

SEEDS = 7
STAGES = ["fit", "predict", "predict", "fit", "predict", "predict", "fit", "predict"]  # the first tells the config


class Parity(Task):
    """What a random policy gets right now and then: a response of an even number of characters."""

    def grade(self, response, gold):
        length = len(response)
        return Grade(1.0 if length % 2 == 0 else -1.0, length > 3, str(length % 4) if length > 3 else None)


def arguments(*more) -> list[str]:
    return [
        f"--config={ROOT / 'configs' / 'arithmetic.yaml'}", "--model.policy=base", "--model.task=test_iterate.Parity",
        "--data.problems=problems.jsonl", "--data.test=test.jsonl", "--data.val=test.jsonl", "--data.samples=4",
        "--data.sampling.max_new_tokens=12", "--data.batch_size=16", "--model.optimizer.init_args.lr=0.01",
        "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.callbacks.init_args.every_n_train_steps=2", "--trainer.enable_progress_bar=false", "--out=out",
        "--iterations=2", "--curate=anna_karenina", "--pool=6", f"--seed={SEEDS}", *more,
    ]  # fmt: skip


class Driver:
    """`python -m topr.iterate` in a process of a folder, whose stages are forked: it can be killed, and starts fast."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "log.txt"
        make_policy(folder / "base", scale=0.3)
        for name, count, first in (("problems", 8, 0), ("test", 5, 50)):
            lines = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(first, first + count)]
            (folder / f"{name}.jsonl").write_text("".join(lines))

    def stages(self) -> list[str]:
        path = self.folder / "stages.txt"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, *given: str) -> int:
        self.folder.joinpath("stages.txt").unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            os.chdir(self.folder)
            with self.log.open("w") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            iterate.train = stage
            as_command(iterate.main, *given)
        return pid

    def run(self, *given: str, kill: tuple[int, float] | None = None) -> int:
        """The exit code; or kill driver and stage, some seconds after a number of stages has begun."""
        pid = self.start(*given)
        due = None
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if kill and due is None and len(self.stages()) > kill[0]:
                due = time.monotonic() + kill[1]
            if due and time.monotonic() > due:
                os.killpg(pid, signal.SIGKILL)
                ended = os.waitpid(pid, 0)
                break
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(ended[1])


def as_command(main, *given: str) -> None:
    """End this forked process as a command does."""
    code = 1
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # not those of pytest
    try:
        sys.argv = ["command", *given]
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def stage(*given: str, read: bool = False) -> str | None:
    """`topr.iterate.train`, forked."""
    with Path("stages.txt").open("a") as file:
        file.write(f"{given[0]}\n")
    told = Path("told.txt")
    sys.stdout.flush()
    if not (pid := os.fork()):
        if read:
            with told.open("w") as file:
                os.dup2(file.fileno(), 1)
        as_command(train.main, *given)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise SystemExit(code)
    return told.read_text() if read else None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    driver = Driver(tmp_path_factory.mktemp("whole"))
    assert driver.run(*arguments()) == 0, driver.log.read_text()[-3000:]
    return driver


def results(driver: Driver) -> list[dict]:
    return json.loads((driver.folder / "out" / "results.json").read_text())["iterations"]


def test_every_stage_works_on_the_newest_policy(whole):
    assert whole.stages() == STAGES
    policies, updates = [whole.folder / "base"], 0
    for i, row in enumerate(results(whole)):
        folder = whole.folder / "out" / f"iteration_{i}"
        assert whole.folder / row["policy"] == policies[-1] and row["iteration"] == i and row["updates"] == updates
        test = read_metadata(folder / "test" / "part-00000.parquet")
        assert test["policy"] == policy_fingerprint(str(policies[-1])) and test["sampling"]["seed"] == 7999
        assert len(read_trajectories(folder / "test" / "part-00000.parquet")) == 5 * 4
        if i == 2:
            assert row["curation"] is None and {path.name for path in folder.iterdir()} == {"test", "test.json"}
            continue
        for name in ("samples/part-00000.parquet", "train.parquet"):
            about = read_metadata(folder / name)
            assert about["policy"] == test["policy"] and about["sampling"]["seed"] == 7000 + i
        assert about["iteration"] == i and about["sampling"]["curation"] == row["curation"]
        assert row["curation"]["before"]["trajectories"] == 8 * 6 and row["curation"]["budget"] == 4
        kept = read_trajectories(folder / "train.parquet")
        assert {t.group for t in kept} == {f"{i}/{problem}" for problem in range(8)}
        assert all(sum(t.reward > 0 for t in kept if t.group == group) <= 1 for group in {t.group for t in kept})
        summary_, config = (
            (folder / "fit" / "version_0" / name).read_text() for name in ("summary.json", "config.yaml")
        )
        assert f"seed_everything: {7000 + i}" in config and "test: null" in config
        assert json.loads(summary_)["trajectories"] == len(kept) == row["curation"]["after"]["trajectories"]
        updates += json.loads(summary_)["steps"]
        policies.append(folder / "fit" / "version_0" / "policy")
    assert len({policy_fingerprint(str(policy)) for policy in policies}) == 3


def test_figures_against_a_computation_from_the_responses(whole):
    values = []
    for i, row in enumerate(results(whole)):
        rows = read_trajectories(whole.folder / "out" / f"iteration_{i}" / "test" / "part-00000.parquet")
        scores = {problem: [t.reward > 0 for t in rows if t.prompt_id == problem] for problem in map(str, range(5))}
        values.append(np.array([np.mean(scores[problem]) for problem in scores]))
        assert row["pass@1"]["mean"] == pytest.approx(values[i].mean())
        assert row["pass@1"]["interval"] == pytest.approx(bootstrap_interval(values[i], seed=SEEDS))
        assert row["invalid"]["mean"] == pytest.approx(np.mean([not t.valid for t in rows]))
        assert (row["problems"], row["samples"]) == (5, 4) and "maj@4" in row
        for name, other in (("difference_to_previous", i - 1), ("difference_to_first", 0)):
            if i:
                difference = row[name]["pass@1"]
                assert difference["mean"] == pytest.approx((values[i] - values[other]).mean())
                assert difference["interval"] == pytest.approx(
                    bootstrap_interval(values[i] - values[other], seed=SEEDS)
                )
            else:
                assert name not in row


def test_differences_are_of_the_problems_that_both_have():
    one = {"problems": ["a", "b", "c"], "samples": 2, "values": {"pass@1": [0.5, 1.0, 0.0], "maj@2": [1.0, 1.0, 0.0]}}
    other = {"problems": ["c", "a"], "samples": 1, "values": {"pass@1": [1.0, 0.0], "maj@1": [1.0, 0.0]}}
    found = summary([one, other], 0)["difference_to_first"]
    assert found.keys() == {"pass@1"} and found["pass@1"]["mean"] == pytest.approx((1.0 - 0.0 + 0.0 - 0.5) / 2)


def test_the_table_is_printed_and_the_figure_drawn(whole):
    out, last = whole.folder / "out", results(whole)[2]
    table = (out / "results.md").read_text()
    assert table in whole.log.read_text() and len(table.split("\n\n")[0].splitlines()) == 5
    mean, (low, high) = last["pass@1"]["mean"], last["pass@1"]["interval"]
    assert f"| 2 | {last['updates']} | {100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}] |" in table
    change = last["difference_to_first"]["pass@1"]
    assert f"{100 * change['mean']:+.1f} [{100 * change['interval'][0]:.1f}" in table
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob(".*"))


def test_one_tensorboard_run_goes_on_over_all_iterations(whole):
    out, rows = whole.folder / "out", results(whole)
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    tags = events.Reload().Tags()
    fits = [out / f"iteration_{i}" / "fit" / "version_0" for i in (0, 1)]
    for tag, first in curves(fits[0]).items():
        there = [(event.step, event.value) for event in events.Scalars(tag)]
        assert there == first + [(rows[1]["updates"] + step, value) for step, value in curves(fits[1])[tag]]
    steps = [event.step for event in events.Scalars("gradient/norm")]
    assert steps == list(range(rows[2]["updates"]))
    for name in ("pass@1", "maj@4", "invalid"):
        there = [(event.step, event.value) for event in events.Scalars(f"test/{name}")]
        assert there == [(row["updates"], pytest.approx(row[name]["mean"])) for row in rows]
        low = [event.value for event in events.Scalars(f"test_interval/{name}_low")]
        assert low == pytest.approx([row[name]["interval"][0] for row in rows])
    assert {event.step for event in events.Histograms("log_ratio/negatives")} >= {0, rows[1]["updates"]}
    texts = [event.step for event in events.Tensors("val/samples/text_summary")]
    assert texts[0] == 0 and texts[-1] == rows[2]["updates"] and "val/samples/text_summary" in tags["tensors"]


def test_what_a_resumed_fit_logged_twice_counts_once(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for step, purge in ((0, None), (3, 3), (2, 2)):
        with SummaryWriter(str(tmp_path), purge_step=purge, filename_suffix=".new") as writer:
            for later in range(step, 5):
                writer.add_scalar("x", 10 * step + later, later)
        (path,) = tmp_path.glob("*.new")
        path.rename(tmp_path / f"events.out.tfevents.{len(list(tmp_path.iterdir()))}")  # as if at different seconds
    assert [(e.step, e.summary.value[0].simple_value) for e in logged(tmp_path)] == [
        (0, 0), (1, 1), (2, 22), (3, 23), (4, 24),
    ]  # fmt: skip


def test_killed_three_times_it_ends_with_the_same_results(whole, tmp_path, seed=0):
    chance, driver = random.Random(seed), Driver(tmp_path)
    behind = 0  # stages that earlier commands have done
    for at in sorted(chance.sample(range(1, len(STAGES)), 3)):
        code = driver.run(*arguments(), kill=(at - behind, chance.uniform(0, 0.7)))
        assert code == -signal.SIGKILL or behind, driver.log.read_text()[-3000:]
        behind = at - 1
    assert driver.run(*arguments()) == 0, driver.log.read_text()[-3000:]
    out, other = driver.folder / "out", whole.folder / "out"
    for name in ("results.json", "results.md", "iteration_0/test.json", "iteration_1/train.parquet"):
        assert (out / name).read_bytes() == (other / name).read_bytes(), name
    assert curves(out / "tensorboard") == curves(other / "tensorboard")
    names = [
        sorted(str(p.relative_to(of)) for p in of.rglob("*") if ".tfevents.1" not in p.name) for of in (out, other)
    ]
    assert names[0] == names[1]


def test_what_is_done_is_not_done_again_and_more_iterations_follow(whole, tmp_path):
    driver = Driver(tmp_path)
    shutil.copytree(whole.folder / "out", tmp_path / "out")
    (tmp_path / "out" / "results.json").unlink()
    assert driver.run(*arguments("--trainer.devices=1", "--data.microbatch_tokens=4096")) == 0  # not what it computes
    assert driver.stages() == ["fit"]
    assert (tmp_path / "out" / "results.json").read_text() == (whole.folder / "out" / "results.json").read_text()
    assert driver.run(*arguments("--iterations=3")) == 0
    assert driver.stages() == ["fit", "predict", "fit", "predict"]
    assert results(driver)[:2] == results(whole)[:2] and len(results(driver)) == 4
    assert driver.run(*arguments()) == 2 and "with --iterations = 3, now it is 2" in driver.log.read_text()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("--seed=8", "with --seed = 7, now it is 8"),
        ("--pool=7", "with --pool = 6, now it is 7"),
        ("--curate=uniform", "with --curate = 'anna_karenina', now it is 'uniform'"),
        ("--model.optimizer.init_args.lr=0.1", "with model.optimizer.init_args.lr = 0.01, now it is 0.1"),
        ("--model.loss=topr.losses.REINFORCE", "with model.loss.class_path = 'topr.losses.TOPR'"),
        ("--data.sampling.top_k=5", "with data.sampling.top_k = 0, now it is 5"),
    ],
)
def test_another_command_for_the_same_folder_is_refused(whole, changed, words):
    before = (whole.folder / "out" / "iterate.json").read_text()
    assert whole.run(*arguments(changed)) == 2
    (line,) = whole.log.read_text().splitlines()
    assert line.startswith("error: out was begun ") and words in line and "another --out" in line
    assert whole.stages() == ["fit"] and (whole.folder / "out" / "iterate.json").read_text() == before


SERVER = ["--model.sampler=topr.sampling.ServerSampler", "--model.sampler.init_args.url=http://127.0.0.1:1/v1"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--iterations=0"], "--iterations is 0"),
        (["--iterations=1000"], "--iterations is 1000"),
        (["--seed=-1"], "--seed is -1"),
        (["--pool=0"], "--pool is 0"),
        (["--budget=7"], "--budget 7 is more than the 6 responses"),
        (["--share=0.1"], "anna_karenina takes --budget, and no --share"),
        (["--curate=best"], "choose from"),
        (["--data.train=x.parquet"], "--data.train is set anew for each iteration"),
        (["--seed_everything", "3"], "--seed_everything is set anew"),
        (["--trainer.logger.init_args.name=x"], "--trainer.logger.init_args.name is set anew"),
        (["--data.test=null"], "data.test is not set"),
        (["--data.problems=absent.jsonl"], "data.problems: absent.jsonl"),
        (["--data.tset=x"], "data.tset"),
        (["--trainer.fast_dev_run=true"], "no trainer.fast_dev_run"),
        (SERVER, "puts the one in $POLICY on the server"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(whole, more, words):
    code = whole.run(*arguments("--out=other", *more))
    errors = [line for line in whole.log.read_text().splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and words in errors[0], whole.log.read_text()[-2000:]
    assert not (whole.folder / "other").exists()


def test_the_driver_is_no_rank(whole, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert whole.run(*arguments()) == 2 and "start topr.iterate once" in whole.log.read_text()


def test_a_stage_that_refuses_its_input_speaks_for_all(tmp_path):
    driver = Driver(tmp_path)
    assert driver.run(*arguments("--model.policy=nowhere")) == 2
    told = [line for line in driver.log.read_text().splitlines() if "error" in line]
    assert len(told) == 1 and "'nowhere' is neither a folder nor a model" in told[0]
    assert driver.run(*arguments("--model.policy=elsewhere")) == 2  # nothing was made, so the command may be mended
    assert "'elsewhere' is neither" in driver.log.read_text()
    (tmp_path / "out" / "iterate.json").write_text("[1")
    assert driver.run(*arguments()) == 2 and "does not say what was begun there" in driver.log.read_text()


def test_each_policy_is_served_before_it_is_sampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    calls = []
    monkeypatch.setattr(iterate, "train", lambda *given: calls.append((given[0], Path("served").read_text())))
    iterations = object.__new__(iterate.Iterations)
    args = iterate.argparse.Namespace(before_sampling='printf "$POLICY" >> served')
    iterations.args, iterations.rest, iterations.served = args, [], None
    for policy in ("policy", "policy", "owner/name", "policy"):
        iterations.sample(policy, 0, "problems.jsonl", 1, tmp_path)
    folder = str(tmp_path / "policy")
    served = [folder, folder, f"{folder}owner/name", f"{folder}owner/name{folder}"]  # twice in a row: once
    assert calls == [("predict", text) for text in served]
    args.before_sampling, iterations.served = "exit 3", None
    with pytest.raises(InputError, match="--before-sampling ended with code 3"):
        iterations.sample("policy", 0, "problems.jsonl", 1, tmp_path)


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
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """In place of train.py, a script that ends with a code or waits for a signal."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(iterate, "TRAIN", tmp_path / "stand_in.py")


def test_exit_codes_of_stages(stand_in, capfd):
    assert iterate.train("0") is None and iterate.train("0", read=True) == ""
    for code, own, told in ((2, 2, ""), (143, 143, ""), (1, 1, "ended with code 1"), (7, 1, "ended with code 7")):
        with pytest.raises(SystemExit) as end:
            iterate.train(str(code))
        lines = capfd.readouterr().err.splitlines()
        assert end.value.code == own and len(lines) == bool(told) and told in "".join(lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stage_ends_with_its_driver(stand_in, tmp_path, monkeypatch, number):
    if not (driver := os.fork()):
        monkeypatch.setattr(iterate, "parse", lambda: ())
        monkeypatch.setattr(iterate, "run", lambda: iterate.train("wait"))
        as_command(iterate.main)
    while not (tmp_path / "begun").exists() or not (child := (tmp_path / "begun").read_text()):
        time.sleep(0.01)
    os.kill(driver, number)
    code = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    assert code == (-number if number == signal.SIGKILL else 143)
    assert (tmp_path / "saved").exists() == (number != signal.SIGKILL)  # it was waited for
    for _ in range(100):
        if not _alive(int(child)):
            return
        time.sleep(0.02)
    raise AssertionError("the stage outlived its driver")


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return False


def test_the_command_itself_obeys_sigterm_and_goes_on(tmp_path, whole):
    """The one test whose stages are processes of train.py; those before the first fit are done."""
    driver, out = Driver(tmp_path), tmp_path / "out"
    for name in ("iterate.json", "iteration_0/test.json", "iteration_0/train.parquet"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole.folder / "out" / name, out / name)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    begun = out / "iteration_0" / "fit" / "version_0" / "config.yaml"
    with driver.log.open("w") as told:
        command = subprocess.Popen(
            [sys.executable, "-m", "topr.iterate", *arguments()],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stdout=told, stderr=told,
        )  # fmt: skip
        while command.poll() is None and not begun.exists():
            time.sleep(0.01)
        command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 143 and begun.exists(), driver.log.read_text()[-3000:]
    assert "deprecated" not in driver.log.read_text()
    assert driver.run(*arguments()) == 0, driver.log.read_text()[-3000:]
    assert results(driver) == results(whole)
