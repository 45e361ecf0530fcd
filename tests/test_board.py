"""What TensorBoard shows first: the layout of Custom Scalars, and the names of runs."""

from pathlib import Path

import pytest
from conftest import ROOT, make_policy, make_trajectories, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

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


def read(version: Path) -> EventAccumulator:
    return EventAccumulator(str(version), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_every_curve_of_the_layout_is_logged(fit):
    events = read(fit() / "arithmetic" / "version_0")
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    charts = [chart for category in layout.category for chart in category.chart]
    ends = {tuple(getattr(s, name) for name in ("value", "lower", "upper")) for c in charts for s in c.margin.series}
    assert ends == {
        (f"val/{name}", f"val_interval/{name}_low", f"val_interval/{name}_high") for name in ("pass@1", "invalid")
    }
    lines = {tag for chart in charts for tag in chart.multiline.tag}
    assert {"log_ratio/positives_mean", "log_ratio/negatives_mean", "gradient/norm"} < lines
    assert lines | {tag for tags in ends for tag in tags} <= set(events.Tags()["scalars"])
    assert "epoch" not in events.Tags()["scalars"]


def test_a_run_with_a_loss_overlay_is_named_after_both(fit):
    short = ["--config", REINFORCE, "--config", "{data: {val: null, test: null}}", "--trainer.max_steps=1"]
    assert [path.name for path in fit(*short).iterdir()] == ["arithmetic-reinforce"]
    runs = fit(*short, "--trainer.logger.init_args.name=mine")  # but for a name of its own
    fit("--config", runs / "arithmetic-reinforce" / "version_0" / "config.yaml", "--ckpt_path=last")
    found = {str(path.relative_to(runs)) for path in runs.glob("*/*")}
    assert found == {"arithmetic-reinforce/version_0", "mine/version_0"}
