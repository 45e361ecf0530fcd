"""What users of Lightning take for granted, with a plain `lightning.Trainer` and a tiny policy."""

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
import wandb
import yaml
from conftest import ROOT, Recorder, listing, make_policy, make_trajectories, rejected, slow, write
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from topr.advantages import GroupMean
from topr.datamodule import TrajectoryDataModule
from topr.io import InputError
from topr.losses import TOPR
from topr.module import PolicyModule
from topr.policy.model import LoRA, export_policy, load_policy
from topr.run.identity import policy_hash
from topr.sampling import LocalSampler, Sampling
from topr.tasks import Arithmetic
from topr.trajectories import Trajectory, read_metadata, read_trajectories

UPDATES = 8  # of an epoch: 30 trajectories, 4 an update


class OwnTask(Arithmetic):
    """A task as a user writes it, with a setting of its own."""

    def __init__(self, bonus: float = 0.0):
        super().__init__()
        self.bonus = bonus


class OwnLoss(TOPR):
    """A loss as a user writes it."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.factor = factor


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy in base/, trajectories in train.parquet, five problems in problems.jsonl."""
    folder = tmp_path_factory.mktemp("files")
    policy = make_policy(folder / "base", scale=0.5)
    write(folder / "train.parquet", policy, make_trajectories(policy, count=30, group=3))
    lines = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)]
    (folder / "problems.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def module(files):
    """Makes a module for the policy; takes changed arguments."""

    def make(**changes) -> PolicyModule:
        arguments = {"task": Arithmetic(), "loss": TOPR()}
        arguments["optimizer"] = partial(torch.optim.AdamW, lr=3e-3)
        return PolicyModule(str(files / "base"), **arguments | changes)

    return make


@pytest.fixture
def data(files):
    """Makes a data module; takes changed arguments."""

    def make(**changes) -> TrajectoryDataModule:
        problems = str(files / "problems.jsonl")
        arguments = {"train": str(files / "train.parquet"), "batch_size": 4}
        arguments |= {"val": problems, "test": problems, "problems": problems}
        arguments |= {"samples": 2, "val_samples": 2, "sampling": Sampling(max_new_tokens=6)}
        return TrajectoryDataModule(str(files / "base"), Arithmetic(), **arguments | changes)

    return make


@pytest.fixture
def trainer(tmp_path):
    """Makes a plain trainer without files; takes changed arguments."""

    def make(**changes) -> lightning.Trainer:
        arguments = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": tmp_path}
        arguments |= {"logger": False, "enable_checkpointing": False}
        arguments |= {"enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(**arguments | changes)

    return make


@pytest.fixture(autouse=True)
def fresh_recorder():
    Recorder.clear()


def trained() -> list[list[int]]:
    """The trajectories of each update since the test began."""
    return [rows["trajectory"].tolist() for rows in Recorder.rows]


def assert_same_weights(one: PolicyModule, other: PolicyModule) -> None:
    weights = one.policy.state_dict()
    others = other.policy.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["all weights", "LoRA"])
def test_a_checkpoint_of_a_plain_trainer_is_all_that_loading_needs(
    module, data, trainer, tmp_path, lora
):
    loss, task = OwnLoss(factor=2.0), OwnTask(bonus=0.5)
    sampler = LocalSampler(rows=3)
    fitted = module(loss=loss, task=task, sampler=sampler, lora=lora)
    plain = trainer(max_steps=2)
    plain.fit(fitted, data())
    plain.save_checkpoint(tmp_path / "a.ckpt")
    settings = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert yaml.safe_load(yaml.safe_dump(settings)) == settings  # plain values
    loaded = PolicyModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert_same_weights(loaded, fitted)
    assert loaded.loss.factor == 2.0 and loaded.task.bonus == 0.5 and loaded.sampler.rows == 3
    fresh = module(lora=lora)
    fresh.configure_model()
    weights = fresh.policy.state_dict()
    assert any(
        not torch.equal(value, weights[name]) for name, value in loaded.policy.state_dict().items()
    )
    last = trainer(max_steps=1)
    last.fit(loaded, data())  # the loaded module is as good as the first
    last.save_checkpoint(tmp_path / "b.ckpt")
    again = PolicyModule.load_from_checkpoint(tmp_path / "b.ckpt")
    assert_same_weights(again, loaded)
    assert again.hparams == loaded.hparams


@pytest.mark.parametrize("more", [[], ["--model.lora.rank=2"]], ids=["all weights", "LoRA"])
def test_a_checkpoint_of_train_py_is_all_that_loading_needs(run, files, more):
    arguments = [f"--model.policy={files / 'base'}", f"--data.train={files / 'train.parquet'}"]
    arguments += ["--data.val=null", "--data.test=null", "--trainer.max_steps=2", *more]
    arguments += ["--model.loss=test_lightning.OwnLoss", "--model.loss.factor=2"]
    config = ROOT / "configs" / "arithmetic.yaml"
    save = ["--trainer.callbacks.init_args.every_n_train_steps=1"]
    code, _, err = run(train.main, "fit", "--config", config, *arguments, *save)
    assert code == 0, err
    folder = run.folder / "runs" / "arithmetic" / "version_0"
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    torch.load(checkpoint, weights_only=True)
    loaded = PolicyModule.load_from_checkpoint(checkpoint)
    assert loaded.loss.factor == 2.0
    weights = loaded.policy.state_dict()
    if more:
        exported = load_file(folder / "adapter" / "adapter_model.safetensors")
        names = {name: name.replace("base_model.model", "policy.model") for name in exported}
        names = {name: other.replace(".weight", ".default.weight") for name, other in names.items()}
        names = {name: other.removeprefix("policy.") for name, other in names.items()}
    else:
        exported = load_policy(str(folder / "policy")).state_dict()
        names = {name: name for name in exported}
    assert exported and all(torch.equal(exported[name], weights[names[name]]) for name in exported)


def test_hyper_parameters_are_class_paths_and_arguments(files, module):
    made = module(lora=LoRA(rank=2), gradient_clip_val=0.5)
    settings = made.hparams
    assert settings.policy == str(files / "base")
    assert settings.loss == {"class_path": "topr.losses.topr.TOPR", "init_args": {}}
    assert settings.optimizer["class_path"] == "torch.optim.adamw.AdamW"
    assert settings.optimizer["init_args"] == {"lr": 3e-3}
    assert settings.lora["rank"] == 2
    assert settings.gradient_clip_val == 0.5


def test_fit_takes_a_loader_of_updates(module, data, trainer):
    prepared = data()
    prepared.setup("fit")
    fitted, other = module(), module()
    trainer(callbacks=[Recorder()]).fit(fitted, train_dataloaders=prepared.train_dataloader())
    assert len(trained()) == UPDATES
    trainer(limit_val_batches=0).fit(other, data())
    assert_same_weights(fitted, other)


def test_predict_returns_trajectories_and_writes_them_if_there_is_a_folder(
    module, data, trainer, tmp_path
):
    (returned,) = trainer().predict(module(), data())
    assert len(returned) == 10 and isinstance(returned[0], Trajectory)
    for trajectory in returned:
        assert len(trajectory.ref_logprobs) == len(trajectory.response_ids) > 0
        assert all(value < 0 for value in trajectory.ref_logprobs)
    assert not listing(tmp_path)
    (again,) = trainer().predict(module(), data(out=str(tmp_path / "out")))
    (file,) = (tmp_path / "out").glob("*.parquet")
    assert again == returned == read_trajectories(file)


def test_predictions_after_training_are_of_the_trained_weights(module, data, trainer, tmp_path):
    policy, given = module(), data(out=str(tmp_path / "base"))
    trainer().predict(policy, given)
    fit = trainer()
    fit.fit(policy, given)
    with pytest.raises(InputError, match="holds responses of another policy"):
        trainer().predict(policy, given)
    given.out = str(tmp_path / "trained")
    trainer().predict(policy, given)
    export_policy(policy.policy, tmp_path / "exported")
    labels = []
    for name in ("base", "trained"):
        labels.append(read_metadata(tmp_path / name / "part-00000.parquet")["policy"])
    assert labels == [policy_hash(given.policy), policy_hash(str(tmp_path / "exported"))]


def test_a_folder_of_predictions_is_free_again(module, data, trainer, tmp_path):
    trainer().predict(module(), data(out=str(tmp_path / "out")))
    program = f"from topr.io import lock; lock({str(tmp_path / 'out')!r})"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_a_second_fit_trains_on_the_data_of_then(module, data, trainer, tmp_path, files):
    policy, given = module(), data()
    trainer(callbacks=[Recorder()]).fit(policy, given)
    rows = make_trajectories(files / "base", count=9, seed=5)
    given.train = str(write(tmp_path / "other.parquet", files / "base", rows))
    Recorder.clear()
    trainer(callbacks=[Recorder()]).fit(policy, given)
    assert sorted(sum(trained(), [])) == list(range(9))


def test_validate_and_test_log_their_figures(module, data, trainer, capsys):
    for split in ("val", "test"):
        evaluate = trainer().validate if split == "val" else trainer().test
        (figures,) = evaluate(module(), data())
        interval = f"{split}_interval/pass@1"
        assert 0 <= figures[f"{interval}_low"] <= figures[f"{split}/pass@1"]
        assert figures[f"{split}/pass@1"] <= figures[f"{interval}_high"] <= 1
        assert f"{split}/pass@1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"limit_train_batches": 7}, 7),
        ({"limit_train_batches": 0.5}, 4),
        ({"max_steps": 3}, 3),
        ({"max_steps": 11, "max_epochs": 2}, 11),
        ({"fast_dev_run": 2}, 2),
    ],
    ids=str,
)
def test_a_limit_trains_the_first_updates(module, data, trainer, limit, expected):
    prepared = data()
    prepared.setup("fit")
    plan = prepared.plan(0).batches + prepared.plan(1).batches
    first = [sorted(batch.tolist()) for batch in plan[:expected]]
    Recorder.clear()
    limited = trainer(callbacks=[Recorder()], **limit)
    limited.fit(module(), data())
    assert limited.global_step == expected
    assert [sorted(batch) for batch in trained()] == first


