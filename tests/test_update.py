"""Updates by `train.py fit`, against the paper's equation in float64, however they are cut."""

import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TWO_RANKS, make_policy, make_trajectories, on_ranks, write
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import train
from data.arithmetic.imitation import SYMBOLS, make_tokenizer
from topr.datamodule import TrajectoryDataModule, Updates
from topr.io import DivergedError
from topr.losses import TOPR
from topr.module import PolicyModule
from topr.policy import Policy, export_policy
from topr.tasks import Arithmetic

LIMITS = {  # Table 1
    "topr": (1, 1, 0, 1),
    "reinforce": (1, 1, 1, 1),
    "positives_only": (1, 1, 0, 0),
    "is": (0, math.inf, 0, math.inf),
    "tis": (0, 1, 0, 1),
}
FAMILIES = {  # with windows shorter than the sequences
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Phi3": {"sliding_window": 6},
}
SMALL = {
    "vocab_size": len(SYMBOLS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
SGD = ["--model.optimizer=torch.optim.SGD", "--model.gradient_clip_val=null"]
EVERY_STEP = [
    "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.init_args.every_n_train_steps=1",
]


def overlay(loss: str) -> list:
    """The overlay of a loss, without its name in that of the run."""
    path = ROOT / "configs" / "loss" / f"{loss}.yaml"
    return ["--config", path, "--trainer.logger.init_args.name=arithmetic"]


def fit_arguments(policy, data, *more) -> list:
    """`fit` with the shipped config on the test's own files, without problems."""
    files = [f"--model.policy={policy}", f"--data.train={data}"]
    quiet = ["--data.val=null", "--data.test=null", "--trainer.enable_progress_bar=false"]
    return ["fit", "--config", ROOT / "configs" / "arithmetic.yaml", *quiet, *files, *more]


def fit(run, policy, data, *more) -> Path:
    """Run `train.py fit`; returns the folder of the run."""
    code, _, err = run(train.main, *fit_arguments(policy, data, *more))
    assert code == 0, err
    folders = (run.folder / "runs" / "arithmetic").iterdir()
    return max(folders, key=lambda folder: folder.stat().st_mtime)


def fit_and_record(run, policy, data, *more) -> tuple[Path, list]:
    """Likewise; returns the updates as well."""
    conftest.Recorder.clear()
    folder = fit(run, policy, data, *more, "--trainer.callbacks+=conftest.Recorder")
    return folder, list(conftest.Recorder.updates)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run has exported."""
    return load_file(folder / "policy" / "model.safetensors")


def movement(before: Path, folder: Path) -> dict[str, torch.Tensor]:
    """What a run changed, by weight."""
    old = load_file(before / "model.safetensors")
    return {name: value.double() - old[name].double() for name, value in exported(folder).items()}


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs have exported the same weights, bit for bit."""
    theirs = exported(other)
    return all(torch.equal(value, theirs[name]) for name, value in exported(one).items())


def assert_close_weights(one: Path, other: Path) -> None:
    """Two runs have exported the same weights to 1e-6."""
    torch.testing.assert_close(exported(one), exported(other), rtol=0, atol=1e-6)


def log_ratio(model, trajectory) -> torch.Tensor:
    """h of one trajectory by a forward of its own: a sum over the tokens that were sampled."""
    ids = trajectory.prompt_ids + trajectory.response_ids
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = len(trajectory.prompt_ids)
    h = torch.tensor(0.0, dtype=torch.float64)
    for i, token in enumerate(trajectory.response_ids):
        if trajectory.sampled is None or trajectory.sampled[i]:
            h = h + log_probs[start + i - 1, token] - float(np.float32(trajectory.ref_logprobs[i]))
    return h


def topr_objective(model, trajectories, limits) -> torch.Tensor:
    """Its gradient is the mean over trajectories of R [pi/mu]_a^b grad log pi / T."""
    terms = []
    for trajectory in trajectories:
        h = log_ratio(model, trajectory)
        low, high = limits[:2] if trajectory.reward >= 0 else limits[2:]
        weight = min(max(math.exp(h.item()), low), high)
        length = sum(trajectory.sampled or [True] * len(trajectory.response_ids))
        terms.append(trajectory.reward * weight * h / length)
    return sum(terms) / len(terms)


def dpo_objective(model, trajectories) -> torch.Tensor:
    """The mean over pairs of log sigmoid(beta (h+ - h-))."""
    terms = []
    for positive, negative in zip(trajectories[::2], trajectories[1::2], strict=True):
        assert positive.group == negative.group and positive.reward > negative.reward
        margin = 0.1 * (log_ratio(model, positive) - log_ratio(model, negative))
        terms.append(torch.nn.functional.logsigmoid(margin))
    return sum(terms) / len(terms)


def assert_ascent(policy, folder, batches, rates, objective, *settings, clip=math.inf) -> None:
    """A run made these steps of gradient ascent: its weights moved as those of transformers' own
    model in float64 do."""
    model = AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float64, attn_implementation="eager"
    )
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for batch, rate in zip(batches, rates, strict=True):
        model.zero_grad()
        objective(model, batch, *settings).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        assert clip == math.inf or norm > 2 * clip
        with torch.no_grad():
            for weight in model.parameters():
                weight += rate * weight.grad
    found = movement(policy, folder)
    for name, weight in model.named_parameters():
        expected = weight.detach() - before[name]
        error = (found[name] - expected).norm() / expected.norm()
        assert error <= 1e-5 * len(batches), (name, error)


def numbers_of(update) -> list[int]:
    """The trajectories of an update, in the order of its micro-batches."""
    return [int(i) for part in update.micro_batches for i in part.trajectory_B]


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """A policy, and trajectories with ratios on both sides of every limit."""
    folder = tmp_path_factory.mktemp("shifted")
    policy = make_policy(folder / "base")
    trajectories = make_trajectories(policy, shift=2.0)
    data = write(folder / "train.parquet", policy, trajectories, policy="another")
    return policy, data, trajectories


def marks(loss: str, microbatch_tokens: int, accelerator: str) -> list:
    """The fast tier takes one of the cases."""
    if accelerator == "cuda":
        return [pytest.mark.slow, pytest.mark.gpu]
    return [] if (loss, microbatch_tokens) == ("topr", 50) else [pytest.mark.slow]


CASES = product(LIMITS, (50, 10_000), ("cpu", "cuda"))
STEPS = [pytest.param(*case, marks=marks(*case)) for case in CASES]


@pytest.mark.parametrize(("loss", "microbatch_tokens", "accelerator"), STEPS)
def test_one_sgd_step_moves_every_tensor_as_the_paper_says(
    run, shifted, loss, microbatch_tokens, accelerator
):
    if accelerator == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    policy, data, trajectories = shifted
    more = [*overlay(loss), *SGD, "--model.optimizer.init_args.lr=8"]
    more += [f"--data.microbatch_tokens={microbatch_tokens}"]
    folder = fit(run, policy, data, *more, f"--trainer.accelerator={accelerator}")
    assert_ascent(policy, folder, [trajectories], [8], topr_objective, LIMITS[loss])


@pytest.mark.parametrize("whole_groups", ["false", "true"])
def test_conversations_several_epochs_clipping_and_a_schedule(run, whole_groups):
    """From two files, one with and one without the column `sampled`; neighbours share prompts."""
    policy = make_policy(run.folder / "base")
    trajectories = make_trajectories(policy, shift=2.0, turns=True)
    one_turn = [t for t in trajectories if t.sampled is None]
    several = [t for t in trajectories if t.sampled is not None]
    assert len(one_turn) > 2 and sum(False in t.sampled for t in several) > 9
    (run.folder / "data").mkdir()
    for name, rows in (("a", several), ("b", one_turn)):
        write(run.folder / "data" / f"{name}.parquet", policy, rows, policy="another")
    more = [*SGD, "--model.optimizer.init_args.lr=80", "--model.gradient_clip_val=0.003"]
    more += ["--model.lr_scheduler=topr.optim.Schedule", "--model.lr_scheduler.name=linear"]
    more += ["--model.lr_scheduler.num_training_steps=9", "--trainer.max_epochs=3"]
    more += ["--data.batch_size=9", "--data.microbatch_tokens=60"]
    more += [f"--data.whole_groups={whole_groups}"]
    folder, updates = fit_and_record(run, policy, f"{run.folder}/data/*.parquet", *more)
    rows = several + one_turn
    batches = [[rows[i] for i in numbers_of(update)] for update in updates]
    assert max(len(update.micro_batches) for update in updates) > 1
    assert [update.divisor for update in updates] == [len(batch) for batch in batches]
    rates = [80 * (1 - step / 9) for step in range(len(updates))]
    limits = LIMITS["topr"]
    assert_ascent(policy, folder, batches, rates, topr_objective, limits, clip=0.003)
    events = EventAccumulator(str(folder)).Reload()
    assert [event.value for event in events.Scalars("train/lr")] == pytest.approx(rates)
    assert min(event.value for event in events.Scalars("gradient/norm")) > 0.006  # not clipped


@pytest.mark.parametrize("microbatch_tokens", [70, 10_000])
def test_dpo_learns_from_pairs_of_a_group(run, microbatch_tokens):
    """The divisor is the number of pairs, over all micro-batches."""
    policy = make_policy(run.folder / "base")
    trajectories = make_trajectories(policy, shift=2.0)
    data = write(run.folder / "a.parquet", policy, trajectories, policy="another")
    more = [*overlay("dpo"), *SGD, "--model.optimizer.init_args.lr=8"]
    more += [f"--data.microbatch_tokens={microbatch_tokens}"]
    folder, updates = fit_and_record(run, policy, data, *more)
    (update,) = updates
    assert (len(update.micro_batches) == 1) == (microbatch_tokens == 10_000)
    chosen = numbers_of(update)
    assert update.divisor == len(chosen) / 2 == len(set(chosen)) / 2 > 3
    batch = [trajectories[i] for i in chosen]
    assert_ascent(policy, folder, [batch], [8], dpo_objective)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models_follow_the_equation_while_they_share_prompts(run, family):
    base = run.folder / "base"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    export_policy(Policy(model, make_tokenizer(), str(base)), base)
    trajectories = make_trajectories(base, shift=1.0, turns=True)
    data = write(run.folder / "train.parquet", base, trajectories, policy="another")
    more = [*SGD, "--model.optimizer.init_args.lr=8", "--data.microbatch_tokens=150"]
    folder, (update,) = fit_and_record(run, base, data, *more)
    computed = sum(len(part.tokens.input_ids_L) for part in update.micro_batches)
    assert computed < sum(part.tokens.nominal for part in update.micro_batches)
    assert_ascent(base, folder, [trajectories], [8], topr_objective, LIMITS["topr"])


@pytest.mark.parametrize("more", [["--data.microbatch_tokens=23"], ["--data.num_workers=2"]])
def test_micro_batches_and_workers_do_not_change_a_run_with_adam(run, shifted, more):
    policy, data, _ = shifted
    common = ["--data.batch_size=9", "--trainer.max_epochs=2"]
    one = fit(run, policy, data, *common)
    other = fit(run, policy, data, *common, *more)
    assert_close_weights(one, other)
    if "workers" in more[0]:
        assert same_weights(one, other)


class FiveRanks(TrajectoryDataModule):
    """Each update holds the micro-batches of five ranks, with their fillers."""

    def train_dataloader(self) -> DataLoader:
        shares = []
        for rank in range(5):
            share = Updates(self.data, self.plan(0), self.microbatch_tokens, self.unit, False)
            share.rank = rank
            share.ranks = 5
            shares.append(share)
        updates = []
        for parts in zip(*shares, strict=True):
            micro_batches = [part for share in parts for part in share.micro_batches]
            updates.append(parts[0]._replace(micro_batches=micro_batches))
        return DataLoader(updates, batch_size=None)


def plain_fit(policy, data, kind=TrajectoryDataModule, **settings) -> PolicyModule:
    """The module after an epoch of a plain trainer."""
    loss = settings.pop("loss", TOPR())
    module = PolicyModule(str(policy), Arithmetic(), loss, lambda p: torch.optim.SGD(p, lr=1.0))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, kind(str(policy), Arithmetic(), train=str(data), **settings))
    return module


