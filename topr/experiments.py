"""Experiments on the embedded tasks: base policies, trainings, iterations, verifiers, each a job with a JSON result."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import Logger

from topr import losses
from topr.curation import Curation, curate
from topr.datamodule import TrajectoryDataModule
from topr.evaluation import derived_seed, per_problem, sample_and_grade
from topr.io import DivergedError
from topr.logprobs import response_log_probs, score
from topr.module import PolicyModule
from topr.packing import pack
from topr.policy import export_policy, load_policy
from topr.regimes import REGIMES, Regime
from topr.sampling import LocalSampler
from topr.tasks.arithmetic_verifier import ArithmeticVerifier, teach
from topr.tasks.task import Problem, Task
from topr.tokenizer import load_tokenizer, provenance
from topr.trainer import Trainer
from topr.trajectories import Trajectory, add_log_probs, read_trajectories, write_trajectories

LOGGED = ["log_ratio/positives_mean", "log_ratio/negatives_mean"]
LOGGED += ["weight/positives_truncated", "weight/negatives_truncated"]
BATCH, CLIP = 64, 1.0  # trajectories of an update, bound on the norm of its gradient
BINS = np.arange(-40.5, 11)  # of sequence log-ratios


class Records(Logger):
    """Keeps what training logs in memory."""

    name, version, experiment = "records", 0, None

    def __init__(self, folder: Path):
        super().__init__()
        self.folder, self.rows = folder, []

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    def log_hyperparams(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


def fit(
    folder: Path, regime: Regime, policy: Path, data: Path, loss: losses.Loss, rate: float, seed: int, **more: Any
) -> tuple[PolicyModule, dict[str, Any]]:
    """Train by the project's own trainer; the module, and what was logged.

    A training that diverges ends; from there on its curve is that of a policy without valid responses.
    """
    records = Records(folder)
    module = PolicyModule(str(policy), regime.task, loss, partial(regime.optimizer, lr=rate), LocalSampler(), threads=1)
    points, epochs = more.pop("points", 0), more.pop("epochs", 1)
    given = {"batch_size": BATCH, "sampling": regime.task.sampling, "val_samples": 2, "seed": seed}
    trajectories = TrajectoryDataModule(train=str(data), **given | more)
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, gradient_clip_val=CLIP, log_every_n_steps=1, logger=records,
        val_check_interval=1 / points if points else 1.0, num_sanity_val_steps=0, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    diverged = False
    try:
        trainer.fit(module, trajectories)
        if points and module.figures[0] < module.global_step:  # the last validation was some updates before the end
            trainer.validate(module, trajectories, verbose=False)
    except DivergedError:
        diverged = True
    curve = [
        {"step": step} | {name.removeprefix("val/"): row[name] for name in row if name.startswith("val/")}
        for step, row in records.rows
        if "val/pass@1" in row
    ]
    if points and diverged:
        updates = len(trajectories.plan(0))
        apart = max(1, updates // points)
        planned = {i * updates + step for i in range(epochs) for step in range(apart, updates + 1, apart)}
        planned = sorted(planned | {0, epochs * updates})
        curve += [{"step": step, "pass@1": 0.0, "invalid": 1.0} for step in planned[len(curve) :]]
    logged = {name: [row[name] for _, row in records.rows if name in row] for name in LOGGED}
    return module, {"curve": curve, "logged": logged, "steps": module.global_step, "diverged": diverged}


def measure(
    model: torch.nn.Module, tokenizer, task: Task, problems: list[Problem], samples: int, seed: int
) -> dict[str, list[float]]:
    """Each problem's pass@1, maj@samples, share of invalid responses and mean length."""
    how = problems, samples, task.sampling, derived_seed(seed, 7)
    values = per_problem(sample_and_grade(LocalSampler(), model, tokenizer, task, *how))
    names = {"pass@1": "pass@1", "maj": f"maj@{samples}", "invalid": "invalid", "length": "length"}
    return {name: values[column].round(6).tolist() for name, column in names.items()}


