"""FSDP2 on two CPU processes: the update of one process, checkpoints that either resumes, errors printed once."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, TWO_RANKS, make_policy, make_trajectories, on_ranks, rejected, write
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from topr.callbacks.resume import updates
from topr.policy import load_policy

# the fixture makes twenty runs, for all tests of this file
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("sharding")]
FSDP = {2: TWO_RANKS["fsdp"], 1: [arg.replace("=2", "=1") for arg in map(str, TWO_RANKS["fsdp"])]}
BASE = [
    "fit", "--config", ROOT / "configs" / "arithmetic.yaml", "--data.val=null", "--data.test=null",
    "--trainer.enable_progress_bar=false", "--data.batch_size=10", "--data.microbatch_tokens=60",
    "--model.optimizer=torch.optim.AdamW", "--model.optimizer.init_args.lr=3e-4",
]  # fmt: skip
LONG = [
    "--trainer.max_epochs=7"
]  # 21 updates of 10, 10 and 3 trajectories: the last leaves fillers on either rank
SHORT = ["--trainer.max_steps=3"]
STOPPED, RESUMED = [*LONG, "--trainer.max_steps=10"], [*LONG, "--ckpt_path=last"]
ADAFACTOR = [*LONG, "--model.optimizer=topr.optim.Adafactor", "--model.optimizer.init_args.lr=3e-4"]
SGD = [
    "--trainer.max_steps=1",
    "--model.optimizer=torch.optim.SGD",
    "--model.optimizer.init_args.lr=0.5",
]
TEST = [f"--data.test={ROOT / 'data' / 'arithmetic' / 'val.jsonl'}", "--data.samples=1"]
SAVE = [
    "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.init_args.every_n_train_steps=1",
]
RUNS = {
    "adamw": LONG,
    "adafactor": [*ADAFACTOR, *TEST],
    "lora": ["--config", ROOT / "configs" / "lora.yaml", "--model.lora.rank=2", *SHORT],
    "bf16": ["--trainer.precision=bf16-mixed", *TEST, *SGD],
    "tied": SHORT,
    "compiled": [*SHORT, "--model.compile=true"],  # by a compiler that changes nothing, see `two`
    "renamed": SHORT,  # weights under names without the model's prefix, which transformers reads, too
}
RANK_ZERO = [2, 0]  # exit codes of an error that rank 0 prints for all


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Policies, and trajectories whose ratios lie on both sides of every limit."""
    folder = tmp_path_factory.mktemp("world")
    policies = {
        name: make_policy(folder / name, tie_word_embeddings=name == "tied")
        for name in ("base", "tied")
    }
    for name in ("renamed", "uneven"):
        policies[name] = make_policy(folder / name)
        values = load_file(policies[name] / "model.safetensors")
        if name == "renamed":
            values = {key.removeprefix("model."): value for key, value in values.items()}
        else:  # norms that bfloat16 would round
            values = {
                key: value * 1.001 if "norm" in key else value for key, value in values.items()
            }
        save_file(values, policies[name] / "model.safetensors", {"format": "pt"})
    data = {
        name: write(
            folder / f"{name}.parquet",
            policy,
            make_trajectories(policy, shift=2.0),
            policy="another",
        )
        for name, policy in policies.items()
    }
    return folder, policies, data


def command(files, name: str, *more) -> list:
    """A fit with a name of its own, by which its policy is chosen."""
    _, policies, data = files
    kind = name if name in policies else "base"
    given = [f"--model.policy={policies[kind]}", f"--data.train={data[kind]}"]
    return [*BASE, *given, f"--trainer.logger.init_args.name={name}", *SAVE, *more]


