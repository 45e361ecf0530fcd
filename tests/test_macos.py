"""What differs on macOS: no prctl, no bound on the address space, memory in bytes, no /proc, spawned workers, mps."""

import ctypes
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, make_policy, make_trajectories, rejected, write
from lightning.fabric.accelerators.mps import MPSAccelerator
from test_math import judge  # noqa: F401 - a fixture
from test_reproduce import reported  # noqa: F401
from test_update import fit, fit_arguments, same_weights

from topr.callbacks.monitor import Throughput
from topr.distributed import die_with_parent
from topr.policy import load_policy
from topr.reproduce import __main__ as reproduce
from topr.tasks import math


@pytest.mark.parametrize(("name", "calls"), [("linux", 1), ("darwin", 0)])
def test_a_child_process_asks_the_kernel_for_its_end_on_linux_only(monkeypatch, name, calls):
    found = []
    monkeypatch.setattr(
        ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *asked: found.append(asked))
    )
    monkeypatch.setattr(sys, "platform", name)
    die_with_parent()
    assert len(found) == calls


def test_answers_are_compared_where_the_address_space_cannot_be_bounded(judge, monkeypatch):  # noqa: F811
    program = (
        f"import resource, sys; sys.path.append({str(ROOT / 'topr' / 'tasks')!r})\n"
        "def refuse(*_): raise ValueError('current limit exceeds maximum limit')\n"
        "resource.setrlimit = refuse\nimport equivalence\nequivalence.main()"
    )
    monkeypatch.setattr(math, "COMMAND", [sys.executable, "-P", "-c", program])
    assert judge.same("6", "3+3") and not judge.same("6", "3+4")


@pytest.mark.parametrize(("name", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_memory_is_in_gigabytes(policy, monkeypatch, name, unit):
    speed = Throughput(load_policy(str(policy)))
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3e9 / unit))
    monkeypatch.setattr(sys, "platform", name)
    assert speed.read(1)["speed/peak_memory_gb"] == pytest.approx(3)


def test_the_claims_name_the_architecture_where_no_file_names_the_processor(reported, monkeypatch):  # noqa: F811
    monkeypatch.setattr(
        reproduce, "Path", lambda path: Path("nowhere" if path == "/proc/cpuinfo" else path)
    )
    assert reported("--claims=1")[0]["hardware"] == platform.machine()


@pytest.mark.parametrize(
    "accelerator", ["auto", pytest.param("gpu", marks=pytest.mark.slow), "mps"]
)
def test_an_apple_gpu_is_rejected_and_the_cpu_beside_it_trains(
    run, policy, monkeypatch, accelerator
):
    data = write(run.folder / "a.parquet", policy, make_trajectories(policy))
    monkeypatch.setattr(
        MPSAccelerator, "is_available", lambda: True
    )  # Lightning remembers what torch answers
    arguments = fit_arguments(policy, data, f"--trainer.accelerator={accelerator}")
    rejected(run, "mps, which is not supported; set --trainer.accelerator cpu", *arguments)
    fit(run, policy, data, "--trainer.accelerator=cpu")


@pytest.mark.slow
def test_spawned_loader_processes_change_nothing(run):
    policy = make_policy(run.folder / "base")
    data = write(run.folder / "a.parquet", policy, make_trajectories(policy))
    alone = fit(run, policy, data)
    program = (
        "import multiprocessing, runpy, sys\nmultiprocessing.set_start_method('spawn')\n"
        f"sys.path.insert(0, {str(ROOT)!r})\nrunpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    )
    arguments = fit_arguments(policy, data, "--data.num_workers=2")
    subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], cwd=run.folder, check=True
    )
    assert same_weights(alone, alone.with_name("version_1"))
