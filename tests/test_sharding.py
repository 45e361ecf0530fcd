"""DDP and FSDP2 on two CPU processes: the updates of one process, checkpoints that either resumes,
errors printed once."""

import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, TWO_RANKS, make_policy, make_trajectories, on_ranks, rejected, write
from safetensors.torch import load_file
from test_logprobs import make_policy_of
from torture import curves, summary

import train
from data.arithmetic.imitation import make_tokenizer
from topr.policy import export_policy
from topr.run.checkpoints import updates_before

# the fixture makes all runs of two ranks in one launch
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("sharding")]
DDP = TWO_RANKS["ddp"]
FSDP = TWO_RANKS["fsdp"]
FSDP_ALONE = [str(argument).replace("=2", "=1") for argument in FSDP]
SGD = ["--model.optimizer=torch.optim.SGD", "--model.optimizer.init_args.lr=0.5"]
ADAMW = ["--model.optimizer=torch.optim.AdamW", "--model.optimizer.init_args.lr=3e-4"]
ADAFACTOR = ["--model.optimizer=topr.optim.Adafactor", "--model.optimizer.init_args.lr=3e-4"]
SHORT = ["--trainer.max_steps=3"]
LORA = ["--config", ROOT / "configs" / "lora.yaml", "--model.lora.rank=2", *SHORT]
PAIRS = ["--config", ROOT / "configs" / "loss" / "dpo.yaml", *SGD]
BFLOAT16 = ["--trainer.precision=bf16-mixed", "--trainer.max_steps=1", *SGD]
LAST = "--ckpt_path=last"
STOP = ["--trainer.callbacks+=ranks.Stop", "--trainer.callbacks.init_args.update=4"]
# name: what the run computes, and which ranks compute it
RUNS = {
    "sgd-ddp": [*SGD, *DDP, "--trainer.callbacks+=ranks.CountReductions"],
    "sgd-fsdp": [*SGD, *FSDP],
    "pairs-ddp": [*PAIRS, *DDP],
    "adamw-ddp": [*ADAMW, *DDP],
    "adamw-fsdp": [*ADAMW, *FSDP],
    "adafactor-fsdp": [*ADAFACTOR, *FSDP],
    "lora-ddp": [*LORA, *DDP],
    "lora-fsdp": [*LORA, *FSDP],
    "tied-fsdp": [*SGD, *SHORT, *FSDP],
    "capped-fsdp": [*SGD, *SHORT, *FSDP],
    "bf16-fsdp": [*BFLOAT16, *FSDP],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Policies, and trajectories whose ratios lie on both sides of every limit."""
    folder = tmp_path_factory.mktemp("world")
    capped = make_policy_of("Gemma2")  # its attention has a soft cap: trajectories are padded
    capped.tokenizer = make_tokenizer()
    export_policy(capped, folder / "capped")
    make_policy(folder / "base")
    make_policy(folder / "tied", tie_word_embeddings=True)
    for name in ("base", "tied", "capped"):
        policy = folder / name
        trajectories = make_trajectories(policy, shift=2.0)
        write(folder / f"{name}.parquet", policy, trajectories, policy="another")
    problems = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)]
    (folder / "problems.jsonl").write_text("".join(problems))
    (folder / "bad.jsonl").write_text("{}\n")
    return folder


def command(folder, name: str, *more) -> list:
    """A fit with a name of its own, by which its policy is chosen. Each of its two epochs has
    updates of 11, 11 and 1 trajectories: the last leaves a filler to one of two ranks."""
    policy = policy_of(name)
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", "--trainer.max_epochs=2"]
    data = [f"--model.policy={folder / policy}", f"--data.train={folder / policy}.parquet"]
    problems = [f"--data.{split}={folder / 'problems.jsonl'}" for split in ("val", "test")]
    sizes = ["--data.batch_size=11", "--data.microbatch_tokens=44", "--data.samples=2"]
    trainer = ["--trainer.enable_progress_bar=false", "--trainer.val_check_interval=1.0"]
    saving = [
        "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.callbacks.init_args.every_n_train_steps=1",
    ]
    named = f"--trainer.logger.init_args.name={name}"
    return ["fit", *config, *data, *problems, *sizes, *trainer, *saving, named, *more]


def policy_of(name: str) -> str:
    kind = name.split("-")[0]
    return kind if kind in ("tied", "capped") else "base"


def version(folder, name: str):
    return folder / "runs" / name / "version_0"


def weights(folder, name: str) -> dict[str, torch.Tensor]:
    return load_file(version(folder, name) / "policy" / "model.safetensors")


def assert_close(some: dict, others: dict, bound: float = 1e-6) -> None:
    torch.testing.assert_close(some, others, rtol=0, atol=bound)


@pytest.fixture(scope="module")
def two(files):
    """What two ranks do: the output of each command."""
    stopped = "--trainer.max_steps=4"
    by_one = {
        "one-ddp": command(files, "one-ddp", *ADAMW, stopped),
        "one-fsdp": command(files, "one-fsdp", *ADAMW, stopped, *FSDP_ALONE),
    }
    for codes, output in on_ranks(1, files, *by_one.values()):
        assert codes == [0], output
    (checkpoint,) = (version(files, "one-fsdp") / "checkpoints").iterdir()
    shutil.copytree(checkpoint, files / "half.ckpt")
    next((files / "half.ckpt").glob("*.distcp")).unlink()
    commands = {name: command(files, name, *more) for name, more in RUNS.items()}
    for kind, ranks in (("ddp", DDP), ("fsdp", FSDP)):
        for name, more in ((f"one-{kind}", [LAST]), (f"two-{kind}", [stopped])):
            commands[name] = command(files, name, *ADAMW, *ranks, *more)
        name = f"stopped-{kind}"
        commands[name] = command(files, name, *ADAMW, *ranks, *STOP)
        commands[f"resumed-{kind}"] = command(files, name, *ADAMW, *ranks, LAST)
    bad = [f"--data.test={files / 'bad.jsonl'}", *DDP]
    full = [*ADAMW, *FSDP, "--trainer.callbacks+=ranks.SmallDisk", "--trainer.logger=false"]
    commands["bad"] = command(files, "bad", *bad)
    commands["half"] = command(files, "half", *FSDP, "--ckpt_path=half.ckpt")
    commands["full"] = command(files, "full", *full)
    results = dict(zip(commands, on_ranks(2, files, *commands.values()), strict=True))
    for name, (codes, output) in results.items():
        expected = [0, 0]
        if name.startswith("stopped"):
            expected = [143, 0]
        elif name in ("bad", "half", "full"):
            expected = [2, 0]  # rank 0 prints for all
        assert codes == expected, (name, output)
    return {name: output for name, (_, output) in results.items()}


@pytest.fixture
def alone(run, files):
    """One process makes a run: its folder."""

    def fit(name: str, *more):
        code, _, err = run(train.main, *command(files, name, *more))
        assert code == 0, err
        return run.folder

    return fit


ALONE = {"sgd": SGD, "pairs": PAIRS, "adamw": ADAMW, "adafactor": ADAFACTOR, "lora": LORA}
ALONE |= {"tied": [*SGD, *SHORT], "capped": [*SGD, *SHORT]}


@pytest.mark.parametrize("name", [name for name in RUNS if name != "bf16-fsdp"])
def test_two_ranks_equal_one_process(files, two, alone, name):
    kind = name.split("-")[0]
    folder = alone(kind, *ALONE[kind])
    expected = weights(folder, kind)
    assert_close(weights(files, name), expected)
    before = load_file(files / policy_of(name) / "model.safetensors")
    assert any((expected[key] - before[key]).abs().max() > 1e-4 for key in before)
    mine = curves(version(files, name))
    for tag, values in curves(version(folder, kind)).items():
        assert [step for step, _ in mine[tag]] == [step for step, _ in values], tag
        if tag.startswith(("train/", "gradient/", "log_ratio/")):
            numbers = [[float(value) for _, value in found] for found in (mine[tag], values)]
            np.testing.assert_allclose(*numbers, rtol=1e-3, atol=1e-6, err_msg=tag)
    before = [summary(path)["before"] for path in (version(files, name), version(folder, kind))]
    assert before[0] == before[1]


def test_ddp_reduces_gradients_once_an_update(two):
    assert "reductions, updates, micro-batches: [6, 6, 1" in two["sgd-ddp"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_resume_one_and_one_resumes_two(files, two, alone, kind):
    expected = weights(alone("adamw", *ADAMW), "adamw")
    ranks = FSDP_ALONE if kind == "fsdp" else []
    name = f"two-{kind}"
    ((codes, output),) = on_ranks(1, files, command(files, name, *ADAMW, *ranks, LAST))
    assert codes == [0], output
    assert "resuming" in output
    assert "resuming" in two[f"one-{kind}"]
    for name in (f"one-{kind}", f"two-{kind}"):
        assert_close(weights(files, name), expected)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_sigterm_leaves_a_checkpoint_that_two_ranks_resume_exactly(files, two, kind):
    assert "ended by a signal after update 4" in two[f"stopped-{kind}"]
    assert "resuming runs/stopped" in two[f"resumed-{kind}"]
    assert_close(weights(files, f"stopped-{kind}"), weights(files, f"adamw-{kind}"), 0)
    runs = [version(files, f"{name}-{kind}") for name in ("stopped", "adamw")]
    assert curves(runs[0]) == curves(runs[1])
    assert len(list((runs[0] / "checkpoints").iterdir())) == 1  # preempted.ckpt is gone


def test_bfloat16_shards_make_the_update_of_autocast(files, two, alone):
    before = load_file(files / "base" / "model.safetensors")

    def moved(after: dict) -> torch.Tensor:
        return torch.cat([(after[name] - before[name]).flatten() for name in before])

    autocast = moved(weights(alone("autocast", *BFLOAT16), "autocast"))
    exact = moved(weights(alone("exact", *SGD, "--trainer.max_steps=1"), "exact"))
    sharded = moved(weights(files, "bf16-fsdp"))
    assert (sharded - autocast).norm() < 0.5 * (exact - autocast).norm()


ERRORS = {
    "bad": "data.test: ",
    "half": "cannot be written or read (",
    "full": "cannot be written or read ([Errno 27] File too large)",
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_on_all_ranks_is_printed_once(files, two, name):
    assert two[name].count("error: ") == 1, two[name]
    assert "Traceback" not in two[name]
    assert ERRORS[name] in two[name]
    if name == "full":  # half a checkpoint is not resumed
        checkpoints = (version(files, "arithmetic") / "checkpoints").iterdir()
        assert not any(map(updates_before, checkpoints))
    else:
        assert not version(files, name).exists()


def test_devices_without_a_shard_of_their_own_are_rejected(run, files):
    size = "--trainer.strategy.init_args.data_parallel_size"
    rejected(run, f"{size} 2", *command(files, "base", *FSDP, f"{size}=8"))


def test_a_sharded_checkpoint_without_sharding_is_rejected(run, files, two):
    (checkpoint,) = (version(files, "adamw-fsdp") / "checkpoints").iterdir()
    assert (checkpoint / "meta.pt").is_file()
    assert updates_before(checkpoint) == 6
    words = "is sharded; resume it with --config configs/fsdp.yaml"
    rejected(run, words, *command(files, "base", f"--ckpt_path={checkpoint}"))
