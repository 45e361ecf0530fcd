"""What the commands show of their progress: a bar on a terminal, lines elsewhere, and the next commands."""

import io
import os
import re
import shlex
import subprocess
import sys
import termios
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_policy
from lightning import Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

import evaluate
import train
from topr import callbacks, distributed, losses
from topr.datamodule import TrajectoryDataModule
from topr.distributed import Progress
from topr.module import PolicyModule
from topr.policy import load_policy
from topr.sampling import LocalSampler, Sampling
from topr.tasks import Arithmetic, Grade, Task

UPDATE = r"(?:epoch (\d)/2\|.*\| |epoch (\d)/2, update )(\d)/6, (?:\?|\d\d:\d\d) left"
FIGURES = r", loss -?\d\.\d{3}, pass@1 \d\.\d{3}, [\d.]+[kM]? tok/s"


class Terminal(io.StringIO):
    """Standard error of a terminal of 80 columns."""

    def __init__(self):
        super().__init__()
        self.ends = os.openpty()
        termios.tcsetwinsize(self.ends[1], (40, 80))

    def fileno(self) -> int:
        return self.ends[1]

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        """All that was shown, each time a line was rewritten."""
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self.getvalue())
        return [part.rstrip() for part in re.split(r"[\r\n]", text) if part.strip()]


class Log(Terminal):
    """Standard error of a pipe or a batch job."""

    def isatty(self) -> bool:
        return False


class Own(ProgressBar):
    """A user's own progress bar."""

    is_enabled = True

    def disable(self) -> None:
        pass


class Even(Task):
    """A user's own task."""

    def grade(self, response, gold):
        return Grade(-1.0, False, None)


@pytest.fixture
def replace_stderr(monkeypatch):
    """Replace standard error; pytest does so itself between fixtures and test."""

    def replace_stderr(kind: type) -> Terminal:
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    monkeypatch.setattr(Progress, "enabled", False)  # so that it is so after the test
    return replace_stderr


@pytest.fixture
def without_delay(monkeypatch):
    """Every change is shown, however soon it follows."""
    initialise = tqdm.__init__
    monkeypatch.setattr(distributed, "INTERVAL", 1e-9)
    monkeypatch.setattr(
        tqdm, "__init__", lambda *args, **more: initialise(*args, **more | {"mininterval": 0.0})
    )


@pytest.fixture
def arguments(tiny):
    """Of a run of two epochs with three updates each, and of five problems."""
    return [
        *tiny[1],
        "--data.batch_size=8",
        "--trainer.max_epochs=2",
        "--trainer.val_check_interval=0.5",
    ]


def counts(shown: list[str], name: str, total: int) -> list[int]:
    """The numbers of responses that were shown of a total."""
    pattern = rf"{name}(?:\|.*\|)? (\d+)/{total} responses, (?:\?|\d\d:\d\d) left.*"
    found = (re.fullmatch(pattern, line) for line in shown)
    return [int(match[1]) for match in found if match]


@pytest.mark.parametrize("kind", [Terminal, pytest.param(Log, marks=pytest.mark.slow)])
def test_fit_shows_updates_and_responses_and_counts_epochs_from_1(
    run, arguments, replace_stderr, without_delay, kind
):
    stderr = replace_stderr(kind)
    code, out, _ = run(train.main, "fit", *arguments)
    assert code == 0, stderr.getvalue()
    found = [
        re.fullmatch(UPDATE + FIGURES, line) for line in stderr.shown if line.startswith("epoch")
    ]
    numbers = [(int(match[1] or match[2]), int(match[3])) for match in found if match]
    assert all(found[kind is Terminal :])  # a bar is drawn before it has figures
    assert set(numbers) >= {(1, 2), (1, 3), (2, 4), (2, 5), (2, 6)} and numbers == sorted(numbers)
    assert (
        counts(stderr.shown, "test", 15)[-1] == 15
        and len(set(counts(stderr.shown, "test", 15))) > 3
    )
    assert len(set(counts(stderr.shown, "validation", 20))) > 3
    written = stderr.getvalue()
    if kind is Log:
        assert (
            "\r" not in written
            and "\x1b" not in written
            and "|" not in written
            and "\n\n" not in written
        )
    else:
        assert max(map(len, stderr.shown)) == 79
        assert written.endswith("\n") and "test" in stderr.shown[-1]  # no bar is left open
        kept = [
            line
            for line in re.sub("[^\n]*\r", "", written).split("\n")
            if line.startswith(("epoch", "test"))
        ]
        assert len(kept) >= 3


def test_the_last_bar_shows_the_last_validation(run, arguments, replace_stderr, monkeypatch):
    def measure(self, trainer, split):
        return {"pass@1": {"mean": trainer.global_step / 10, "interval": [0.0, 1.0]}}

    monkeypatch.setattr(callbacks.Evaluate, "measure", measure)
    stderr = replace_stderr(Terminal)
    assert run(train.main, "fit", *arguments)[0] == 0
    assert "6/6, 00:00 left" in stderr.shown[-1] and "pass@1 0.600" in stderr.shown[-1]