@pytest.fixture(scope="module")
def two(files):
    """Everything that two ranks do, in one launch: the folder of the runs; exit codes and output of each command."""
    folder = files[0]
    stopped, uneven = on_ranks(
        1,
        folder,
        command(files, "saved-by-one", *FSDP[1], *STOPPED),
        command(files, "uneven", *FSDP[1], *RUNS["bf16"]),
    )
    assert stopped[0] == uneven[0] == [0], stopped[1] + uneven[1]
    (whole,) = (folder / "runs" / "saved-by-one" / "version_0" / "checkpoints").iterdir()
    shutil.copytree(whole, folder / "half.ckpt")
    next((folder / "half.ckpt").glob("*.distcp")).unlink()
    (folder / "bad.jsonl").write_text("{}\n")
    commands = {name: command(files, name, *FSDP[2], *more) for name, more in RUNS.items()}
    commands |= {
        "saved-by-two": command(files, "saved-by-two", *FSDP[2], *STOPPED),
        "saved-by-one": command(files, "saved-by-one", *FSDP[2], *RESUMED),
        "lora stopped": command(
            files, "lora-stopped", *FSDP[2], *RUNS["lora"], "--trainer.max_steps=2"
        ),
        "lora resumed": command(files, "lora-stopped", *FSDP[2], *RUNS["lora"], "--ckpt_path=last"),
        "preempted": {"arguments": command(files, "preempted", *FSDP[2], *LONG), "sigterm": 7},
        "resumed": command(files, "preempted", *FSDP[2], *RESUMED),
        "bad data": command(files, "bad", *FSDP[2], *SHORT, f"--data.test={folder / 'bad.jsonl'}"),
        "half": command(files, "half", *FSDP[2], "--ckpt_path=half.ckpt"),
        "full": {
            "arguments": command(files, "full", *FSDP[2], "--trainer.max_steps=1"),
            "largest_shard": 2000,
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # test_compile.py has a real one
        results = on_ranks(2, folder, *commands.values())
    found = dict(zip(commands, results, strict=True))
    expected = {"preempted": [143, 0], "bad data": RANK_ZERO, "half": RANK_ZERO, "full": RANK_ZERO}
    for name, (codes, output) in found.items():
        assert codes == expected.get(name, [0, 0]), (name, output)
    return folder, {name: output for name, (_, output) in found.items()}


def one(run, files, name: str, *more) -> dict[str, torch.Tensor]:
    """The weights that one process without sharding makes."""
    code, _, err = run(train.main, *command(files, name, *more))
    assert code == 0, err
    return weights(run.folder, name)


def weights(folder, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / name / "version_0" / "policy" / "model.safetensors")


def close(some: dict, others: dict, bound: float = 1e-6) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lora", "tied"])
def test_two_ranks_equal_one_process(run, files, two, name):
    alone = one(run, files, name, *RUNS[name])
    close(alone, weights(two[0], name))
    before = load_file(files[1].get(name, files[1]["base"]) / "model.safetensors")
    assert any((alone[key] - before[key]).abs().max() > 1e-4 for key in before)
    events = [
        EventAccumulator(str(path / "runs" / name / "version_0")).Reload()
        for path in (run.folder, two[0])
    ]
    for tag in (
        "train/loss",
        "train/reward",
        "train/objective",
        "gradient/norm",
        "gradient/positive_share",
    ):
        values, others = ([event.value for event in found.Scalars(tag)] for found in events)
        assert len(values) == (3 if RUNS[name][-1] == SHORT[-1] else 21)
        np.testing.assert_allclose(others, values, rtol=1e-3, atol=1e-6)


def test_layers_are_found_to_compile_once_they_are_sharded(run, files, two):
    close(one(run, files, "compiled", *SHORT), weights(two[0], "compiled"))


def test_a_sharded_run_resumes_with_its_adapters(two):
    close(weights(two[0], "lora"), weights(two[0], "lora-stopped"), 0)


def test_weights_under_other_names_are_loaded_whole_and_sharded_then(run, files, two):
    close(one(run, files, "renamed", *RUNS["renamed"]), weights(two[0], "renamed"))
    # the others, and tied ones, are read by shards
    assert [
        name for name, output in two[1].items() if "so every rank loads all of them" in output
    ] == ["renamed"]


def test_bfloat16_shards_make_the_update_of_autocast(run, files, two):
    alone, sharded = one(run, files, "bf16", *RUNS["bf16"]), weights(two[0], "bf16")
    exact, before = one(run, files, "base", *SGD), load_file(files[1]["base"] / "model.safetensors")
    assert {value.dtype for value in sharded.values()} == {torch.float32}

    def moved(after: dict) -> torch.Tensor:
        return torch.cat([(after[name] - before[name]).flatten() for name in before])

    def apart(some: dict, others: dict) -> float:
        return ((moved(some) - moved(others)).norm() / moved(some).norm()).item()

    assert apart(alone, sharded) < 0.5 * apart(alone, exact)  # nearer than rounding moves either


def test_bfloat16_shards_leave_norms_as_autocast_does(run, files, two):
    close(one(run, files, "uneven", *RUNS["bf16"]), weights(two[0], "uneven"))


def test_two_ranks_resume_one_and_one_resumes_two(run, files, two):
    folder, outputs = two
    ((codes, output),) = on_ranks(1, folder, command(files, "saved-by-two", *FSDP[1], *RESUMED))
    assert codes == [0] and "resuming" in output and "resuming" in outputs["saved-by-one"], output
    alone = one(run, files, "adamw", *LONG)
    for saved in ("saved-by-two", "saved-by-one"):
        close(alone, weights(folder, saved))
        assert (
            json.loads((folder / "runs" / saved / "version_0" / "summary.json").read_text())[
                "steps"
            ]
            == 21
        )


def test_sigterm_leaves_shards_that_resume_exactly(two):
    folder, outputs = two
    assert "ended by a signal after update 8" in outputs["preempted"]
    assert "resuming runs/preempted/version_0/checkpoints/preempted.ckpt" in outputs["resumed"]
    close(weights(folder, "adamw"), weights(folder, "preempted"), 0)
    assert not (
        folder / "runs" / "preempted" / "version_0" / "checkpoints" / "preempted.ckpt"
    ).exists()


def test_an_exported_shard_is_a_whole_policy(files, two):
    folder = two[0] / "runs" / "adamw" / "version_0"
    ids = torch.tensor([[5, 6, 7, 8]])
    exported = load_policy(str(folder / "policy")).logits(ids)
    assert exported.isfinite().all()
    (checkpoint,) = (folder / "checkpoints").iterdir()  # the last, of shards
    assert (checkpoint / "meta.pt").is_file() and len(list(checkpoint.glob("*.distcp"))) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_trains_shards_in_bfloat16_and_resumes(files, tmp_path):
    on_gpu = [*FSDP[1], "--trainer.accelerator=cuda", "--trainer.precision=bf16-mixed"]
    given = [command(files, "whole", *on_gpu, *LONG)]
    given += [command(files, "stopped", *on_gpu, *more) for more in (STOPPED, RESUMED)]
    results = on_ranks(1, tmp_path, *given)
    assert [codes for codes, _ in results] == [[0]] * 3 and "resuming" in results[-1][1], results
    close(weights(tmp_path, "whole"), weights(tmp_path, "stopped"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad data", "data.test: "),
        ("half", "half.ckpt cannot be loaded ([Errno 2]"),
        ("full", "cannot be written ([Errno 27] File too large)"),
    ],
)
def test_an_error_on_all_ranks_is_printed_once(two, name, words):
    folder, outputs = two
    assert outputs[name].count("error: ") == 1 and "Traceback" not in outputs[name], outputs[name]
    assert words in outputs[name]
    if name == "full":  # no half of a checkpoint
        assert not list((folder / "runs" / "full" / "version_0" / "checkpoints").iterdir())
    else:
        assert not (folder / "runs" / name.split()[0] / "version_0").exists()


@pytest.mark.parametrize("sizes", [(8, 1), (1, 2)])
def test_devices_without_a_shard_of_their_own_are_rejected(run, files, sizes):
    names = ("data_parallel_size", "tensor_parallel_size")
    given = [
        f"--trainer.strategy.init_args.{name}={size}"
        for name, size in zip(names, sizes, strict=True)
    ]
    words = "--trainer.strategy.init_args.data_parallel_size 2"
    rejected(run, words, *command(files, "base", *FSDP[2], *given))


def test_a_sharded_checkpoint_without_sharding_is_rejected(run, files, two):
    (checkpoint,) = (two[0] / "runs" / "adamw" / "version_0" / "checkpoints").iterdir()
    assert updates(checkpoint) == 21
    words = "is sharded; resume it with --config configs/fsdp.yaml"
    rejected(run, words, *command(files, "base", f"--ckpt_path={checkpoint}"))