@pytest.mark.parametrize(("batches", "more"), [(2, {}), (0.25, {"val": None})])
@pytest.mark.parametrize("reload", [0, 1])
def test_overfitting_repeats_the_first_updates(module, data, trainer, batches, more, reload):
    settings = {"overfit_batches": batches, "reload_dataloaders_every_n_epochs": reload}
    trainer(max_epochs=3, callbacks=[Recorder()], **settings).fit(module(), data(**more))
    assert len(trained()) == 6
    assert trained()[:2] == trained()[2:4] == trained()[4:]


@pytest.mark.parametrize("logger", [True, False])
def test_a_trial_run_leaves_no_files(module, data, trainer, tmp_path, logger):
    callbacks = [ModelCheckpoint(every_n_train_steps=1)]
    trial = trainer(
        fast_dev_run=True, logger=logger, enable_checkpointing=True, callbacks=callbacks
    )
    trial.fit(module(), data())
    trial.predict(module(), data(out=str(tmp_path / "out")))
    assert not listing(tmp_path)


class Validations(lightning.Callback):
    """Notes after how many updates the policy is validated."""

    def __init__(self):
        self.steps: list[int] = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"val_check_interval": 3}, [0, 3, 6]),
        ({"val_check_interval": 0.25}, [0, 2, 4, 6, 8]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [0, 5, 10, 15]),
        ({"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}, [16]),
    ],
    ids=str,
)
def test_validation_comes_when_it_is_asked_for(module, data, trainer, settings, expected):
    seen = Validations()
    epochs = 1 if expected[-1] <= UPDATES else 2
    trainer(callbacks=[seen], max_epochs=epochs, **settings).fit(module(), data())
    assert seen.steps == expected