@pytest.mark.parametrize(
    ("device", "more"), [("cpu", ", 1.17k tok/s"), ("cuda", ", MFU 41%, 61 GB")]
)
def test_a_long_run_fits_80_columns(replace_stderr, monkeypatch, device, more):
    stderr, monitor = replace_stderr(Terminal), callbacks.Monitor()
    monkeypatch.setattr(Progress, "enabled", True)
    monitor.speed = SimpleNamespace(device=torch.device(device))
    metrics = {
        "train/loss": torch.tensor(0.0123),
        "val/pass@1": torch.tensor(0.652),
        "speed/tokens_per_s": 1170.0,
    }
    metrics |= {"speed/utilisation": 0.41, "speed/peak_memory_gb": 61.2}
    counts = {
        "global_step": 933,
        "max_epochs": 1,
        "current_epoch": 0,
        "estimated_stepping_batches": 1868,
    }
    trainer = SimpleNamespace(**counts, callback_metrics=metrics)
    monitor.on_train_batch_end(trainer)
    trainer.global_step, monitor.bar.start_t = 1234, monitor.bar.start_t - 1800
    monitor.on_train_batch_end(trainer)
    monitor.bar.close()
    line = r"epoch 1/1\|[#█\d ]*\| 1234/1868, 1:03:1\d left, loss 0.012, pass@1 0.652" + more
    assert re.match(line, stderr.shown[-1])
    assert len(stderr.shown[-1]) <= 80


@pytest.mark.slow
def test_lines_come_at_intervals(run, arguments, replace_stderr, monkeypatch):
    now = [0.0]
    stderr = replace_stderr(Log)
    monkeypatch.setattr(Progress, "enabled", True)
    progress = Progress("test", 100)
    progress._time = lambda: now[0]
    progress.start_t = progress.last_print_t = 0.0
    for second in range(100):
        now[0] = second
        progress.advance(1, 50)
    progress.close()
    assert counts(stderr.shown, "test", 100) == [31, 61, 91]
    assert stderr.shown[0] == "test 31/100 responses, 01:06 left, 51.7 tok/s"
    stderr = replace_stderr(Log)
    assert run(train.main, "fit", *arguments)[0] == 0
    assert stderr.getvalue() == ""  # everything took less than 30 seconds


def test_a_bar_is_refreshed_a_few_times_a_second(replace_stderr, monkeypatch):
    stderr = replace_stderr(Terminal)
    monkeypatch.setattr(Progress, "enabled", True)
    with Progress("test", 10_000) as progress:
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < 1:
            progress.advance(1, 1)
    assert 3 <= len(stderr.shown) <= 3 + 4 * seconds and progress.n > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--trainer.enable_progress_bar=false"],
        ["--trainer.callbacks+=test_progress.Own"],
        ["--trainer.callbacks=test_progress.Own"],  # not a list
    ],
    ids=["off", "own", "one"],
)
def test_nothing_is_shown_beside_a_bar_of_ones_own_or_without_one(
    run, arguments, replace_stderr, without_delay, more
):
    for command in ("fit", "predict"):
        stderr = replace_stderr(Terminal)
        assert run(train.main, command, *arguments, *more, "--data.out=sampled")[0] == 0
        assert stderr.getvalue() == "", command


@pytest.mark.parametrize(
    "command, name, total", [("predict", "sampling", 15), ("validate", "validation", 20)]
)
def test_each_command_shows_one_bar(
    run, arguments, replace_stderr, without_delay, monkeypatch, command, name, total
):
    monkeypatch.setattr("topr.evaluation.pipeline.PART", 2)  # three files
    stderr = replace_stderr(Terminal)
    code, out, _ = run(train.main, command, *arguments, "--data.out=sampled")
    assert code == 0 and counts(stderr.shown, name, total)[-1] == total
    assert [
        line
        for line in re.sub("[^\n]*\r", "", stderr.getvalue()).split("\n")
        if "responses" in line
    ] == [stderr.shown[-1]]


def test_evaluate_shows_a_bar_for_each_policy(
    run, arguments, replace_stderr, without_delay, monkeypatch
):
    monkeypatch.setattr("topr.evaluation.report.draw", lambda *_: None)
    stderr = replace_stderr(Terminal)
    policies = [run.folder / "base", make_policy(run.folder / "other", seed=1)]
    given = ["--benchmark", "arithmetic=problems.jsonl", "--samples", 4, "--max-new-tokens", 8]
    assert run(evaluate.main, "--policy", *policies, *given)[0] == 0
    assert counts(stderr.shown, "sampling", 20).count(20) >= 2
    stderr = replace_stderr(Terminal)
    assert run(evaluate.main, "--policy", *policies, *given)[0] == 0
    assert stderr.getvalue() == ""  # nothing is missing


