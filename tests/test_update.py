"""One update through the command line, against the paper's equation in float64, however the batch is cut."""

import json
import math
import shutil
import subprocess
import sys
from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    ROOT,
    TWO_RANKS,
    make_policy,
    make_trajectories,
    observe_microbatches,
    on_ranks,
    write,
)
from lightning.pytorch.trainer.states import TrainerFn
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from topr import module
from topr.datamodule import TrajectoryDataModule
from topr.losses import TOPR
from topr.module import PolicyModule
from topr.policy import Policy, export_policy, load_policy
from topr.policy.model import shared_prompts
from topr.reproduce.making import SYMBOLS, make_tokenizer
from topr.tasks import Arithmetic
from topr.trajectories import add_log_probs

LIMITS = {  # Table 1
    "topr": (1, 1, 0, 1),
    "reinforce": (1, 1, 1, 1),
    "positives_only": (1, 1, 0, 0),
    "is": (0, math.exp(20), 0, math.exp(20)),
    "tis": (0, 1, 0, 1),
}
QUIET = [
    "--data.val=null", "--data.test=null",
    "--trainer.enable_progress_bar=false", "--trainer.logger.init_args.save_dir=runs",
]  # fmt: skip
EVERY_STEP = [
    "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.init_args.every_n_train_steps=1",
]


FAMILIES = {  # with windows shorter than the sequences
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Phi3": {"sliding_window": 6},
}
SMALL = {
    "vocab_size": len(SYMBOLS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "head_dim": 8,
}  # fmt: skip


def fit_arguments(policy, data, *more) -> list:
    """`fit` with the shipped config on the test's own files, without problems."""
    config = ["--config", ROOT / "configs" / "arithmetic.yaml"]
    return ["fit", *config, *QUIET, f"--model.policy={policy}", f"--data.train={data}", *more]


def fit(run, policy, data, *more):
    """Run `train.py fit`; returns the version folder."""
    code, _, err = run(train.main, *fit_arguments(policy, data, *more))
    assert code == 0, err
    return max(
        (path for path in (run.folder / "runs" / "arithmetic").iterdir()),
        key=lambda p: p.stat().st_mtime,
    )


def exported(folder) -> dict[str, torch.Tensor]:
    """The weights that a run has exported."""
    return load_file(folder / "policy" / "model.safetensors")


def movement(before, folder) -> dict[str, torch.Tensor]:
    """What a run changed, by weight."""
    old = load_file(before / "model.safetensors")
    return {name: value.double() - old[name].double() for name, value in exported(folder).items()}


def same_weights(one, other) -> bool:
    """Whether two runs have exported the same weights, bit for bit."""
    theirs = exported(other)
    return all(torch.equal(value, theirs[name]) for name, value in exported(one).items())


def assert_close_weights(one, other) -> None:
    """Two runs have exported the same weights to 1e-6."""
    theirs = exported(other)
    for name, value in exported(one).items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6, msg=name)


def expected_gradient(policy, trajectories, limits) -> dict[str, torch.Tensor]:
    """Sum over trajectories of A [pi/mu]_a^b grad log pi / T / B: the paper's equation, one forward each, float64.
    log pi is a sum over the T tokens that were sampled."""
    model = load_policy(str(policy)).model.double()
    a_plus, b_plus, a_minus, b_minus = limits
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for t in trajectories:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        log_probs = model(ids).logits[0].log_softmax(-1)
        start = len(t.prompt_ids) - 1
        sampled = np.array(t.sampled or [True] * len(t.response_ids))
        log_pi = sum(
            log_probs[start + i, token] for i, token in enumerate(t.response_ids) if sampled[i]
        )
        ratio = math.exp(log_pi.item() - np.float32(t.ref_logprobs)[sampled].sum(dtype=np.float64))
        low, high = (a_plus, b_plus) if t.reward >= 0 else (a_minus, b_minus)
        factor = t.reward * min(max(ratio, low), high) / sum(sampled) / len(trajectories)
        for (name, _), gradient in zip(
            model.named_parameters(),
            torch.autograd.grad(log_pi, list(model.parameters())),
            strict=True,
        ):
            total[name] += factor * gradient
    return total


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """A policy, and trajectories whose log mu is shifted so that ratios lie on both sides of every limit."""
    folder = tmp_path_factory.mktemp("shifted")
    policy = make_policy(folder / "base")
    trajectories = make_trajectories(policy, shift=2.0)
    return (
        policy,
        write(folder / "train.parquet", policy, trajectories, policy="another"),
        trajectories,
    )