def test_the_best_checkpoint_is_found_by_a_figure_of_validation(module, data, trainer, tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="val/pass@1", mode="max", filename="{step}")
    settings = {"enable_checkpointing": True, "callbacks": [best], "val_check_interval": 2}
    plain = trainer(**settings)
    plain.fit(module(), data())
    assert best.best_model_score is not None and best.best_model_path
    (figures,) = plain.validate(datamodule=data(), ckpt_path="best", verbose=False)
    loaded = PolicyModule.load_from_checkpoint(best.best_model_path)
    assert_same_weights(loaded, plain.lightning_module)
    assert figures["val/pass@1"] == pytest.approx(float(best.best_model_score), abs=0.5)


@pytest.mark.parametrize("monitor", ["val/pass@1", "train/loss", "val/length"])
def test_training_stops_early_by_a_figure(module, data, trainer, monitor):
    stop = EarlyStopping(monitor, min_delta=1e9, patience=1)  # nothing counts as better
    stopped = trainer(max_epochs=9, callbacks=[stop])
    stopped.fit(module(), data())
    assert stopped.global_step == 2 * UPDATES


def test_the_profiler_and_the_bars_of_lightning_work(module, data, trainer, capfd, caplog):
    settings = {"profiler": "simple", "enable_progress_bar": True, "enable_model_summary": True}
    trainer(callbacks=[RichProgressBar()], **settings).fit(module(), data())
    assert "run_training_epoch" in caplog.text
    assert "train/loss" in capfd.readouterr().out


