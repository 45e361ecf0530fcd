"""Bad configurations and data files: one clear sentence, exit code 2, no files; the corrected input trains."""

import inspect
import math
import shutil
from copy import deepcopy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, clear_caches, make_policy, make_trajectories, rejected, write
from jsonargparse import Namespace
from lightning.pytorch import Trainer

import train
from topr.io import InputError
from topr.policy import load_tokenizer
from topr.trajectories import batches, read_metadata

CONFIG = ["--config", ROOT / "configs" / "arithmetic.yaml", "--data.val=null", "--data.test=null"]
LOSS, RATE = "--model.loss.init_args", "--model.optimizer.init_args.lr"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A policy and trajectories that train."""
    folder = tmp_path_factory.mktemp("good")
    policy = make_policy(folder / "base")
    return policy, write(folder / "train.parquet", policy, make_trajectories(policy))


def fit(policy, data, *arguments):
    return ["fit", *CONFIG, f"--model.policy={policy}", f"--data.train={data}", *arguments]


def accepted(run, *arguments) -> None:
    code, out, err = run(train.main, *arguments, "--trainer.enable_progress_bar=false")
    assert code == 0, f"{out}\n{err}"


CONFIGURATIONS = {  # wrong, words of the error, corrected
    "an unknown key": ("--data.bach_size=3", "bach_size", "--data.batch_size=3"),
    "an unknown argument of a class": (f"{LOSS}.bplus=3", "bplus", f"{LOSS}.b_plus=3"),
    "a text for a number": ("--data.batch_size=x", "batch_size", "--data.batch_size=8"),
    "a count out of range": ("--data.batch_size=0", "data.batch_size", "--data.batch_size=1"),
    "an argument out of range": (f"{LOSS}.a_minus=2", "0 <= a <= b", f"{LOSS}.a_minus=1"),
    "a seed out of range": (f"--seed_everything={2**32}", "seed_everything is", "--seed_everything=1"),
    "micro-batches": ("--data.microbatch_tokens=9", "microbatch_tokens or drop", "--data.microbatch_tokens=23"),
    "an unknown class": ("--model.loss=topr.losses.TOPPER", "TOPPER", "--model.loss=topr.losses.TOPR"),
    "an abstract class": ("--model.task=topr.tasks.Task", "topr.tasks.Task", "--model.task=topr.tasks.Arithmetic"),
    "a class of another kind": ("--model.loss=topr.tasks.MATH", "topr.tasks.MATH", "--model.loss=topr.losses.TIS"),
    "no optimiser": ("--model.optimizer=torch.nn.Linear", "subclass of Optimizer", "--model.optimizer=torch.optim.SGD"),
    "a negative rate": (f"{RATE}=-1", "model.optimizer does not take its arguments", f"{RATE}=1"),
    "Lightning's place of the optimiser": ("--optimizer=SGD", "here it is --model.optimizer", "--model.optimizer=SGD"),
    "Lightning's place of a schedule": ("--lr_scheduler.x=1", "here it is --model.lr_scheduler", None),
    "a package that is missing": ("--trainer.logger=WandbLogger", "Requirement 'wandb", None),
    "a missing data file": ("--data.train=missing.parquet", "'missing.parquet' is no file", None),
    "no data file": ("--data.train=null", "data.train is not set", None),
    "a missing file of problems": ("--data.val=missing.jsonl", "missing.jsonl cannot be read", None),
    "a missing policy": ("--model.policy=nowhere", "neither a folder nor a model", None),
    "a missing config": ("--config=nowhere.yaml", "File does not exist", None),
    "a missing checkpoint": ("--ckpt_path=nowhere.ckpt", "nowhere.ckpt is incomplete or not a checkpoint", None),
    "a trainer's setting": ("--trainer.accumulate_grad_batches=2", "set data.microbatch_tokens", None),
    "FSDP1": ("--trainer.strategy=fsdp", "configs/fsdp.yaml", None),
    "an unknown device": ("--trainer.accelerator=abacus", "abacus", "--trainer.accelerator=cpu"),
}  # fmt: skip


SLOW = {
    name: [pytest.mark.slow] * (corrected is not None)
    for name, (*_, corrected) in CONFIGURATIONS.items()
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in SLOW.items()])
def test_a_bad_setting_is_rejected_and_the_corrected_one_trains(run, good, name):
    wrong, words, corrected = CONFIGURATIONS[name]
    rejected(run, words, *fit(*good, wrong))
    accepted(run, *fit(*good, *[corrected] * (corrected is not None)))


def test_an_unknown_command_is_rejected(run):
    rejected(run, "fitt", "fitt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"data: {batch_size: \xff}", "more.yaml: 'utf-8' codec can't decode byte 0xff"),
        (b"data: {batch_size: 8", "more.yaml: Problems parsing config"),
        (b"data: {bach_size: 8}", "does not accept option 'data.bach_size'"),
    ],
    ids=["not UTF-8", "no YAML", "an unknown key"],
)
def test_a_config_file_that_cannot_be_parsed_is_rejected(run, good, content, words):
    Path("more.yaml").write_bytes(content)
    rejected(run, words, *fit(*good, "--config=more.yaml"))
    Path("more.yaml").write_bytes(b"data: {batch_size: 4}")
    accepted(run, *fit(*good, "--config=more.yaml"))


def settings(**changes) -> Namespace:
    """The trainer's section of a configuration."""
    defaults = {
        name: value.default for name, value in list(inspect.signature(Trainer).parameters.items())
    }
    return Namespace(defaults | changes)


