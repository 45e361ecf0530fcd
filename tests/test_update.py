"""Updates by `train.py fit`, against the paper's equation in float64, however they are cut."""

import math
import subprocess
import sys
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, TWO_RANKS, make_policy, make_trajectories, on_ranks, slow, write
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_logprobs import make_policy_of
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import train
from data.arithmetic.imitation import SYMBOLS, make_tokenizer
from topr.datamodule import TrajectoryDataModule, Updates
from topr.io import InputError
from topr.losses import TOPR
from topr.module import PolicyModule
from topr.policy import export_policy
from topr.tasks import Arithmetic

LIMITS = {  # Table 1
    "topr": (1, 1, 0, 1),
    "reinforce": (1, 1, 1, 1),
    "positives_only": (1, 1, 0, 0),
    "is": (0, math.inf, 0, math.inf),
    "tis": (0, 1, 0, 1),
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


def logged(folder: Path, tag: str) -> list[float]:
    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


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


OTHERS = [slow(loss) for loss in LIMITS if loss != "topr"]


@pytest.mark.parametrize("loss", ["topr", *OTHERS])
def test_one_sgd_step_moves_every_tensor_as_the_paper_says(run, shifted, loss, *more):
    policy, data, trajectories = shifted
    arguments = [*overlay(loss), *SGD, "--model.optimizer.init_args.lr=8", *more]
    folder = fit(run, policy, data, *arguments, "--data.microbatch_tokens=50")
    assert_ascent(policy, folder, [trajectories], [8], topr_objective, LIMITS[loss])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("loss", LIMITS)
def test_so_it_does_on_a_gpu(run, shifted, loss):
    test_one_sgd_step_moves_every_tensor_as_the_paper_says(
        run, shifted, loss, "--trainer.accelerator=gpu"
    )


@pytest.mark.parametrize("whole_groups", [slow("false"), "true"])
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
    more += ["--model.lr_scheduler=LinearLR", "--model.lr_scheduler.start_factor=1"]
    more += ["--model.lr_scheduler.end_factor=0", "--model.lr_scheduler.total_iters=9"]
    more += ["--trainer.max_epochs=3"]
    more += ["--data.batch_size=9", "--data.microbatch_tokens=60"]
    more += [f"--data.whole_groups={whole_groups}"]
    folder, updates = fit_and_record(run, policy, f"{run.folder}/data/*.parquet", *more)
    rows = several + one_turn
    batches = [[rows[i] for i in numbers_of(update)] for update in updates]
    assert max(len(update.micro_batches) for update in updates) > 1
    assert [update.trajectories for update in updates] == [len(batch) for batch in batches]
    assert sorted(sum(map(numbers_of, updates), [])) == sorted([*range(len(rows))] * 3)
    rates = [80 * (1 - step / 9) for step in range(len(updates))]
    limits = LIMITS["topr"]
    assert_ascent(policy, folder, batches, rates, topr_objective, limits, clip=0.003)
    assert logged(folder, "train/lr") == pytest.approx(rates)
    assert min(logged(folder, "gradient/norm")) > 0.006  # before clipping


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
    assert update.trajectories == len(chosen) == len(set(chosen)) > 6
    batch = [trajectories[i] for i in chosen]
    assert_ascent(policy, folder, [batch], [8], dpo_objective)


@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "Phi3"])
def test_families_of_models_follow_the_equation_while_they_share_prompts(run, family):
    base = run.folder / "base"
    policy = make_policy_of(family, vocab_size=len(SYMBOLS), eos_token_id=1)
    policy.tokenizer = make_tokenizer()
    export_policy(policy, base)
    trajectories = make_trajectories(base, shift=1.0, turns=True)
    data = write(run.folder / "train.parquet", base, trajectories, policy="another")
    more = [*SGD, "--model.optimizer.init_args.lr=8", "--data.microbatch_tokens=150"]
    folder, (update,) = fit_and_record(run, base, data, *more)
    computed = sum(len(part.tokens.input_ids_L) for part in update.micro_batches)
    assert computed < sum(part.tokens.nominal for part in update.micro_batches)
    assert_ascent(base, folder, [trajectories], [8], topr_objective, LIMITS["topr"])


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


