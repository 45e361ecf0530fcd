"""FSDP2 on two CPU processes: the update of one process, checkpoints that either resumes, refusals told once."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, TWO_RANKS, make_policy, make_trajectories, on_ranks, write
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from topr.policy import load_policy

pytestmark = pytest.mark.timeout(900)  # its fixture makes a dozen runs
FSDP = {2: TWO_RANKS["fsdp"], 1: [arg.replace("=2", "=1") for arg in map(str, TWO_RANKS["fsdp"])]}
BASE = [
    "fit", "--config", ROOT / "configs" / "arithmetic.yaml", "--data.val=null", "--data.test=null",
    "--trainer.enable_progress_bar=false", "--data.batch_size=10", "--data.microbatch_tokens=60",
    "--model.optimizer=torch.optim.AdamW", "--model.optimizer.init_args.lr=3e-4",
]  # fmt: skip
LONG = ["--trainer.max_epochs=7"]  # 21 updates of 10, 10 and 3 trajectories: the last leaves fillers on either rank
SHORT = ["--trainer.max_steps=3"]
STOPPED, RESUMED = [*LONG, "--trainer.max_steps=10"], [*LONG, "--ckpt_path=last"]
ADAFACTOR = [*LONG, "--model.optimizer=topr.optim.Adafactor", "--model.optimizer.init_args.lr=3e-4"]
SGD = ["--trainer.max_steps=1", "--model.optimizer=torch.optim.SGD", "--model.optimizer.init_args.lr=0.5"]
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
    "compiled": [*SHORT, "--model.compile=true"],  # by a compiler that does nothing, see `two`
    "renamed": SHORT,  # weights under names without the model's prefix, which transformers reads, too
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Policies, and trajectories whose ratios lie on both sides of every limit."""
    folder = tmp_path_factory.mktemp("world")
    policies = {name: make_policy(folder / name, tie_word_embeddings=name == "tied") for name in ("base", "tied")}
    policies["renamed"] = make_policy(folder / "renamed")
    weights = load_file(policies["renamed"] / "model.safetensors")
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(weights, policies["renamed"] / "model.safetensors", {"format": "pt"})
    data = {
        name: write(folder / f"{name}.parquet", policy, make_trajectories(policy, shift=2.0), policy="another")
        for name, policy in policies.items()
    }
    return folder, policies, data


def command(files, name: str, *more) -> list:
    """A fit with a name of its own."""
    _, policies, data = files
    kind = name if name in policies else "base"
    given = [f"--model.policy={policies[kind]}", f"--data.train={data[kind]}"]
    return [*BASE, *given, f"--trainer.logger.init_args.name={name}", *SAVE, *more]


