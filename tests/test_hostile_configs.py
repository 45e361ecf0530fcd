"""Broken and hostile configurations: each is refused in one sentence before anything is written; no code runs."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_policy, make_trajectories, refused, write
from test_hostile_trajectories import FILES

import train

pytestmark = pytest.mark.timeout(30)  # nothing may hang


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> list[str]:
    """Arguments of a training that would succeed."""
    folder = tmp_path_factory.mktemp("good")
    policy = make_policy(folder / "base")
    data = write(folder / "train.parquet", policy, make_trajectories(policy))
    values = {"model.policy": policy, "data.train": data, "data.val": "null", "data.test": "null"}
    return [f"--{key}={value}" for key, value in values.items()]


@pytest.fixture(autouse=True)
def no_other_commands(monkeypatch):
    """Parsers of the commands that are not called would take most of the time."""
    monkeypatch.setattr(
        train.CLI,
        "subcommands",
        staticmethod(lambda: {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}),
    )


def refuse(run, good, *arguments, words: str = "") -> None:
    config = ["--config", ROOT / "configs" / "arithmetic.yaml"]
    refused(run, words, "fit", *config, *good, *arguments)
    assert not Path("PWNED").exists()


TEXT = ["x"]
COUNT = ["0", "1.5", "[]"]
SHARE = ["-1", "nan", *TEXT]
CLASS = ["3", "nowhere.Class", "builtins.eval", "topr/../evil.py"]
CLASS += ["{class_path: os.system, init_args: {command: touch PWNED}}"]
LOSS, LR, LOGGER = "model.loss.init_args", "model.optimizer.init_args", "trainer.logger.init_args"
WRONG = {
    "seed_everything": ["-1", "1.5", "nan", str(2**64), *TEXT],
    "model.policy": ["''", "null", "3", "nowhere", "/dev/zero", "a/b", "{}"],
    "model.task": [*CLASS, "null", "topr.losses.TOPR", "topr.tasks.Task"],
    "model.task.init_args.operands": ["[9, 1]", "3", "[1, 2, 3]", "x"],
    "model.loss": [*CLASS, "null", "topr.tasks.Arithmetic", "topr.losses.Loss"],
    f"{LOSS}.a_plus": [*SHARE, "null"],
    f"{LOSS}.b_plus": ["0.5", "nan", "null", *TEXT],
    f"{LOSS}.a_minus": [*SHARE, "2"],
    f"{LOSS}.baseline": ["nan", "-inf", "1e30", *TEXT],
    f"{LOSS}.positive_share": [*SHARE, "0", "1"],
    f"{LOSS}.ratio": ["''", "3", "null", "Sequence", "[]"],
    f"{LOSS}.more": ["1"],
    "model.optimizer": [*CLASS, "null", "torch.nn.Linear", "torch.optim.Optimizer", "torch.optim.lr_scheduler.StepLR"],
    f"{LR}.lr": ["-1", "nan", "inf", "null", *TEXT],
    f"{LR}.betas": ["[2, 3]", "[nan, 0.9]", "3", "[0.9]"],
    f"{LR}.weight_decay": ["-1", "nan", "x"],
    f"{LR}.more": ["1"],
    "model.sampler": CLASS,
    "model.sampler.init_args.rows": COUNT,
    "model.lora": ["x", "3", "{rank: 0}", "{rank: x}", "{alpha: -1}", "{targets: nothing}", "{rang: 1}"],
    "model.activation_checkpointing": ["2", *TEXT],
    "model.threads": [*COUNT, "100000"],
    "model.more": ["1"],
    "data.train": ["''", "null", "3", "nowhere", "/dev/zero", "a/b", "/", "*", "[[]]", "[null]", "[3]", "[]", "{}"],
    "data.val": ["''", "nowhere", "/dev/zero", "/", "a/b:c", "{}"],
    "data.test": ["''", "nowhere", "/dev/zero", "[1]"],
    "data.samples": COUNT,
    "data.val_samples": COUNT,
    "data.sampling": ["3", "x", "{temp: 1}"],
    "data.sampling.temperature": ["-1", "nan", "inf", "1e-30", "null", *TEXT],
    "data.sampling.top_k": ["-1", "1.5", *TEXT],
    "data.sampling.top_p": ["-1", "0", "1.01", "nan", *TEXT],
    "data.sampling.max_new_tokens": COUNT,
    "data.sampling.stop": ["3", "['']", "[3]", "null"],
    "data.batch_size": [*COUNT, str(10**30)],
    "data.microbatch_tokens": [*COUNT, "1"],
    "data.num_workers": ["-1", "1.5", "100000", *TEXT],
    "data.more": ["1"],
    "trainer.accelerator": ["''", "3", "x", "gpu", "tpu", "os.system"],
    "trainer.devices": ["0", "-2", "1.5", "x", "[]"],
    "trainer.num_nodes": ["0", "-1", "x"],
    "trainer.strategy": ["''", "3", "x", "fsdp", "os.system", "deepspeed"],
    "trainer.precision": ["''", "3", "x", "16", "64-true", "bf16-true", "16-mixed", "[]"],
    "trainer.max_epochs": ["-2", "1.5", *TEXT],
    "trainer.min_epochs": ["-1", "x"],
    "trainer.max_steps": ["-2", "1.5", *TEXT],
    "trainer.min_steps": ["-1", "x"],
    "trainer.max_time": ["x", "-1", "00:00", "{eons: 1}"],
    "trainer.gradient_clip_val": ["-1", "nan", "x"],
    "trainer.gradient_clip_algorithm": ["x", "3"],
    "trainer.val_check_interval": ["-1", "0", "nan", "5.5", "x"],
    "trainer.check_val_every_n_epoch": ["0", "-1", "1.5"],
    "trainer.log_every_n_steps": ["-1", "1.5", "x"],
    "trainer.limit_train_batches": ["0", "-1", "3", "0.5", "x"],
    "trainer.limit_val_batches": ["-1", "1.5", "nan", "x"],
    "trainer.overfit_batches": ["-1", "3", "nan", "x"],
    "trainer.fast_dev_run": ["x", "-1"],
    "trainer.num_sanity_val_steps": ["-2", "x"],
    "trainer.accumulate_grad_batches": ["0", "-1", "2", "x"],
    "trainer.reload_dataloaders_every_n_epochs": ["-1", "x"],
    "trainer.profiler": ["x", "3", "os.system"],
    "trainer.plugins": ["x", "3", "os.system"],
    "trainer.logger": [*CLASS, "false", "[]"],
    f"{LOGGER}.save_dir": ["/dev/null", "/dev/null/below", "/proc", "[]", "null"],
    f"{LOGGER}.name": ["[]", "{}"],
    "trainer.callbacks": [*CLASS, "[os.system]", "[{class_path: torch.nn.Linear}]"],
    "trainer.enable_checkpointing": ["x", "false"],
    "trainer.barebones": ["x", "true"],
    **{f"trainer.{name}": ["x"] for name in ("enable_progress_bar", "deterministic", "benchmark", "inference_mode")},
    "trainer.more": ["1"],
    "more": ["1"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]])
def test_wrong_values(run, good, key, value):
    refuse(run, good, f"--{key}={value}")


TEXTS = {
    "nothing": b"",
    "a comment": b"# nothing\n",
    "a list": b"- a\n",
    "a text": b"hello",
    "a number": b"17",
    "null": b"null",
    "no UTF-8": b"model: \xff\xfe",
    "UTF-16": "data: {batch_size: 8}".encode("utf-16"),
    "NUL bytes": b"data:\0 {batch_size: 8}",
    "binary": bytes(range(256)),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(40),
    "a tab": b"data:\n\tbatch_size: 8\n",
    "a bracket": b"data: {batch_size: 8",
    "a quote": b"data: {train: 'x}",
    "a colon": b"data: batch_size: 8",
    "a bad indent": b"data:\n  batch_size: 8\n train: x\n",
    "two documents": b"data: {batch_size: 8}\n---\ndata: {batch_size: 4}\n",
    "an unknown anchor": b"data: *here",
    "a key twice": b"data: {batch_size: 8}\ndata: {samples: 4}\n",
    "a key twice below": b"data:\n  batch_size: 8\n  batch_size: 4\n",
    "a key twice in JSON": b'{"data": {"batch_size": 8, "batch_size": 4}}',
    "a list as a key": b"? [a, b]\n: 3\n",
    "a map as a key": b"{{a: 1}: 2}",
    "an unknown key": b"modle: {policy: x}",
    "an unknown key below": b"trainer: {max_epoch: 3}",
    "a list for a section": b"data: [batch_size, 8]",
    "a text for a section": b"trainer: fast",
    "null for a section": b"model: null",
    "Python": b"data: {batch_size: !!python/object/apply:os.system ['touch PWNED']}",
    "Python at the top": b"!!python/object/apply:os.system ['touch PWNED']",
    "a new Python object": b"model: !!python/object/new:subprocess.Popen [[touch, PWNED]]",
    "a Python name": b"model: {task: !!python/name:os.system }",
    "a Python module": b"model: {task: !!python/module:os }",
    "an unknown tag": b"data: {batch_size: !evil 3}",
    "an expression": b"data: {batch_size: ${oc.env:HOME}}",
    "deep lists": b"data: " + b"[" * 3000,
    "deep maps": b"{data: " * 3000,
    "deep and closed": b"data: {batch_size: " + b"[" * 800 + b"]" * 800 + b"}",
    "a loop": b"data: &a {batch_size: *a}",
    "a loop of lists": b"data: {train: &a [*a]}",
    "billion laughs": b"".join(
        b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1) if i else b"x"] * 9)) for i in range(12)
    ),
    "billion laughs of maps": b"a0: &a0 {x: 1}\n"
    + b"".join(b"a%d: &a%d {x: *a%d, y: *a%d, z: *a%d}\n" % (i, i, i - 1, i - 1, i - 1) for i in range(1, 25)),
    "many digits": b"data: {batch_size: " + b"9" * 5000 + b"}",
    "a long key": b"x" * 100_000 + b": 1",
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_configs(run, good, name):
    Path("bad.yaml").write_bytes(TEXTS[name])
    refuse(run, good, "--config", "bad.yaml")


PLACES = ["FIFO", "socket", "/dev/zero", "folder", "broken link", "link to itself", "terabyte"]


@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_file(run, good, name):
    FILES[name]("bad.yaml")
    refuse(run, good, "--config", "bad.yaml")


def checkpoint(path: str, content: bytes) -> None:
    """A file that looks like one of torch's."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3")


class Bomb:
    """Unpickling it writes a file."""

    def __reduce__(self):
        return os.system, ("touch PWNED",)


CHECKPOINTS = {
    "an empty zip": lambda path: zipfile.ZipFile(path, "w").close(),
    "another zip": lambda path: checkpoint(path, b"x"),
    "a bomb": lambda path: checkpoint(path, pickle.dumps(Bomb())),
    "a bomb of torch's": lambda path: torch.save({"state_dict": Bomb()}, path),
    "a list": lambda path: torch.save([1], path),
    "nothing in it": lambda path: torch.save({}, path),
    "a bare pickle": lambda path: Path(path).write_bytes(pickle.dumps(Bomb())),
}


@pytest.mark.parametrize("name", [*PLACES, "empty", "text", *CHECKPOINTS])
def test_checkpoints(run, good, name):
    (FILES | CHECKPOINTS)[name]("bad.ckpt")
    refuse(run, good, "--ckpt_path", "bad.ckpt")