def test_a_barebones_trainer_trains_the_same(module, data, trainer):
    fitted, other = module(), module()
    lightning.Trainer(barebones=True, accelerator="cpu", max_epochs=1).fit(fitted, data())
    trainer().fit(other, data())
    assert_same_weights(fitted, other)


@pytest.mark.parametrize("reload", [0, 1])
def test_epochs_of_whole_groups_may_differ_in_length(
    files, module, data, trainer, tmp_path, reload
):
    policy = files / "base"
    ragged = make_trajectories(policy, count=30)
    for number, trajectory in enumerate(ragged):
        group = min(number // 5, 3)  # three groups of 5 and one of 15
        trajectory.group = trajectory.prompt_id = trajectory.prompt = str(group)
        trajectory.prompt_ids = [3 + group]
    write(tmp_path / "ragged.parquet", policy, ragged, policy="another")
    settings = {"train": str(tmp_path / "ragged.parquet"), "advantage": GroupMean()}
    prepared = data(whole_groups=True, batch_size=15, **settings)
    prepared.setup("fit")
    lengths = [len(prepared.plan(epoch).batches) for epoch in range(2)]
    assert lengths[0] != lengths[1]
    two = trainer(max_epochs=2, reload_dataloaders_every_n_epochs=reload, callbacks=[Recorder()])
    if reload:
        two.fit(module(), prepared)
        assert two.global_step == sum(lengths)
        everything = sorted(np.concatenate(trained()).tolist())
        assert everything == sorted([*range(30), *range(30)])
    else:
        with pytest.raises(InputError, match="reload_dataloaders_every_n_epochs=1"):
            two.fit(module(), prepared)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accumulate_grad_batches": 4}, "set data.batch_size"),
        ({"gradient_clip_val": 1.0}, "set model.gradient_clip_val"),
        ({"precision": "bf16-true"}, "32-true or bf16-mixed"),
    ],
    ids=str,
)
def test_a_setting_with_another_place_here_is_named(
    run, files, module, data, trainer, settings, words
):
    with pytest.raises(InputError, match=words):
        trainer(**settings).fit(module(), data())
    arguments = [f"--model.policy={files / 'base'}", f"--data.train={files / 'train.parquet'}"]
    arguments += [f"--trainer.{name}={value}" for name, value in settings.items()]
    config = ROOT / "configs" / "arithmetic.yaml"

    rejected(run, words, "fit", "--config", config, *arguments)