@pytest.fixture(scope="module")
def two(files):
    """What two ranks make, of everything in one launch; among it a run stopped by them and one resumed by them."""
    folder = files[0]
    (folder / "one").mkdir()
    stop = on_ranks(1, folder / "one", command(files, "saved-by-one", *FSDP[1], *STOPPED))
    assert stop[0] == [[0]], stop[1]
    (folder / "one" / "runs").rename(folder / "runs")
    commands = [command(files, name, *FSDP[2], *more) for name, more in RUNS.items()]
    commands += [
        command(files, "saved-by-two", *FSDP[2], *STOPPED),
        command(files, "saved-by-one", *FSDP[2], *RESUMED),
        command(files, "lora-stopped", *FSDP[2], *RUNS["lora"], "--trainer.max_steps=2"),
        command(files, "lora-stopped", *FSDP[2], *RUNS["lora"], "--ckpt_path=last"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # test_compile.py has a real one
        codes, told = on_ranks(2, folder, *commands)
    assert codes == [[0, 0]] * len(commands), told
    return folder, told


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
    events = [EventAccumulator(str(path / "runs" / name / "version_0")).Reload() for path in (run.folder, two[0])]
    for tag in ("train/loss", "train/reward", "train/objective", "gradient/norm", "gradient/positive_share"):
        told, others = ([event.value for event in found.Scalars(tag)] for found in events)
        assert len(told) == (3 if RUNS[name][-1] == SHORT[-1] else 21)
        np.testing.assert_allclose(others, told, rtol=1e-3, atol=1e-6)


def test_layers_are_found_to_compile_once_they_are_sharded(run, files, two):
    close(one(run, files, "compiled", *SHORT), weights(two[0], "compiled"))


def test_a_sharded_run_resumes_with_its_adapters(two):
    close(weights(two[0], "lora"), weights(two[0], "lora-stopped"), 0)


def test_weights_under_other_names_are_loaded_whole_and_sharded_then(run, files, two):
    close(one(run, files, "renamed", *RUNS["renamed"]), weights(two[0], "renamed"))
    assert two[1].count("so every rank loads all of them") == 1  # the others', and tied ones, are read by shards


def test_bfloat16_shards_make_the_update_of_autocast(run, files, two):
    alone, sharded = one(run, files, "bf16", *RUNS["bf16"]), weights(two[0], "bf16")
    exact, before = one(run, files, "base", *SGD), load_file(files[1]["base"] / "model.safetensors")
    assert {value.dtype for value in sharded.values()} == {torch.float32}

    def moved(after: dict) -> torch.Tensor:
        return torch.cat([(after[name] - before[name]).flatten() for name in before])

    def apart(some: dict, others: dict) -> float:
        return ((moved(some) - moved(others)).norm() / moved(some).norm()).item()

    assert apart(alone, sharded) < 0.5 * apart(alone, exact)  # nearer than rounding moves either


def test_bfloat16_shards_leave_norms_as_autocast_does(run, files):
    policy = run.folder / "uneven"
    shutil.copytree(files[1]["base"], policy)
    weights_of = load_file(policy / "model.safetensors")
    uneven = {name: value * 1.001 if "norm" in name else value for name, value in weights_of.items()}
    save_file(uneven, policy / "model.safetensors", {"format": "pt"})
    given = [*RUNS["bf16"], f"--model.policy={policy}"]
    alone = one(run, files, "bf16", *given)
    codes, told = on_ranks(1, run.folder, command(files, "sharded", *FSDP[1], *given))
    assert codes == [[0]], told
    close(alone, weights(run.folder, "sharded"))


@pytest.mark.parametrize("saved", ["two", "one"])
def test_either_number_of_ranks_resumes_the_other(run, files, two, saved):
    folder = two[0]
    if saved == "two":  # and now by one
        codes, told = on_ranks(1, folder, command(files, "saved-by-two", *FSDP[1], *RESUMED))
        assert codes == [[0]] and "resuming" in told, told
    close(one(run, files, "adamw", *LONG), weights(folder, f"saved-by-{saved}"))
    summary = json.loads((folder / "runs" / f"saved-by-{saved}" / "version_0" / "summary.json").read_text())
    assert summary["steps"] == 21


def test_sigterm_leaves_shards_that_are_gone_on_with(files, two):
    folder, name = two[0], "preempted"
    ended, resumed = (command(files, name, *FSDP[2], *more) for more in (LONG, RESUMED))
    codes, told = on_ranks(2, folder, ended, resumed, sigterm=7)
    assert codes == [[143, 0], [0, 0]] and "ended by SIGTERM after update 8" in told, told
    assert f"resuming runs/{name}/version_0/checkpoints/preempted.ckpt" in told
    close(weights(folder, "adamw"), weights(folder, name), 0)
    assert not (folder / "runs" / name / "version_0" / "checkpoints" / "preempted.ckpt").exists()


def test_an_exported_shard_is_a_whole_policy(files, two):
    folder = two[0] / "runs" / "adamw" / "version_0"
    ids = torch.tensor([[5, 6, 7, 8]])
    exported = load_policy(str(folder / "policy"))(ids).logits
    assert exported.isfinite().all()
    (checkpoint,) = (folder / "checkpoints").iterdir()  # the last, of shards
    assert (checkpoint / "meta.pt").is_file() and len(list(checkpoint.glob("*.distcp"))) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_trains_shards_in_bfloat16_and_resumes(files, tmp_path):
    on_gpu = [*FSDP[1], "--trainer.accelerator=cuda", "--trainer.precision=bf16-mixed"]
    given = [command(files, "whole", *on_gpu, *LONG)]
    given += [command(files, "stopped", *on_gpu, *more) for more in (STOPPED, RESUMED)]
    codes, told = on_ranks(1, tmp_path, *given)
    assert codes == [[0]] * 3 and "resuming" in told, told
    close(weights(tmp_path, "whole"), weights(tmp_path, "stopped"))


def test_bad_data_is_told_once_by_all_ranks(files, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    bad = command(files, "bad", *FSDP[2], f"--data.test={tmp_path / 'a.jsonl'}", *SHORT)
    codes, told = on_ranks(2, tmp_path, bad)
    assert codes == [[2, 0]]
    assert told.count("error: ") == 1 and "Traceback" not in told, told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("sizes", [(8, 1), (1, 2)])
def test_devices_without_a_shard_of_their_own_are_refused(run, files, sizes):
    names = ("data_parallel_size", "tensor_parallel_size")
    given = [f"--trainer.strategy.init_args.{name}={size}" for name, size in zip(names, sizes, strict=True)]
    code, _, err = run(train.main, *command(files, "base", *FSDP[2], *given))
    assert code == 2 and "--trainer.strategy.init_args.data_parallel_size 2" in err.splitlines()[-1], err
    assert not (run.folder / "runs").exists()


def test_a_sharded_checkpoint_without_sharding_is_refused(run, files, two):
    checkpoint = two[0] / "runs" / "adamw" / "version_0" / "checkpoints"
    (checkpoint,) = checkpoint.iterdir()
    code, _, err = run(train.main, *command(files, "base", f"--ckpt_path={checkpoint}"))
    assert code == 2 and "is sharded; go on with --config configs/fsdp.yaml" in err.splitlines()[-1], err
    assert not (run.folder / "runs").exists()


def test_a_checkpoint_that_lacks_a_shard_is_told_once(files, two, tmp_path):
    (whole,) = (two[0] / "runs" / "adamw" / "version_0" / "checkpoints").iterdir()
    shutil.copytree(whole, tmp_path / "half.ckpt")
    next((tmp_path / "half.ckpt").glob("__1_*")).unlink()
    codes, told = on_ranks(2, tmp_path, command(files, "half", *FSDP[2], "--ckpt_path=half.ckpt"))
    assert codes == [[2, 0]] and told.count("error: ") == 1 and "Traceback" not in told, told
    assert "half.ckpt cannot be loaded ([Errno 2]" in told and not (tmp_path / "runs").exists()


def test_nothing_in_the_index_of_shards_is_executed(run, files, two):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch executed",)

    (whole,) = (two[0] / "runs" / "adamw" / "version_0" / "checkpoints").iterdir()
    assert train.updates(whole) == 21
    shutil.copytree(whole, run.folder / "evil.ckpt")
    (run.folder / "evil.ckpt" / ".metadata").write_bytes(pickle.dumps(Evil()))
    code, _, err = run(train.main, *command(files, "evil", *FSDP[1], "--ckpt_path=evil.ckpt"))
    assert code == 2 and "is no checkpoint" in err and not (run.folder / "executed").exists()


def test_a_full_disk_under_a_sharded_checkpoint_is_told_once(files, tmp_path):
    full = command(files, "full", *FSDP[2], *SHORT, "--trainer.max_steps=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LARGEST_SHARD", "2000")
        codes, told = on_ranks(2, tmp_path, full)
    assert codes == [[2, 0]] and told.count("error: ") == 1 and "Traceback" not in told, told
    assert "cannot be written ([Errno 27] File too large)" in told
    assert not list((tmp_path / "runs" / "full" / "version_0" / "checkpoints").iterdir())