@pytest.mark.parametrize(
    ("key", "wrong", "words", "supported"),
    [
        ("accumulate_grad_batches", 2, "set data.microbatch_tokens", 1),
        ("callbacks", [Namespace(class_path="lightning.pytorch.callbacks.GradientAccumulationScheduler")],
         "set data.microbatch_tokens", [Namespace(class_path="lightning.pytorch.callbacks.Timer")]),
        ("overfit_batches", 3, "would cut an update", 0),
        ("limit_train_batches", 3, "set trainer.max_steps", 1.0),
        ("logger", False, "leave it on", None),
        ("logger", Namespace(init_args=Namespace(save_dir="/dev/null/runs")), "cannot be written", None),
        ("strategy", "fsdp", "configs/fsdp.yaml", "ddp"),
        ("strategy", Namespace(class_path="lightning.pytorch.strategies.FSDPStrategy"), "configs/fsdp.yaml",
         Namespace(class_path="lightning.pytorch.strategies.ModelParallelStrategy")),
        ("precision", "bf16-true", "float32", "bf16-mixed"),
        ("precision", "16-mixed", "float32", "32-true"),
    ],
)  # fmt: skip
def test_a_setting_of_the_trainer_that_is_not_supported_is_rejected(key, wrong, words, supported):
    with pytest.raises(InputError, match=rf"^trainer\..*{words}"):
        train.check_trainer(settings(**{key: wrong}))
    train.check_trainer(settings(**{key: supported}))


@pytest.mark.parametrize(
    "save",
    [
        lambda path: torch.save({"state_dict": {}}, path),
        lambda path: Path(path).write_bytes(b"PK\x03\x04 cut short"),
        lambda path: Path(path).mkdir(),
    ],
    ids=["of another program", "cut short", "an empty folder"],
)
def test_a_file_that_is_no_checkpoint_is_rejected(run, good, save):
    save("a.ckpt")
    rejected(run, "a.ckpt is incomplete or not a checkpoint", *fit(*good, "--ckpt_path=a.ckpt"))


