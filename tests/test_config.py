"""Bad configurations and data files: one clear sentence, exit code 2, no files.

The corrected input trains."""

import inspect
import math
import shutil
from copy import deepcopy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import ROOT, clear_caches, make_policy, make_trajectories, rejected, slow, write

import evaluate
import train
from topr import advantages, losses
from topr.policy.files import load_tokenizer

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "configs" / "loss").glob("*.yaml"))
CONFIG = ["--config", ROOT / "configs" / "arithmetic.yaml", "--data.val=null", "--data.test=null"]
LOSS = "--model.loss.init_args"
RATE = "--model.optimizer.init_args.lr"
LOGGER = "--trainer.logger.init_args"


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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_parsed(run, config):
    code, out, err = run(train.main, "fit", *CONFIG, "--config", config, "--print_config")
    assert code == 0, err
    assert "class_path: topr.losses." in out


def chosen(package, section: dict) -> None:
    """Make the object of a section, which must write every argument."""
    kind = getattr(package, section["class_path"].rpartition(".")[2])
    arguments = section.get("init_args", {})
    if "__init__" in vars(kind):
        assert set(arguments) == set(inspect.signature(kind).parameters)
    kind(**arguments)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_every_overlay_is_parsed_and_writes_every_argument(run, overlay):
    code, _, err = run(train.main, "fit", *CONFIG, "--config", overlay, "--print_config")
    assert code == 0, err
    written = yaml.safe_load(overlay.read_text())
    chosen(losses, written["model"]["loss"])
    if "advantage" in written.get("data", {}):
        chosen(advantages, written["data"]["advantage"])


def test_a_misspelt_option_of_evaluate_is_rejected(run):
    rejected(run, "--samplez", "--samplez=3", main=evaluate.main)


CONFIGURATIONS = {  # wrong, words of the error, corrected
    "an unknown key": ("--data.bach_size=3", "bach_size", "--data.batch_size=3"),
    "an unknown argument of a class": (f"{LOSS}.bplus=3", "bplus", f"{LOSS}.b_plus=3"),
    "a text for a number": ("--data.batch_size=x", "batch_size", "--data.batch_size=8"),
    "a count out of range": ("--data.batch_size=0", "data.batch_size", "--data.batch_size=1"),
    "an argument out of range": (f"{LOSS}.a_minus=2", "0 <= a <= b", f"{LOSS}.a_minus=1"),
    "a negative seed": ("--seed_everything=-1", "data.seed", "--seed_everything=1"),
    "a seed out of range": ("--seed_everything=5000000000", "is no valid seed", None),
    "micro-batches": (
        "--data.microbatch_tokens=9",
        "data.microbatch_tokens",
        "--data.microbatch_tokens=23",
    ),
    "an unknown class": (
        "--model.loss=topr.losses.TOPPER",
        "TOPPER",
        "--model.loss=topr.losses.TOPR",
    ),
    "an abstract class": (
        "--model.task=topr.tasks.Task",
        "topr.tasks.Task",
        "--model.task=topr.tasks.Arithmetic",
    ),
    "a class of another kind": (
        "--model.loss=topr.tasks.MATH",
        "topr.tasks.MATH",
        "--model.loss=topr.losses.TIS",
    ),
    "no optimiser": (
        "--model.optimizer=torch.nn.Linear",
        "subclass of Optimizer",
        "--model.optimizer=torch.optim.SGD",
    ),
    "a negative rate": (f"{RATE}=-1", "does not take its arguments", f"{RATE}=1"),
    "Lightning's place of the optimiser": (
        "--optimizer=SGD",
        "--optimizer",
        "--model.optimizer=SGD",
    ),
    "a package that is missing": ("--trainer.logger=CometLogger", "comet", None),
    "a missing data file": ("--data.train=missing.parquet", "'missing.parquet' is no file", None),
    "no data file": ("--data.train=null", "data.train is not set", None),
    "a missing file of problems": (
        "--data.val=missing.jsonl",
        "missing.jsonl cannot be read",
        None,
    ),
    "a missing policy": ("--model.policy=nowhere", "neither a folder nor a model", None),
    "a missing config": ("--config=nowhere.yaml", "File does not exist", None),
    "a missing checkpoint": (
        "--ckpt_path=nowhere.ckpt",
        "nowhere.ckpt is incomplete or not a checkpoint",
        None,
    ),
    "a trainer's setting": ("--trainer.accumulate_grad_batches=2", "set data.batch_size", None),
    "clipping by the trainer": (
        "--trainer.gradient_clip_val=1",
        "set model.gradient_clip_val",
        None,
    ),
    "clipping to nothing": (
        "--model.gradient_clip_val=0",
        "model.gradient_clip_val",
        "--model.gradient_clip_val=null",
    ),
    "half precision": (
        "--trainer.precision=bf16-true",
        "32-true or bf16-mixed",
        "--trainer.precision=bf16-mixed",
    ),
    "a folder that cannot be written": (
        f"{LOGGER}.save_dir=/dev/null/runs",
        "cannot be written",
        None,
    ),
    "FSDP1": ("--trainer.strategy=fsdp", "FSDP", None),
    "an unknown device": ("--trainer.accelerator=abacus", "abacus", "--trainer.accelerator=cpu"),
}