TENSORBOARD = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "runs"}}
CSV = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs"}}
WANDB = {"class_path": "WandbLogger", "init_args": {"offline": True}}
LOGGERS = {
    "TensorBoard": TENSORBOARD,
    "CSV": CSV,
    "W&B": WANDB,
    "two": [CSV, TENSORBOARD],
    "W&B first": [WANDB, CSV],
    "none": False,
}


@pytest.fixture
def fit(run, files, monkeypatch):
    """`train.py fit`, with validations, of a run that its config file names `mine`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = run.folder / "mine.yaml"
    text = (ROOT / "configs" / "arithmetic.yaml").read_text()
    config.write_text(text.replace("name: arithmetic, ", ""))
    arguments = [f"--model.policy={files / 'base'}", f"--data.train={files / 'train.parquet'}"]
    arguments += [f"--data.{split}={files / 'problems.jsonl'}" for split in ("val", "test")]
    arguments += ["--data.samples=2", "--data.sampling.max_new_tokens=6", "--data.batch_size=4"]
    arguments += ["--trainer.callbacks.init_args.every_n_train_steps=2"]

    def fit(*more) -> str:
        code, out, err = run(train.main, "fit", "--config", config, *arguments, *more)
        wandb.finish()  # as at the end of a process
        assert code == 0, err
        return out + err

    fit.folder = run.folder
    return fit


def rows_of(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without measured speed."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: row[name] for name in row if not name.startswith("speed")} for row in rows]


def curves(folder: Path) -> dict[str, list[str]]:
    """What TensorBoard shows of a run, without measured speed."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith("speed")]
    return {
        name: [f"{event.step} {event.value}" for event in events.Scalars(name)] for name in names
    }


@pytest.mark.parametrize("logger", [name if name == "CSV" else slow(name) for name in LOGGERS])
def test_a_run_has_one_folder_and_resumes_exactly_whatever_its_logger(fit, logger):
    chosen = f"--trainer.logger={json.dumps(LOGGERS[logger])}"
    whole, folder = (fit.folder / "runs" / "mine" / f"version_{number}" for number in (0, 1))
    fit(chosen)
    fit(chosen, "--trainer.max_steps=5")  # its last checkpoint is that of update 4
    (folder / "summary.json").unlink()
    assert "resuming" in fit(chosen, "--ckpt_path=last")
    assert sorted(path.name for path in whole.parent.iterdir()) == ["version_0", "version_1"]
    for name in ("summary.json", "config.yaml", "policy/model.safetensors", "checkpoints"):
        assert (folder / name).exists() and (whole / name).exists()
    weights, others = (load_file(path / "policy" / "model.safetensors") for path in (whole, folder))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (whole, folder)]
    assert summaries[0] == summaries[1]
    if "CSV" in str(LOGGERS[logger]):
        assert rows_of(folder) == rows_of(whole)
        assert [row["step"] for row in rows_of(folder) if row["train/loss"]] == list("01234567")
    if "TensorBoard" in str(LOGGERS[logger]):
        assert curves(folder) == curves(whole)


def test_a_run_is_named_by_its_logger_its_overlay_or_its_config(fit):
    overlay = ["--config", ROOT / "configs" / "loss" / "reinforce.yaml"]
    stop = ["--trainer.max_steps=1", "--data.test=null"]
    fit(*stop)
    fit(*overlay, *stop)
    fit(*overlay, *stop, "--trainer.logger.init_args.name=other")
    fit(*stop, "--trainer.logger=false", "--trainer.default_root_dir=elsewhere")
    found = {str(path.parent.relative_to(fit.folder)) for path in fit.folder.glob("*/*/version_0")}
    assert found == {"runs/mine", "runs/mine-reinforce", "runs/other", "elsewhere/mine"}