def sgd_step(loss: str, microbatch_tokens: int) -> list:
    """One SGD step, not clipped, with learning rate 8, on all trajectories."""
    return [
        "--config", ROOT / "configs" / "loss" / f"{loss}.yaml", "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.init_args.lr=8.0", "--trainer.gradient_clip_val=null",
        f"--data.microbatch_tokens={microbatch_tokens}", "--trainer.logger.init_args.name=arithmetic",
    ]  # fmt: skip


def marks(loss: str, microbatch_tokens: int, accelerator: str) -> list:
    """The fast tier takes one of the cases."""
    slow = (loss, microbatch_tokens, accelerator) != ("topr", 50, "cpu")
    return [pytest.mark.slow] * slow + [pytest.mark.gpu] * (accelerator == "cuda")


STEPS = [
    pytest.param(*case, marks=marks(*case))
    for case in product(LIMITS, (50, 10_000), ("cpu", "cuda"))
]


@pytest.mark.parametrize(("loss", "microbatch_tokens", "accelerator"), STEPS)
def test_one_sgd_step_moves_every_tensor_as_the_paper_says(
    run, shifted, loss, microbatch_tokens, accelerator
):
    if accelerator == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    policy, data, trajectories = shifted
    folder = fit(
        run,
        policy,
        data,
        *sgd_step(loss, microbatch_tokens),
        f"--trainer.accelerator={accelerator}",
    )
    expected = expected_gradient(policy, trajectories, LIMITS[loss])
    for name, moved in movement(policy, folder).items():
        error = (moved - 8.0 * expected[name]).norm() / (8.0 * expected[name]).norm()
        assert error <= 1e-5, (name, error)


