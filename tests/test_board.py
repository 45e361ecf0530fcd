"""What TensorBoard shows first: the layout of Custom Scalars, HPARAMS, and the names of runs."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, make_policy, make_trajectories, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata

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


def hparams(events: EventAccumulator) -> tuple[dict, list[str]]:
    """Hyperparameters of a run in the HPARAMS tab, and the tags of its metrics."""
    found = {
        tag: events.SummaryMetadata(tag).plugin_data.content
        for tag in events.PluginTagToContent("hparams")
    }
    values = metadata.parse_session_start_info_plugin_data(
        found[metadata.SESSION_START_INFO_TAG]
    ).hparams
    experiment = metadata.parse_experiment_plugin_data(found[metadata.EXPERIMENT_TAG])
    assert {info.name for info in experiment.hparam_infos} == set(values)  # the columns
    named = {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}
    return named, [info.name.tag for info in experiment.metric_infos]


def test_every_curve_of_the_layout_is_logged(fit):
    events = read(fit() / "arithmetic" / "version_0")
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    charts = [chart for category in layout.category for chart in category.chart]
    ends = {
        tuple(getattr(s, name) for name in ("value", "lower", "upper"))
        for c in charts
        for s in c.margin.series
    }
    assert ends == {
        (f"val/{name}", f"val_interval/{name}_low", f"val_interval/{name}_high")
        for name in ("pass@1", "invalid")
    }
    lines = {tag for chart in charts for tag in chart.multiline.tag}
    assert {"log_ratio/positives_mean", "log_ratio/negatives_mean", "gradient/norm"} < lines
    assert lines | {tag for tags in ends for tag in tags} <= set(events.Tags()["scalars"])
    assert not {"epoch", "hp_metric"} & set(events.Tags()["scalars"])


def test_runs_are_compared_by_hyperparameters_and_the_figures_of_the_summary(fit):
    """Whatever default_hp_metric is; a run that is resumed at its end logs them once."""
    resumed = ["--trainer.logger.init_args.default_hp_metric=true", "--ckpt_path=last"]
    one, other = (fit(*resumed) / "arithmetic" / "version_0" for _ in range(2))
    assert len(list(one.glob("*tfevents*"))) == 2 and not list(one.glob("*/*tfevents*"))
    events = read(one)
    values, tags = hparams(events)
    assert values == {
        "loss": "TOPR", "lr": 3e-4, "seed": 0, "batch_size": 8,
        "loss_arguments": "a_plus=1.0, b_plus=1.0, a_minus=0.0, b_minus=1.0, baseline=0.0, positive_share=None, "
        "ratio=sequence", "policy": str(one.parents[2] / "base"), "data": str(one.parents[2] / "train.parquet"),
    }  # fmt: skip
    after = json.loads((one / "summary.json").read_text())["after"]
    assert tags == [f"test/{name}" for name in after if name not in ("problems", "samples")]
    for tag in tags:
        (event,) = events.Scalars(tag)
        assert (event.step, event.value) == (3, pytest.approx(after[tag.removeprefix("test/")]))
    assert not {"epoch", "hp_metric"} & set(events.Tags()["scalars"])


@pytest.mark.slow
def test_runs_of_another_loss_have_the_same_columns(fit):
    runs = fit("--data.val=null", "--trainer.max_steps=1")
    fit(
        "--data.val=null",
        "--trainer.max_steps=1",
        "--config",
        ROOT / "configs" / "loss" / "red_drop.yaml",
    )
    folders = [runs / name / "version_0" for name in ("arithmetic", "arithmetic-red_drop")]
    (one, tags), (other, others) = (hparams(read(folder)) for folder in folders)
    assert (set(one), tags) == (set(other), others) and (
        other["loss"],
        other["loss_arguments"],
    ) == ("REDDrop", "")


@pytest.mark.slow
def test_a_run_with_a_loss_overlay_is_named_after_both(fit):
    short = [
        "--config",
        REINFORCE,
        "--config",
        "{data: {val: null, test: null}}",
        "--trainer.max_steps=1",
    ]
    assert [path.name for path in fit(*short).iterdir()] == ["arithmetic-reinforce"]
    runs = fit(*short, "--trainer.logger.init_args.name=mine")  # but for a name of its own
    fit(*short, "--trainer.logger.name=short")
    fit("--config", runs / "arithmetic-reinforce" / "version_0" / "config.yaml", "--ckpt_path=last")
    found = {str(path.relative_to(runs)) for path in runs.glob("*/*")}
    assert found == {"arithmetic-reinforce/version_0", "mine/version_0", "short/version_0"}


def test_other_loggers_get_hyperparameters_and_figures(fit):
    loggers = [
        {"class_path": name, "init_args": {"save_dir": "runs", "name": name}}
        for name in ("CSVLogger", "TensorBoardLogger")
    ]
    Path("loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    runs = fit("--config", "loggers.yaml", "--config", REINFORCE)
    folder, board = (runs / name / "version_0" for name in ("CSVLogger", "TensorBoardLogger"))
    after = json.loads((folder / "summary.json").read_text())["after"]
    with open(folder / "metrics.csv") as file:
        (row,) = [row for row in csv.DictReader(file) if row["test/pass@1"]]
    assert (int(row["step"]), float(row["test/pass@1"])) == (
        3,
        after["pass@1"],
    ) and "epoch" not in row
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["loss"] == "REINFORCE"
    assert hparams(read(board))[0]["loss"] == "REINFORCE"