@pytest.mark.parametrize("batching", ["trajectories", "pairs"])
def test_what_ranks_compute_to_fill_up_changes_nothing(shifted, batching):
    policy, data, _ = shifted
    settings = {"batch_size": 4, "microbatch_tokens": 200, "batching": batching}
    one = plain_fit(policy, data, **settings)
    five = plain_fit(policy, data, FiveRanks, **settings)
    fillers = 0
    for update in five.trainer.train_dataloader:
        fillers += sum(float((part.real_B == 0).sum()) for part in update.micro_batches)
    assert fillers > 0
    torch.testing.assert_close(five.state_dict(), one.state_dict(), rtol=0, atol=1e-6)


class Infinite(TOPR):
    """Infinite for an advantage of 0.5."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B):
        output = super().__call__(log_probs_N, ref_log_probs_N, length_B, advantage_B)
        return output._replace(loss_B=output.loss_B / (advantage_B != 0.5))


def test_an_infinite_loss_ends_the_run_before_the_update_and_names_the_row(run, tmp_path, policy):
    trajectories = make_trajectories(policy)
    trajectories[5].reward = 0.5
    data = write(tmp_path / "train.parquet", policy, trajectories)
    arguments = fit_arguments(policy, data, "--model.loss=test_update.Infinite")
    more = ["--data.batch_size=3", *EVERY_STEP, "--trainer.callbacks+=conftest.Recorder"]
    conftest.Recorder.clear()
    code, _, err = run(train.main, *arguments, *more)
    done = len(conftest.Recorder.rows)
    assert code == 2 and 0 < done < 7
    assert f"update {done + 1}: the loss is NaN or infinite for 1 of its 3 trajectories" in err
    assert f"(first row 5 of {data})" in err
    (checkpoint,) = (run.folder / "runs").rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)
    assert state["global_step"] == done
    assert all(weight.isfinite().all() for weight in state["state_dict"].values())
    fit(run, policy, data)  # with a finite loss


def test_a_gradient_that_overflows_is_not_applied(policy, tmp_path, monkeypatch):
    """Though the loss of every trajectory is finite."""
    data = write(tmp_path / "train.parquet", policy, make_trajectories(policy))
    kept = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_, **__: kept.append("an update"))

    class Steep(TOPR):
        def __call__(self, log_probs_N, *given):
            return super().__call__(
                log_probs_N + (log_probs_N - log_probs_N.detach()) * 1e38, *given
            )

    with pytest.raises(DivergedError, match="update 1: the gradient.* is NaN or infinite"):
        plain_fit(policy, data, loss=Steep())
    assert kept == []
    plain_fit(policy, data)
    assert kept == ["an update"]


@pytest.mark.slow
def test_two_ddp_ranks_make_the_update_of_one(run, shifted):
    """Batches of 10, 10 and 3: the last leaves fillers on either rank. For FSDP2 see
    test_sharding.py."""
    policy, data, _ = shifted
    common = [*SGD, "--model.optimizer.init_args.lr=0.5", "--data.batch_size=10"]
    common += ["--data.microbatch_tokens=60"]
    losses = ("topr", "grpo", "dpo")  # trajectories, whole groups, pairs
    two = []
    for loss in losses:
        arguments = fit_arguments(policy, data, *common, *overlay(loss), *TWO_RANKS["ddp"])
        two.append([*arguments, f"--trainer.logger.init_args.name={loss}"])
    for codes, output in on_ranks(2, run.folder, *two):
        assert codes == [0, 0], output
    for loss in losses:
        one = fit(run, policy, data, *common, *overlay(loss))
        other = run.folder / "runs" / loss / "version_0"
        assert_close_weights(one, other)
        mine, theirs = (EventAccumulator(str(folder)).Reload() for folder in (one, other))
        for tag in ("train/loss", "train/groups_without_signal", "gradient/norm"):
            values = [event.value for event in mine.Scalars(tag)]
            assert len(values) == (1 if loss == "dpo" else 3)
            found = [event.value for event in theirs.Scalars(tag)]
            assert found == pytest.approx(values, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_the_process_group_ends_before_the_interpreter(tmp_path):
    """A thread of gloo that is still at work then ends the process by SIGABRT."""
    code = """
import atexit, sys
import torch.distributed
atexit.register(lambda: print(torch.distributed.is_initialized()))  # runs last
import topr.distributed
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
"""
    started = [sys.executable, "-c", code, f"file://{tmp_path}/store"]
    done = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