@pytest.mark.parametrize("microbatch_tokens", [50, 10_000])
@pytest.mark.parametrize("groups", ["none", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_conversation_moves_the_policy_by_its_sampled_tokens_alone(
    run, microbatch_tokens, groups
):
    """From two files, one with and one without the column; neighbours share prompts."""
    policy = make_policy(run.folder / "base")
    trajectories = make_trajectories(policy, shift=2.0, turns=True)
    one_turn, several = (
        [t for t in trajectories if (t.sampled is None) == single] for single in (True, False)
    )
    assert len(one_turn) > 2 and sum(False in t.sampled and True in t.sampled for t in several) > 9
    (run.folder / "data").mkdir()
    for name, rows in (("a", several), ("b", one_turn)):
        write(run.folder / "data" / f"{name}.parquet", policy, rows, policy="another")
    whole = f"--data.whole_groups={str(groups == 'whole').lower()}"
    folder = fit(
        run, policy, f"{run.folder}/data/*.parquet", *sgd_step("topr", microbatch_tokens), whole
    )
    expected = expected_gradient(policy, trajectories, LIMITS["topr"])
    for name, moved in movement(policy, folder).items():
        error = (moved - 8.0 * expected[name]).norm() / (8.0 * expected[name]).norm()
        assert error <= 1e-5, (name, error)


@pytest.mark.slow
def test_the_files_for_speed_can_be_deleted(run, shifted):
    policy, data, _ = shifted
    whole = fit(run, policy, data, *sgd_step("topr", 50))
    copy = run.folder / "copy"
    shutil.copytree(
        ROOT / "topr",
        copy / "topr",
        ignore=shutil.ignore_patterns("one_pass.py", "shared_prompts.py"),
    )
    shutil.copy(ROOT / "train.py", copy)
    assert (
        len(list((copy / "topr" / "policy").glob("*.py")))
        == len(list((ROOT / "topr" / "policy").glob("*.py"))) - 2
    )
    arguments = fit_arguments(policy, data, *sgd_step("topr", 50))
    done = subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert_close_weights(whole, copy / "runs" / "arithmetic" / "version_0")


FEW_TOKENS = "--data.microbatch_tokens=23"
OTHERS = [
    ["--data.microbatch_tokens=60"],
    [FEW_TOKENS],
    ["--data.microbatch_tokens=60", "--data.num_workers=2"],
]


@pytest.mark.parametrize("others", [[[FEW_TOKENS]], pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_micro_batches_padding_and_workers_do_not_change_the_update(run, shifted, others):
    policy, data, _ = shifted
    results = []
    for more in ([], *others):
        common = [
            "--data.batch_size=9",
            "--trainer.max_epochs=2",
            "--trainer.val_check_interval=1.0",
        ]
        results.append(
            fit(run, policy, data, "--model.optimizer.init_args.lr=3.0e-4", *common, *more)
        )
    for other in results[1:]:
        assert_close_weights(results[0], other)
    if len(results) == 4:  # workers: to the bit
        assert same_weights(results[1], results[3])


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "Gemma2")) for name in FAMILIES],
)
def test_shared_prompts_and_one_pass_make_the_update_of_padded_rows(run, monkeypatch, family):
    base = run.folder / "base"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    export_policy(Policy(model, make_tokenizer(), str(base)), base)
    trajectories = make_trajectories(base, 40, shift=1.0)
    for one, other in zip(trajectories[::2], trajectories[1::2], strict=True):
        other.prompt, other.prompt_ids = one.prompt, one.prompt_ids
    add_log_probs(load_policy(str(base)), trajectories, 16384)
    data = write(run.folder / "train.parquet", base, trajectories)
    more = [
        "--data.whole_groups=true",
        "--data.batch_size=8",
        "--data.microbatch_tokens=80",
        "--trainer.max_epochs=2",
    ]
    shared = fit(run, base, data, *more)
    monkeypatch.setattr(module, "one_pass", None)
    monkeypatch.setattr(shared_prompts, "enable_if_exact", lambda *_: None)
    padded = fit(
        run,
        base,
        data,
        *more,
        "--data.microbatch_tokens=10000",
        "--trainer.logger.init_args.version=1",
    )
    assert_close_weights(shared, padded)
    assert all(moved.any() for moved in movement(base, shared).values())


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("microbatch_tokens", [10_000, 40])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    run, shifted, epochs, microbatch_tokens
):
    policy, data, _ = shifted
    common = [
        "--data.batch_size=4", f"--trainer.max_epochs={epochs}", f"--data.microbatch_tokens={microbatch_tokens}",
        *EVERY_STEP,
    ]  # fmt: skip
    whole = fit(run, policy, data, *common)
    for stop in {1: (1, 4), 2: (2, 6, 9)}[epochs]:
        name = f"--trainer.logger.init_args.name=arithmetic/stop{stop}"
        for limit in (stop, -1):
            more = [name, "--ckpt_path=last", f"--trainer.max_steps={limit}"]
            code, out, err = run(train.main, *fit_arguments(policy, data, *common, *more))
            assert code == 0, err
            assert ("starting afresh" in out) == (limit == stop)
        (folder,) = (
            run.folder / "runs" / "arithmetic" / f"stop{stop}"
        ).iterdir()  # the same version_N
        assert folder.name == "version_0"
        assert same_weights(whole, folder), stop


def test_last_resumes_no_other_run(run, shifted):
    policy, data, _ = shifted
    fit(run, policy, data, "--data.batch_size=4", *EVERY_STEP)
    arguments = fit_arguments(policy, data, "--ckpt_path=last")
    before = {path: path.stat().st_mtime_ns for path in (run.folder / "runs").rglob("*")}
    for more, words in (
        (["--data.batch_size=4", "--model.loss=topr.losses.TIS"], "another model.loss"),
        (["--data.batch_size=5"], "another data.batch_size"),
        (["--data.batch_size=4", "--seed_everything=1"], "another seed_everything"),
    ):
        code, _, err = run(train.main, *arguments, *more)
        assert code == 2 and words in err and err.splitlines()[-1].startswith("error: ")
    assert before == {path: path.stat().st_mtime_ns for path in (run.folder / "runs").rglob("*")}
    problems = f"--data.test={ROOT / 'data' / 'arithmetic' / 'val.jsonl'}"
    more = [problems, "--data.samples=1", "--data.sampling.max_new_tokens=2", "--data.batch_size=4"]
    code, out, err = run(train.main, "test", *arguments[1:], *more)
    assert code == 0 and "test/pass@1" in out, err
    (run.folder / "not.ckpt").write_text("x")
    code, _, err = run(train.main, *arguments[:-1], "--ckpt_path=not.ckpt")
    assert code == 2 and "incomplete or not a checkpoint" in err