def test_a_policy_without_weights_is_rejected_by_every_command(run, good, tmp_path):
    policy, data = good
    broken = shutil.copytree(policy, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    rejected(run, "broken' holds no model", *fit(broken, data))
    problems = ROOT / "data" / "arithmetic" / "val.jsonl"
    files = [f"--data.{split}={problems}" for split in ("val", "test", "problems")]
    for command in ("validate", "test", "predict"):
        rejected(
            run,
            "broken' holds no model",
            command,
            *CONFIG,
            *files,
            "--data.out=out",
            f"--model.policy={broken}",
        )


def test_predict_needs_a_folder_of_its_own(run, good, tmp_path):
    policy, data = good
    (tmp_path / "some.jsonl").write_text('{"id": 1, "prompt": "1+1>", "gold": "2"}\n')
    predict = ["predict", *CONFIG, f"--model.policy={policy}", "--data.problems=some.jsonl"]
    predict += ["--data.samples=2", "--data.sampling.max_new_tokens=4"]
    rejected(run, "data.out is not set", *predict)
    (tmp_path / "out").mkdir()
    shutil.copy(data, tmp_path / "out" / "old.parquet")
    rejected(run, "holds other trajectories", *predict, "--data.out=out")
    accepted(run, *predict, "--data.out=new")
    (tmp_path / "some.jsonl").write_text('{"id": 1, "prompt": "1+1>", "gold": "2"}\n' * 2)
    rejected(run, "make ids unique", *predict, "--data.out=newer")


def change(table: pa.Table, column: str, row: int, value) -> pa.Table:
    values = table[column].to_pylist()
    values[row] = value
    index = table.schema.get_field_index(column)
    return table.set_column(
        index, pa.field(column, table[column].type), pa.array(values, table[column].type)
    )


ROWS = [
    (
        "ref_logprobs",
        lambda old: old[:-1],
        "row 5 .*response_ids and ref_logprobs differ in length",
    ),
    ("ref_logprobs", lambda old: [math.nan] + old[1:], "row 5 .*ref_logprobs holds"),
    ("ref_logprobs", lambda old: [0.5] + old[1:], "row 5 .*ref_logprobs holds"),
    ("ref_logprobs", lambda old: [-math.inf] + old[1:], "row 5 .*ref_logprobs holds"),
    ("ref_logprobs", lambda old: [None] + old[1:], "row 5 .*ref_logprobs holds"),
    ("ref_logprobs", lambda old: None, "ref_logprobs"),
    ("reward", lambda old: math.nan, "row 5 .*reward"),
    ("reward", lambda old: None, "reward"),
    ("response_ids", lambda old: [], "row 5 .*the response is empty"),
    ("prompt_ids", lambda old: [], "row 5 .*prompt_ids is empty"),
    ("response_ids", lambda old: [20] + old[1:], "row 5 .*response_ids holds"),
    ("prompt_ids", lambda old: [-1] + old[1:], "row 5 .*prompt_ids holds"),
    ("prompt_ids", lambda old: old * 100, "row 5 .*raise data.microbatch_tokens or drop the row"),
]


@pytest.mark.parametrize(("column", "edit", "words"), ROWS)
def test_a_bad_row_is_named(good, tmp_path, column, edit, words):
    _, data = good
    table, bad = pq.read_table(data), tmp_path / "bad.parquet"
    pq.write_table(change(table, column, 5, edit(table[column][5].as_py())), bad)
    with pytest.raises(InputError, match=f"bad.parquet.*{words}"):
        list(batches(bad, 20, 64))
    pq.write_table(change(table, column, 5, table[column][5].as_py()), bad)
    list(batches(bad, 20, 64))


def test_a_file_that_holds_no_trajectories_is_rejected(good, tmp_path):
    _, data = good
    table, bad = pq.read_table(data), tmp_path / "bad.parquet"
    index = table.schema.get_field_index("reward")

    def check(words: str) -> None:
        with pytest.raises(InputError, match=f"bad.parquet.*{words}"):
            read_metadata(bad)
            list(batches(bad, 20, 64))

    for name in ("reward", "ref_logprobs", "prompt_ids", "group"):
        pq.write_table(table.drop_columns([name]), bad)
        check(name)
    pq.write_table(table.set_column(index, "reward", pa.array(["good"] * len(table))), bad)
    check("")
    pq.write_table(table.set_column(index, "reward", pa.array([True] * len(table))), bad)
    check("write \\+1 and -1")
    pq.write_table(table.slice(0, 0), bad)
    check("holds no trajectory")
    pq.write_table(table.replace_schema_metadata({"topr": '{"schema": 9}'}), bad)
    check("schema 9")
    bad.write_bytes(data.read_bytes()[:-100])
    check("")
    bad.write_text('{"prompt": "1"}')
    check("")
    shutil.copy(data, bad)
    read_metadata(bad)
    list(batches(bad, 20, 64))


def test_a_bad_data_file_ends_training_before_it_starts(run, good, tmp_path):
    policy, data = good
    table = pq.read_table(data)
    pq.write_table(change(table, "reward", 5, math.nan), tmp_path / "bad.parquet")
    rejected(run, "row 5 (prompt '1')", *fit(policy, f"[{data},bad.parquet]"))
    (tmp_path / "bad.parquet").write_bytes(data.read_bytes()[:-100])
    rejected(run, "bad.parquet", *fit(policy, "bad.parquet"))
    shutil.copy(data, tmp_path / "bad.parquet")
    accepted(run, *fit(policy, "bad.parquet"))


def test_numbers_of_another_width_are_accepted(run, good, tmp_path):
    policy, data = good
    table = pq.read_table(data)
    wide = {
        "prompt_ids": pa.large_list(pa.int64()),
        "ref_logprobs": pa.list_(pa.float64()),
        "reward": pa.int64(),
    }
    for name, kind in {**wide, "group": pa.large_string()}.items():
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
    pq.write_table(table, tmp_path / "wide.parquet")
    accepted(run, *fit(policy, f"[wide.parquet,{data}]"))


def test_a_tokenizer_that_does_not_match_is_rejected(run, good, tmp_path):
    policy, data = good
    other = shutil.copytree(policy, tmp_path / "other")
    tokenizer = deepcopy(load_tokenizer(str(policy)))
    tokenizer.add_tokens(["x"])
    tokenizer.save_pretrained(other)
    rejected(run, "another tokenizer", *fit(other, data))
    load_tokenizer(str(policy)).save_pretrained(other)
    clear_caches()
    accepted(run, *fit(other, data))


def test_log_probs_must_match_the_policy_that_a_file_names(run, good, tmp_path):
    policy, _ = good
    shifted = make_trajectories(policy, shift=0.5)
    wrong = write(tmp_path / "wrong.parquet", policy, shifted)
    assert "worst: row" in rejected(run, "score the responses again", *fit(policy, wrong))
    another = write(tmp_path / "another.parquet", policy, shifted, policy="another")
    accepted(run, *fit(policy, another))
    unknown = write(
        tmp_path / "unknown.parquet",
        policy,
        make_trajectories(policy, 9),
        policy=None,
        precision=None,
    )
    rejected(
        run, "score the responses again", *fit(policy, f"[{wrong},{unknown}]")
    )  # the others do not excuse it


@pytest.mark.slow
def test_log_probs_in_bfloat16_may_differ_a_little(run, good, tmp_path):
    policy, _ = good
    far = write(
        tmp_path / "far.parquet",
        policy,
        make_trajectories(policy, shift=3.0),
        precision="bf16-mixed",
    )
    sentence = rejected(run, "score the responses again", *fit(policy, far))
    assert "the median |log pi - log mu| per token" in sentence
    rough = write(
        tmp_path / "rough.parquet",
        policy,
        make_trajectories(policy, shift=0.1),
        precision="bf16-mixed",
    )
    accepted(run, *fit(policy, rough))


def test_rewards_of_one_sign_are_rejected_or_warned_about(run, good, tmp_path):
    policy, _ = good
    trajectories = make_trajectories(policy)
    for trajectory in trajectories:
        trajectory.reward = 1.0
    ones = write(tmp_path / "ones.parquet", policy, trajectories)
    rejected(run, "every reward is 1", *fit(policy, ones, f"{LOSS}.positive_share=0.2"))
    with pytest.warns(UserWarning, match="only positives are learned"):
        accepted(run, *fit(policy, ones))
    for trajectory in trajectories:
        trajectory.reward = -1.0
    minus = write(tmp_path / "minus.parquet", policy, trajectories)
    overlay = ROOT / "configs" / "loss" / "positives_only.yaml"
    rejected(run, "no trajectory has a gradient", *fit(policy, minus, "--config", overlay))


def test_an_update_without_effect_is_warned_about(run, good):
    with pytest.warns(UserWarning, match="has not moved"):
        accepted(run, *fit(*good, "--data.batch_size=8", f"{RATE}=0"))


def test_an_update_with_an_effect_is_not_warned_about(run, good, recwarn):
    accepted(run, *fit(*good, "--data.batch_size=8"))
    assert not [str(w.message) for w in recwarn if "has not moved" in str(w.message)]
