"""What differs on macOS: no prctl, spawned workers, an Apple GPU."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, make_policy, make_trajectories, rejected, write
from lightning.fabric.accelerators.mps import MPSAccelerator
from test_update import fit, fit_arguments, same_weights

from topr.distributed import die_with_parent


@pytest.mark.parametrize(("name", "calls"), [("linux", 1), ("darwin", 0)])
def test_a_child_process_asks_the_kernel_for_its_end_on_linux_only(monkeypatch, name, calls):
    found = []
    library = SimpleNamespace(prctl=lambda *asked: found.append(asked))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(sys, "platform", name)
    die_with_parent()
    assert len(found) == calls


@pytest.mark.parametrize("accelerator", ["auto", "mps"])
def test_an_apple_gpu_is_rejected_and_the_cpu_beside_it_trains(
    run, policy, monkeypatch, accelerator
):
    data = write(run.folder / "a.parquet", policy, make_trajectories(policy))
    # Lightning remembers what torch answers.
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
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
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    )
    arguments = map(str, fit_arguments(policy, data, "--data.num_workers=2"))
    subprocess.run([sys.executable, "-c", program, *arguments], cwd=run.folder, check=True)
    assert same_weights(alone, alone.with_name("version_1"))
