"""What loggers show of a run: curves, histograms, responses, hyperparameters and figures."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata

import train

EVERY_STEP = "--trainer.callbacks.init_args.every_n_train_steps=1"
REINFORCE = ["--config", ROOT / "configs" / "loss" / "reinforce.yaml"]


@pytest.fixture
def fit(run, tiny):
    """`train.py fit` on a small set; returns the folder of all runs."""

    def fit(*more) -> Path:
        small = ["--data.batch_size=8", "--data.sampling.max_new_tokens=9"]
        quiet = ["--trainer.enable_progress_bar=false"]
        code, _, err = run(train.main, "fit", *tiny[1], *small, *quiet, *more)
        assert code == 0, err
        return run.folder / "runs"

    return fit


def read(version: Path) -> EventAccumulator:
    return EventAccumulator(str(version), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def hparams(events: EventAccumulator) -> tuple[dict, list[str]]:
    """Hyperparameters of a run in the HPARAMS tab, and the tags of its metrics."""
    content = {}
    for tag in events.PluginTagToContent("hparams"):
        content[tag] = events.SummaryMetadata(tag).plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    values = {}
    for name, value in start.hparams.items():
        values[name] = getattr(value, value.WhichOneof("kind"))
    assert {info.name for info in experiment.hparam_infos} == set(values)  # the columns
    return values, [info.name.tag for info in experiment.metric_infos]


def test_every_curve_of_the_layout_is_logged(fit):
    events = read(fit() / "arithmetic" / "version_0")
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    shown = set()
    for category in layout.category:
        for chart in category.chart:
            shown |= set(chart.multiline.tag)
            for series in chart.margin.series:
                shown |= {series.value, series.lower, series.upper}
    assert len(shown) == 11 and {"val/pass@1", "gradient/norm"} < shown
    logged = events.Tags()
    assert shown <= set(logged["scalars"])
    assert "hp_metric" not in logged["scalars"]
    assert {"log_ratio/positives", "log_ratio/negatives"} == set(logged["histograms"])
    (first, *_) = events.Tensors("val/samples/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert text.count("reward ") == 8 and "    0+1>" in text


@pytest.mark.slow
def test_runs_are_compared_by_hyperparameters_and_the_figures_of_the_summary(fit):
    """A run that is resumed at its end logs them once."""
    resumed = ["--ckpt_path=last", EVERY_STEP]
    for _ in range(2):
        folder = fit(*resumed) / "arithmetic" / "version_0"
    assert len(list(folder.rglob("*tfevents*"))) == len(list(folder.glob("*tfevents*"))) == 2
    events = read(folder)
    values, tags = hparams(events)
    assert values["loss/class_path"] == "topr.losses.TOPR"
    assert not [name for name in values if name.startswith("_")]  # what Lightning keeps for itself
    assert (values["loss/init_args/b_minus"], values["optimizer/init_args/lr"]) == (1, 3e-4)
    assert (values["seed"], values["batch_size"]) == (0, 8)
    assert values["train"] == str(folder.parents[2] / "train.parquet")
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert tags == [f"test/{name}" for name in after if name not in ("problems", "samples")]
    for tag in tags:
        (event,) = events.Scalars(tag)
        assert (event.step, event.value) == (3, pytest.approx(after[tag.removeprefix("test/")]))


def test_other_loggers_get_hyperparameters_and_figures(fit):
    loggers = []
    for name in ("CSVLogger", "TensorBoardLogger"):
        loggers.append({"class_path": name, "init_args": {"save_dir": "runs", "name": "both"}})
    Path("loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    folder = fit("--config", "loggers.yaml", *REINFORCE) / "both-reinforce" / "version_0"
    after = json.loads((folder / "summary.json").read_text())["after"]
    with open(folder / "metrics.csv") as file:
        (row,) = [row for row in csv.DictReader(file) if row["test/pass@1"]]
    assert (int(row["step"]), float(row["test/pass@1"])) == (3, after["pass@1"])
    assert hparams(read(folder))[0]["loss/class_path"] == "topr.losses.REINFORCE"