def plain_module(policy: Path, loss=TOPR()) -> PolicyModule:
    return PolicyModule(str(policy), Arithmetic(), loss, lambda p: torch.optim.SGD(p, lr=1.0))


def plain_fit(module: PolicyModule, data: Path, kind=TrajectoryDataModule, **settings) -> None:
    """An epoch of a plain trainer."""
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(module, kind(module.policy_name, Arithmetic(), train=str(data), **settings))


@pytest.mark.parametrize("batching", ["trajectories", "pairs"])
def test_what_ranks_compute_to_fill_up_changes_nothing(shifted, batching):
    policy, data, _ = shifted
    settings = {"batch_size": 4, "microbatch_tokens": 200, "batching": batching}
    one, five = plain_module(policy), plain_module(policy)
    plain_fit(one, data, **settings)
    plain_fit(five, data, FiveRanks, **settings)
    fillers = 0
    for update in five.trainer.train_dataloader:
        fillers += sum(float((part.real_B == 0).sum()) for part in update.micro_batches)
    assert fillers > 0
    torch.testing.assert_close(five.state_dict(), one.state_dict(), rtol=0, atol=1e-6)


class Gradients(Callback):
    """Keeps what each update leaves behind."""

    def __init__(self):
        self.left = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.left += [weight.grad for weight in pl_module.parameters()]


def test_an_update_leaves_no_gradient_for_the_next_one(shifted):
    policy, data, _ = shifted
    gradients = Gradients()
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_steps=3, callbacks=[gradients], **quiet)
    settings = {"train": str(data), "batch_size": 4}
    trainer.fit(plain_module(policy), TrajectoryDataModule(str(policy), Arithmetic(), **settings))
    assert len(gradients.left) > 3 and set(gradients.left) == {None}


def test_the_average_over_ranks_is_cancelled(shifted, monkeypatch):
    """The strategy divides the gradient by the number of ranks; here it has one."""
    policy, data, _ = shifted
    moved = []
    for ranks in (1, 2):
        monkeypatch.setattr(Trainer, "world_size", property(lambda self, ranks=ranks: ranks))
        module = plain_module(policy)
        module.gradient_clip_val = None
        plain_fit(module, data)
        start = load_file(policy / "model.safetensors")
        weights = dict(module.policy.model.named_parameters())
        moved.append({name: weights[name].detach() - start[name] for name in start})
    for name, one in moved[0].items():
        torch.testing.assert_close(moved[1][name], 2 * one, rtol=1e-3, atol=1e-6)


class Infinite(TOPR):
    """Infinite for an advantage of 0.5; of a gradient that overflows for one of 0.25."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B):
        output = super().__call__(log_probs_N, ref_log_probs_N, length_B, advantage_B)
        steep_B = output.loss_B * 1e38 * 10
        loss_B = torch.where(advantage_B == 0.25, steep_B - steep_B.detach(), output.loss_B)
        return output._replace(loss_B=loss_B / (advantage_B != 0.5))


@pytest.mark.parametrize(("reward", "what"), [(0.5, "loss"), (0.25, "gradient")])
def test_infinity_ends_the_run_before_the_update_and_names_the_row(tmp_path, policy, reward, what):
    trajectories = make_trajectories(policy)
    trajectories[5].reward = reward
    data = write(tmp_path / "train.parquet", policy, trajectories)
    before = plain_module(policy, Infinite())
    message = f"update 1: the {what} is NaN or infinite for 1 of its 23 .*first row 5 of {data}"
    with pytest.raises(InputError, match=message):
        plain_fit(before, data)
    stored = load_file(policy / "model.safetensors")
    assert all(torch.equal(w, stored[name]) for name, w in before.policy.model.named_parameters())
    plain_fit(plain_module(policy, TOPR()), data)


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
        for tag in ("train/loss", "train/groups_without_signal", "gradient/norm"):
            assert logged(other, tag) == pytest.approx(logged(one, tag), rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_the_process_group_ends_before_the_interpreter(tmp_path):
    """A thread of gloo that is still at work then ends the process by SIGABRT."""
    code = """
import atexit, sys
import torch.distributed
atexit.register(lambda: print(torch.distributed.is_initialized()))  # runs last
import topr.io.distributed
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
"""
    started = [sys.executable, "-c", code, f"file://{tmp_path}/store"]
    done = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