def test_a_warning_or_an_error_takes_the_line_of_the_bar(
    run, arguments, replace_stderr, monkeypatch
):
    stderr = replace_stderr(Terminal)

    def fail(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(LocalSampler, "sample", fail)
    assert run(train.main, "predict", *arguments, "--data.out=sampled")[0] == 2
    assert "out of memory" in stderr.shown[-1]  # and no bar after it
    assert "left\n\r\x1b[Kerror: out of memory" in stderr.getvalue()  # the bar has ended


def test_a_trainer_without_the_command_line_shows_lightning_s_bar_alone(
    arguments, tmp_path, replace_stderr
):
    files, task, loss = {"train": str(tmp_path / "train.parquet")}, Arithmetic(), losses.TOPR()
    files["val"] = str(tmp_path / "problems.jsonl")
    module = PolicyModule(str(tmp_path / "base"), task, loss, partial(torch.optim.AdamW, lr=3e-3))
    data = TrajectoryDataModule(str(tmp_path / "base"), loss, task, **files, sampling=task.sampling)
    stderr = replace_stderr(Terminal)
    Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path).fit(module, data)
    assert not [line for line in stderr.shown if "responses" in line]


def test_the_sampler_counts_every_response_and_token(policy, monkeypatch):
    monkeypatch.setattr(Progress, "enabled", True)
    loaded, sampler = load_policy(str(policy)), LocalSampler(rows=4)
    with Progress("sampling", 15) as sampler.progress:
        found = sampler.sample(
            loaded, [[3, 4], [5], [6, 7, 8]], 5, Sampling(top_k=0, max_new_tokens=9), 0
        )
        assert sampler.progress.n == 15
        assert sampler.progress.tokens == sum(
            len(response.ids) for some in found for response in some
        )


def test_fit_ends_with_the_next_commands(run, arguments, monkeypatch):
    monkeypatch.setattr("topr.evaluation.report.draw", lambda *_: None)
    name = "--trainer.logger.init_args.name=a run"
    sampling = "--data.sampling.max_new_tokens=8", "--data.sampling.stop=['a b', c]"
    code, out, err = run(train.main, "fit", *arguments, name, *sampling)
    assert code == 0, err
    tensorboard, evaluation = (shlex.split(line) for line in out.splitlines()[-2:])
    assert tensorboard == ["tensorboard", "--logdir", "runs/a run"]
    assert evaluation[:2] == ["python", "evaluate.py"]
    assert evaluation[-5:] == ["--max_new_tokens", "8", "--stop", "a b", "c"]
    code, out, err = run(evaluate.main, *evaluation[2:])
    assert code == 0 and "| runs/a run/version_0/policy, arithmetic | 5 |" in out, err


@pytest.mark.parametrize(
    "more, benchmark",
    [
        (["--model.task=test_progress.Even"], "test_progress.Even={}/problems.jsonl"),
        # evaluate.py would construct another task
        pytest.param(["--model.task.init_args.largest=50"], None, marks=pytest.mark.slow),
        pytest.param(["--data.test=null"], None, marks=pytest.mark.slow),
        (["--trainer.fast_dev_run=true"], None),
    ],
    ids=["own task", "other settings", "no test", "trial"],
)
def test_fit_proposes_an_evaluation_only_of_the_same_task(run, arguments, more, benchmark):
    code, out, err = run(train.main, "fit", *arguments, *more)
    assert code == 0, err
    assert ("tensorboard" in out) == ("fast_dev_run" not in more[0])
    assert re.findall(r"--benchmark (\S+)", out) == (
        [benchmark.format(run.folder)] if benchmark else []
    )


@pytest.mark.parametrize(
    "command, words",
    [
        (
            "predict",
            "Sample, grade and score responses to data.problems; write trajectory files to data.out.",
        ),
        (
            "validate",
            "Sample and grade responses to the problems in data.val, and print the metrics.",
        ),
        ("test", "Sample and grade responses to the problems in data.test, and print the metrics."),
    ],
)
def test_help_says_what_the_command_does_here(run, command, words):
    code, out, _ = run(train.main, command, "--help")
    text = " ".join(out.split())
    assert (
        code == 0 and text.count(words.removesuffix(".")) == 2
    )  # of all arguments, and of those of the command
    assert "Run inference" not in text and "evaluation epoch" not in text


@pytest.mark.slow
def test_only_rank_0_shows_progress(tmp_path, arguments):
    more = ["--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.accelerator=cpu"]
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from topr import distributed; "
    script += "distributed.INTERVAL = 1e-9; import train; train.main()"
    (tmp_path / "script.py").write_text(script)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "script.py",
    ]
    settings = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}
    settings["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, [*launch, "validate", *arguments, *more])), **settings)
    assert done.returncode == 0, done.stderr
    alone = subprocess.run(
        list(map(str, [sys.executable, "script.py", "validate", *arguments])), **settings
    )
    figures = [
        re.findall(r"│ +(\S+) +│ +(\S+) +│", output) for output in (done.stdout, alone.stdout)
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 15  # intervals as well
    assert (
        re.findall(r"validation .*?\d/(\d+) responses of rank 0,", done.stderr)[-1] == "12"
    )  # 3 problems of 5
    assert not re.findall(r"validation .*?\d/8 responses", done.stderr)
    assert "sync_dist" not in done.stderr  # Lightning warns of figures that ranks log differently