@pytest.mark.slow
@pytest.mark.parametrize("second", [25, 40, 10_000])
def test_resumption_within_a_step_or_with_other_micro_batches(run, shifted, second):
    policy, data, _ = shifted
    common = [
        "--data.batch_size=4", "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
        f"--data.val={ROOT / 'data' / 'arithmetic' / 'val.jsonl'}",
        "--data.val_samples=1", "--data.sampling.max_new_tokens=1",
    ]  # fmt: skip
    whole = fit(run, policy, data, *common, "--data.val=null")
    arguments = fit_arguments(
        policy, data, *common, "--trainer.logger.init_args.name=arithmetic/b", "--ckpt_path=last"
    )
    # the validation after five micro-batches writes its checkpoint between those of the third update
    first = [
        "--data.microbatch_tokens=40",
        "--trainer.val_check_interval=5",
        "--trainer.max_steps=3",
    ]
    code, _, err = run(train.main, *arguments, *first)
    assert code == 0, err
    (checkpoint,) = (run.folder / "runs" / "arithmetic" / "b").rglob("*.ckpt")
    loop = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]
    assert loop["epoch_loop.batch_progress"]["current"]["ready"] == 5
    code, out, err = run(
        train.main, *arguments, f"--data.microbatch_tokens={second}", "--data.val=null"
    )
    assert code == 0 and "resuming" in out, err
    (folder,) = (run.folder / "runs" / "arithmetic" / "b").iterdir()
    assert_close_weights(whole, folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["tokens_per_s"] > 0


class Grouped(TOPR):
    """TOPR on batches of whole groups."""

    grouping = "group"


def test_every_trajectory_of_every_epoch_is_used_once_by_whole_groups(run, tmp_path, monkeypatch):
    policy = make_policy(tmp_path / "base")
    rng, trajectories = np.random.default_rng(0), make_trajectories(policy, 60)
    for trajectory in trajectories:
        trajectory.group = str(
            rng.integers(25)
        )  # so uneven that the epochs differ in their number of batches
    data, used = write(tmp_path / "a.parquet", policy, trajectories), []

    def observe(trainer, module, batch) -> None:
        used.append((trainer.current_epoch, batch.trajectory_B[batch.real_B > 0].tolist()))

    observe_microbatches(monkeypatch, observe)
    fit(
        run, policy, data, "--model.loss=test_update.Grouped", "--data.batch_size=8", "--trainer.max_epochs=4",
        "--data.microbatch_tokens=60",
    )  # fmt: skip
    counts = set()
    for epoch in range(4):
        rows = [rows for number, rows in used if number == epoch]
        assert sorted(sum(rows, [])) == list(range(60))
        counts.add(len(rows))
    assert len(counts) > 1


@pytest.mark.parametrize("tokens", [60, 10_000])
def test_two_ranks_in_one_process_make_the_gradient_of_one(shifted, tokens):
    """What Lightning and DDP do with the loss: a mean over the micro-batches of a rank, a mean over ranks."""
    policy, data, _ = shifted
    loss = TOPR()
    model = PolicyModule(str(policy), Arithmetic(), loss, torch.optim.SGD)
    model.policy = load_policy(str(policy))

    def gradients(ranks: int) -> list[torch.Tensor]:
        updates = defaultdict(float)
        for rank in range(ranks):
            shares = TrajectoryDataModule(
                train=str(data), policy=str(policy), loss=loss, task=Arithmetic(), batch_size=20,
                microbatch_tokens=tokens,
            )  # fmt: skip
            state = SimpleNamespace(fn=TrainerFn.FITTING)
            place = {
                "world_size": ranks,
                "global_rank": rank,
                "local_rank": rank,
                "current_epoch": 0,
            }
            place["fast_dev_run"] = False
            shares.trainer = model.trainer = SimpleNamespace(state=state, **place)
            shares.setup("fit")
            for number, batch in enumerate(shares.train_dataloader()):
                value = model.training_step(batch, number) / batch.microbatches / ranks
                found = torch.autograd.grad(value, list(model.parameters()))
                updates[number // batch.microbatches] += torch.cat(
                    [gradient.flatten() for gradient in found]
                )
        return list(updates.values())

    one, two = gradients(1), gradients(2)
    assert len(one) == len(two) == 2  # of 20 and of 3 trajectories: the latter leaves fillers
    for mine, other in zip(one, two, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
        assert mine.norm() > 1e-2


@pytest.mark.slow
def test_two_ddp_ranks_make_the_update_of_one(run, shifted):
    """For FSDP2 see test_sharding.py; here Lightning starts the second process for one of the losses."""
    policy, data, _ = shifted
    commands = {
        loss: fit_arguments(
            policy, data, "--model.optimizer=torch.optim.SGD", "--model.optimizer.init_args.lr=0.5",
            "--data.batch_size=10", "--data.microbatch_tokens=60", "--data.samples=1",
            "--config", ROOT / "configs" / "loss" / f"{loss}.yaml", "--model.sampler.init_args.rows=99",
            f"--data.test={ROOT / 'data' / 'arithmetic' / 'val.jsonl' if loss == 'topr' else 'null'}",
        )
        for loss in ("topr", "grpo", "dpo")  # trajectories, whole groups, pairs
    }  # fmt: skip
    # batches of 10, 10 and 3: the last leaves fillers on either rank
    two = {
        loss: [*command, *TWO_RANKS["ddp"], f"--trainer.logger.init_args.name={loss}-two"]
        for loss, command in commands.items()
    }
    started = [sys.executable, ROOT / "train.py", *two.pop("topr")]
    done = subprocess.run(started, cwd=run.folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for codes, output in on_ranks(2, run.folder, *two.values()):
        assert codes == [0, 0], output
    for loss, command in commands.items():
        code, _, err = run(train.main, *command, f"--trainer.logger.init_args.name={loss}-one")
        assert code == 0, err
        folders = [
            run.folder / "runs" / f"{loss}-{ranks}" / "version_0" for ranks in ("one", "two")
        ]
        assert_close_weights(*folders)
        events = [EventAccumulator(str(folder)).Reload() for folder in folders]
        tags = [
            "train/loss",
            "train/reward",
            "train/objective",
            "gradient/norm",
            "gradient/positive_share",
        ]
        for tag in tags + ["train/groups_without_signal"] * (loss == "grpo"):
            one, other = ([event.value for event in scalars.Scalars(tag)] for scalars in events)
            assert len(one) == (1 if loss == "dpo" else 3)
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_process_group_ends_before_the_interpreter(tmp_path):
    """A thread of gloo that is still at work then ends the process by SIGABRT."""
    code = """
import atexit, sys
import torch.distributed
atexit.register(lambda: print("open" if torch.distributed.is_initialized() else "closed"))  # runs last
import topr.distributed
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
"""
    started = [sys.executable, "-c", code, f"file://{tmp_path}/store"]
    done = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


def test_gradient_clipping_bounds_the_update(run, shifted):
    policy, data, trajectories = shifted
    folder = fit(
        run, policy, data, "--model.optimizer=torch.optim.SGD", "--model.optimizer.init_args.lr=8.0",
        "--trainer.gradient_clip_val=0.01",
    )  # fmt: skip
    moved = torch.cat([value.flatten() for value in movement(policy, folder).values()])
    assert moved.norm() == pytest.approx(8.0 * 0.01, rel=1e-3)
    (norm,) = (
        EventAccumulator(str(folder)).Reload().Scalars("gradient/norm")
    )  # of the gradient before clipping
    expected = torch.cat(
        [
            value.flatten()
            for value in expected_gradient(policy, trajectories, LIMITS["topr"]).values()
        ]
    )
    assert norm.value == pytest.approx(expected.norm().item(), rel=1e-4)
