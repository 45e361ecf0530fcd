"""What differs on macOS: spawned loader processes, an Apple GPU."""

import subprocess
import sys

import pytest
from conftest import ROOT, make_trajectories, rejected, slow, write
from lightning.fabric.accelerators.mps import MPSAccelerator
from test_update import fit, fit_arguments, same_weights


@pytest.fixture
def data(run, policy):
    return write(run.folder / "a.parquet", policy, make_trajectories(policy))


@pytest.mark.parametrize("accelerator", [slow("auto"), "mps"])
def test_an_apple_gpu_is_rejected_and_the_cpu_beside_it_trains(
    run, policy, data, monkeypatch, accelerator
):
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    arguments = fit_arguments(policy, data, f"--trainer.accelerator={accelerator}")
    rejected(run, "mps, which is not supported; set --trainer.accelerator cpu", *arguments)
    fit(run, policy, data, "--trainer.accelerator=cpu")


@pytest.mark.slow
def test_spawned_loader_processes_change_nothing(run, policy, data):
    alone = fit(run, policy, data)
    program = (
        "import multiprocessing, runpy, sys\nmultiprocessing.set_start_method('spawn')\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    )
    arguments = map(str, fit_arguments(policy, data, "--data.num_workers=2"))
    subprocess.run([sys.executable, "-c", program, *arguments], cwd=run.folder, check=True)
    assert same_weights(alone, alone.with_name("version_1"))