def nothing(problems: list[Problem]) -> dict[str, list[float]]:
    """What `measure` would find of a policy without valid responses, which one is that has diverged."""
    return {name: [value] * len(problems) for name, value in (("pass@1", 0.0), ("maj", 0.0), ("invalid", 1.0))}


def told(result: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {100 * np.mean(result[name]):.1f}" for name in ("pass@1", "maj", "invalid"))


def base(out: Path, folder: Path, regime: str, seed: int, scale: dict[str, int]) -> dict[str, Any]:
    """A base policy, problems and trajectories of the train split."""
    place = home(out, regime, seed)
    if not place.exists():
        REGIMES[regime].make(folder / "made", seed, scale)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / "made", place)
    share = np.mean([t.reward > 0 for t in read_trajectories(place / "train.parquet")])
    return {"told": f"{100 * share:.1f} per cent of its trajectories are positive", "positive_share": share}


def home(out: Path, regime: str, seed: int) -> Path:
    """The folder of a base policy."""
    return out / "bases" / f"{REGIMES[regime].bases}-{seed}"


def start(out: Path, folder: Path, regime: str, seed: int, split: str, samples: int) -> dict[str, Any]:
    """The base policy, measured."""
    place, task = home(out, regime, seed), REGIMES[regime].task
    model, tokenizer = load_policy(str(place / "base")).eval(), load_tokenizer(str(place / "base"))
    found = measure(model, tokenizer, task, task.problems(place / f"{split}.jsonl"), samples, seed)
    return {"result": found, "told": told(found)}


def train(
    out: Path,
    folder: Path,
    regime: str,
    seed: int,
    loss: list,
    rate: float,
    split: str,
    samples: int,
    points: int = 0,
    share: list | None = None,
    budget: int | None = None,
    epochs: int = 1,
) -> dict[str, Any]:
    """Train from the base policy and measure the end on a split.

    Args:
        out: of the study.
        folder: of this job.
        regime: its name.
        seed: of base policy, data, order and sampling.
        loss: name and arguments.
        rate: learning rate.
        split: val or test.
        samples: responses to each of its problems.
        points: validations of an epoch.
        share: of positives to train on, and trajectories in all; None for the data as sampled.
        budget: trajectories of a problem; None for all.
        epochs: passes over them.
    """
    setting, place = REGIMES[regime], home(out, regime, seed)
    data = place / "train.parquet"
    if share or budget:
        by_share = share and Curation("share", share=share[0], total=share[1], seed=seed)
        data = folder / "train.parquet"
        curate([str(place / "train.parquet")], data, by_share or Curation("uniform", budget=budget, seed=seed))
    name, arguments = loss
    val = str(place / "val.jsonl") if points else None
    how = data, getattr(losses, name)(**arguments), rate, seed
    module, found = fit(folder, setting, place / "base", *how, val=val, points=points, epochs=epochs)
    model = module.policy.eval()
    problems = setting.task.problems(place / f"{split}.jsonl")
    if found["diverged"]:
        return found | {"result": nothing(problems), "told": "diverged", "ratios": None}
    result = measure(model, module.tokenizer, setting.task, problems, samples, seed)
    rows = read_trajectories(data)[::8]
    return found | {"result": result, "told": told(result), "ratios": ratios(model, rows)}


def ratios(model: torch.nn.Module, rows: list[Trajectory]) -> dict[str, list[int]]:
    """Histograms by sign of stored trajectories' log-ratios, in BINS, whose ends hold what lies beyond."""
    prompts, responses = ([np.array(getattr(t, name)) for t in rows] for name in ("prompt_ids", "response_ids"))
    now = [float(part.sum()) for part in score(model, prompts, responses, 16384)]
    h = np.array([end - np.sum(t.ref_logprobs) for end, t in zip(now, rows, strict=True)])
    positive, h = np.array([t.reward > 0 for t in rows]), h.clip(BINS[0], BINS[-1])
    signs = {"positives": positive, "negatives": ~positive}
    return {name: np.histogram(h[chosen], BINS)[0].tolist() for name, chosen in signs.items()}