@pytest.mark.parametrize(
    "name",
    [name if corrected is None else slow(name) for name, (*_, corrected) in CONFIGURATIONS.items()],
)
def test_a_bad_setting_is_rejected_and_the_corrected_one_trains(run, good, name):
    wrong, words, corrected = CONFIGURATIONS[name]
    rejected(run, words, *fit(*good, wrong))
    accepted(run, *fit(*good, *[corrected] * (corrected is not None)))


def test_an_unknown_command_is_rejected(run):
    rejected(run, "fitt", "fitt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"data: {batch_size: 8", "Problems parsing config"),
        (b"data: {bach_size: 8}", "does not accept option 'data.bach_size'"),
    ],
    ids=["no YAML", "an unknown key"],
)
def test_a_config_file_that_cannot_be_parsed_is_rejected(run, good, content, words):
    Path("more.yaml").write_bytes(content)
    rejected(run, words, *fit(*good, "--config=more.yaml"))
    Path("more.yaml").write_bytes(b"data: {batch_size: 4}")
    accepted(run, *fit(*good, "--config=more.yaml"))


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
    rejected(run, "holds responses of another", *predict, "--data.out=out")
    accepted(run, *predict, "--data.out=new")
    (tmp_path / "some.jsonl").write_text('{"id": 1, "prompt": "1+1>", "gold": "2"}\n' * 2)
    rejected(run, "make ids unique", *predict, "--data.out=newer")


def test_a_bad_data_file_ends_training_before_it_starts(run, good, tmp_path):
    policy, data = good
    table = pq.read_table(data)
    rewards = table["reward"].to_pylist()
    rewards[5] = math.nan
    column = table.schema.get_field_index("reward")
    wrong = table.set_column(column, table.field(column), pa.array(rewards, pa.float32()))
    pq.write_table(wrong, tmp_path / "bad.parquet")
    rejected(run, "bad.parquet, row 5: ", *fit(policy, f"[{data},bad.parquet]"))
    (tmp_path / "bad.parquet").write_bytes(data.read_bytes()[:-100])
    rejected(run, "bad.parquet", *fit(policy, "bad.parquet"))
    shutil.copy(data, tmp_path / "bad.parquet")
    accepted(run, *fit(policy, "bad.parquet"))


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
    share = ["--data.advantage=topr.advantages.PositiveShare", "--data.advantage.share=0.2"]
    rejected(run, "all rewards are equal", *fit(policy, ones, *share))
    with pytest.warns(UserWarning, match="only positives are learned"):
        accepted(run, *fit(policy, ones))
    for trajectory in trajectories:
        trajectory.reward = -1.0
    minus = write(tmp_path / "minus.parquet", policy, trajectories)
    with pytest.warns(UserWarning, match="nothing is learned from positives"):
        accepted(run, *fit(policy, minus))
