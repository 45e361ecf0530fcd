"""The names of runs."""

from pathlib import Path

import pytest
from conftest import ROOT, make_policy, make_trajectories, write

import train

CONFIG = ROOT / "configs" / "arithmetic.yaml"
REINFORCE = ROOT / "configs" / "loss" / "reinforce.yaml"


@pytest.fixture
def fit(run):
    """`train.py fit` on a small set with problems to test on; returns the folder of all runs."""
    policy = make_policy(run.folder / "base")
    data = write(run.folder / "train.parquet", policy, make_trajectories(policy))
    problems = run.folder / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)))

    def fit(*more) -> Path:
        code, out, err = run(
            train.main, "fit", "--config", CONFIG, f"--model.policy={policy}", f"--data.train={data}",
            f"--data.val={problems}", f"--data.test={problems}", "--data.samples=2", "--data.batch_size=8",
            "--data.sampling.max_new_tokens=9", "--trainer.enable_progress_bar=false",
            "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
            "--trainer.callbacks.init_args.every_n_train_steps=1", *more,
        )  # fmt: skip
        assert code == 0, out + err
        return run.folder / "runs"

    return fit


def test_a_run_with_a_loss_overlay_is_named_after_both(fit):
    short = ["--config", REINFORCE, "--config", "{data: {val: null, test: null}}", "--trainer.max_steps=1"]
    assert [path.name for path in fit(*short).iterdir()] == ["arithmetic-reinforce"]
    runs = fit(*short, "--trainer.logger.init_args.name=mine")  # but for a name of its own
    fit("--config", runs / "arithmetic-reinforce" / "version_0" / "config.yaml", "--ckpt_path=last")
    found = {str(path.relative_to(runs)) for path in runs.glob("*/*")}
    assert found == {"arithmetic-reinforce/version_0", "mine/version_0"}