def gradients(out: Path, folder: Path, regime: str, seed: int, count: int) -> dict[str, Any]:
    """Of the gradients of (log π)/T at the base policy: products of their means by sign, and their variances.

    And products of the means of the gradients of log π itself, in `whole`.

    Args:
        out: of the study.
        folder: of this job.
        regime: its name.
        seed: of the base policy, and of the choice of responses.
        count: responses of each sign at most, by chance.
    """
    place = home(out, regime, seed)
    model, rows = load_policy(str(place / "base")).eval(), read_trajectories(place / "train.parquet")
    weights, rng = list(model.parameters()), np.random.default_rng(seed)
    by_sign = [rng.permutation([i for i, t in enumerate(rows) if t.reward * sign > 0])[:count] for sign in (1, -1)]
    chosen: dict[str, list[tuple[int, Trajectory]]] = {}
    for sign, numbers in enumerate(by_sign):
        for t in (rows[i] for i in numbers):
            chosen.setdefault(t.prompt_id, []).append((sign, t))
    # by sign, and of log π with and without 1/T; products of two prompts alone, as those of one are not independent
    sums = torch.zeros(2, 2, sum(weight.numel() for weight in weights), dtype=torch.float64)
    squares, within, same = (torch.zeros(*size, dtype=torch.float64) for size in ((2,), (2, 2, 2), (2, 2)))
    for members in chosen.values():
        of_prompt, number = torch.zeros_like(sums), torch.zeros(2)
        for sign, t in members:
            tokens = pack([np.array(t.prompt_ids)], [np.array(t.response_ids)])
            parts = torch.autograd.grad(response_log_probs(model, tokens)[0].mean(), weights)
            gradient = torch.cat([part.flatten() for part in parts]).double()
            of_prompt[sign] += torch.stack([gradient, gradient * len(t.response_ids)])
            squares[sign] += gradient @ gradient
            number[sign] += 1
        sums += of_prompt
        within += torch.einsum("awn,bwn->wab", of_prompt, of_prompt)
        same += torch.outer(number, number)
    totals = torch.tensor([float(len(numbers)) for numbers in by_sign])
    products = (torch.einsum("awn,bwn->wab", sums, sums) - within) / (torch.outer(totals, totals) - same)
    own, whole = ([float(one[0, 0]), float(one[1, 1]), float(one[0, 1])] for one in products)
    return {
        "products": own,
        "variances": [float(squares[sign] / totals[sign]) - own[sign] for sign in (0, 1)],
        "whole": whole,
        "entropy": float(np.mean([-np.sum(t.ref_logprobs) for t in rows])),
        "positive_share": float(np.mean([t.reward > 0 for t in rows])),
        "told": "products of mean gradients " + ", ".join(f"{value:.3g}" for value in own + whole),
    }


def iterations(
    out: Path,
    folder: Path,
    regime: str,
    seed: int,
    way: str,
    rate: float,
    count: int,
    prompts: int,
    budget: int,
    pool: int,
    split: str,
    samples: int,
) -> dict[str, Any]:
    """Sample, curate, train, again and again from the newest policy; each policy measured on a split."""
    setting, place = REGIMES[regime], home(out, regime, seed)
    task, policy = setting.task, place / "base"
    problems, test = task.problems(place / "train.jsonl")[:prompts], task.problems(place / f"{split}.jsonl")
    model, tokenizer = load_policy(str(policy)).eval(), load_tokenizer(str(policy))
    results, shares, updates = [measure(model, tokenizer, task, test, samples, seed)], [], []
    for i in range(count):
        drawn = budget if way == "uniform" else pool
        how = problems, drawn, task.sampling, derived_seed(seed, 11, i)
        rows = sample_and_grade(LocalSampler(), model, tokenizer, task, *how)
        files = folder / f"pool-{i}.parquet", folder / f"train-{i}.parquet"
        add_log_probs(model, rows, 16384)
        about = provenance(str(policy), tokenizer, "32-true", task=task.name, sampling=None, iteration=i)
        write_trajectories(files[0], rows, about)
        done = curate([str(files[0])], files[1], Curation(way, budget=budget, seed=seed), i)
        shares.append([done[when]["positive_share"] for when in ("before", "after")])
        module, fitted = fit(folder / str(i), setting, policy, files[1], losses.TOPR(), rate, seed)
        updates.append(fitted["steps"])
        if fitted["diverged"]:
            left = count - 1 - i
            results += [nothing(test)] * (left + 1)
            shares, updates = shares + [[0.0, 0.0]] * left, updates + [0] * left
            break
        policy, model = folder / str(i) / "policy", module.policy.eval()
        results.append(measure(model, tokenizer, task, test, samples, seed))
    end = results[-1]
    return {"results": results, "result": end, "shares": shares, "updates": updates, "told": told(end)}


def verifier(
    out: Path, folder: Path, regime: str, seed: int, rate: float, samples: int, critiques: int, steps: int
) -> dict[str, Any]:
    """Teach a verifier imperfectly, train it on its critiques, and weigh the votes of the base policy with it."""
    place, task = home(out, regime, seed), REGIMES[regime].task
    model, tokenizer = load_policy(str(place / "base")).eval(), load_tokenizer(str(place / "base"))
    test = task.problems(place / "test.jsonl")
    solutions = sample_and_grade(LocalSampler(), model, tokenizer, task, test, samples, task.sampling, seed)
    judge, judging = ArithmeticVerifier(), ArithmeticVerifier(balance=False)
    teach(task, model.train(), tokenizer, seed, steps)
    setting, base = REGIMES[regime]._replace(task=judge), folder / "base"
    export_policy(model.eval(), tokenizer, base)
    how = 2, judge.sampling, derived_seed(seed, 13)
    rows = sample_and_grade(LocalSampler(), model, tokenizer, judge, judge.problems(place / "train.parquet"), *how)
    add_log_probs(model, rows, 16384)
    about = provenance(str(base), tokenizer, "32-true", task=judge.name, sampling=None, iteration=0)
    write_trajectories(folder / "critiques.parquet", rows, about)

    def judged(model: torch.nn.Module) -> dict[str, Any]:
        """Accuracy and invalid share on balanced test solutions, and each solution's weight."""
        candidates = judging.candidates(solutions)
        how = critiques, judge.sampling, derived_seed(seed, 17)
        rows = sample_and_grade(LocalSampler(), model, tokenizer, judging, candidates, *how)
        groups = [rows[i : i + critiques] for i in range(0, len(rows), critiques)]
        by_gold = {gold: [r for r in rows if r.gold == gold] for gold in judging.golds()}
        accuracy = np.mean([np.mean([r.reward > 0 for r in part]) for part in by_gold.values()])
        invalid = np.mean([np.mean([not r.valid for r in part]) for part in by_gold.values()])
        weighted = per_problem(solutions, [samples // 2, samples], [judging.weight(group) for group in groups])
        votes = {name: values.round(6).tolist() for name, values in weighted.items() if name.startswith("weighted")}
        return {"accuracy": float(accuracy), "invalid": float(invalid), **votes}

    before = judged(model)
    module, _ = fit(folder, setting, base, folder / "critiques.parquet", losses.TOPR(), rate, seed)
    after, majority = judged(module.policy.eval()), per_problem(solutions, [samples // 2, samples])
    votes = {name: values.round(6).tolist() for name, values in majority.items() if name.startswith("maj")}
    accuracies = f"accuracy {100 * before['accuracy']:.1f} to {100 * after['accuracy']:.1f}"
    return {"before": before, "after": after, "majority": votes, "told": accuracies}
