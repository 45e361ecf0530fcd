"""Experiments on the embedded task: base policies, trainings, iterations, verifiers."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from lightning.pytorch.loggers.logger import DummyLogger

from topr import losses
from topr.datamodule import TrajectoryDataModule
from topr.evaluation import derived_seed, per_problem, sample_and_grade
from topr.io import DivergedError, InputError
from topr.module import PolicyModule
from topr.policy import Policy, export_policy, load_policy, provenance
from topr.reproduce.settings import Setting
from topr.sampling import LocalSampler
from topr.tasks import ArithmeticVerifier, Problem, Task
from topr.tasks.arithmetic.making import make
from topr.tasks.arithmetic.verifier import teach
from topr.trajectories import Trajectory, add_log_probs, write_trajectories
from topr.trajectories.curate import Curation, Way, curate

TRUNCATED = ["weight/positives_truncated", "weight/negatives_truncated"]  # the logged statistics that are kept
DIVERGED = {"pass@1": 0.0, "maj": 0.0, "invalid": 1.0}  # metrics of a policy without valid responses


class Records(DummyLogger):
    """Keeps in memory what training logs."""

    def __init__(self):
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(metrics | {"step": step})

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "val/pass@1" in row]


class Experiment:
    """Experiments of one seed, which decides base policy, data, order and sampling. Results can be written as JSON.

    Several take `rate`, the learning rate; `split`, on which policies are measured; `samples`, responses to a problem.
    """

    scratch: Path  # an empty folder, set before an experiment is run

    def __init__(self, folder: Path, setting: Setting, seed: int):
        self.folder, self.setting, self.task, self.seed = folder, setting, setting.task, seed
        self.base, self.data = folder / "base", folder / "train.parquet"

    def make_base(self, **base: Any) -> dict[str, Any]:
        """Make a base policy, problems and trajectories; the arguments are those of `Setting.base`."""
        made = self.scratch / "made"
        make(self.task, made, self.seed, **base)
        shutil.rmtree(self.folder, ignore_errors=True)  # of a command that was killed before it wrote the result
        self.folder.parent.mkdir(exist_ok=True)
        os.replace(made, self.folder)
        return {"message": "made"}

    def train(
        self, split: str, samples: int, loss: list | None, rate: float = 0.0, curation: dict | None = None, **more: Any
    ) -> dict[str, Any]:
        """Train from the base policy and measure the end.

        `loss` is name and arguments, None to measure the base policy; `curation` arguments of a `Curation` of the data;
        `more` arguments of `fit`.
        """
        data = self.data
        if curation:
            data = self.scratch / "train.parquet"
            curate([str(self.data)], data, Curation(**curation, seed=self.seed))
        if loss is None:
            return self.measure(load_policy(str(self.base)), split, samples)
        policy, fitted = self.fit(self.base, data, rate, getattr(losses, loss[0])(**loss[1]), **more)
        return fitted | self.measure(policy, split, samples)

    def iterate(
        self, split: str, samples: int, way: Way, rate: float, count: int, prompts: int, budget: int, pool: int
    ) -> dict[str, Any]:
        """Sample, curate and train `count` times, each time from the newest policy, and measure every policy.

        Of `pool` responses to each of the first `prompts` problems (`budget` if `way` is uniform), `budget` are kept.
        """
        task, policy = self.task, load_policy(str(self.base))
        problems, drawn = task.problems(self.folder / "train.jsonl")[:prompts], budget if way == "uniform" else pool
        ends, shares, updates = [self.measure(policy, split, samples)], [], []
        for i in range(count):
            files = self.scratch / f"pool-{i}.parquet", self.scratch / f"train-{i}.parquet"
            sample_to(files[0], policy, task, problems, drawn, derived_seed(self.seed, 11, i))
            done = curate([str(files[0])], files[1], Curation(way, budget=budget, seed=self.seed), i)
            shares.append(done["after"]["positive_share"])
            trained, fitted = self.fit(Path(policy.name), files[1], rate)
            updates.append(fitted["steps"])
            ends.append(self.measure(trained, split, samples))
            if trained is None:
                break
            export_policy(trained, self.scratch / f"policy-{i}")
            policy = load_policy(str(self.scratch / f"policy-{i}"))
        left = count - len(updates)  # iterations after one that diverged
        ends, shares, updates = ends + ends[-1:] * left, shares + [0.0] * left, updates + [0] * left
        return ends[-1] | {"results": [end["result"] for end in ends], "shares": shares, "updates": updates}

    def verify(self, rate: float, samples: int, critiques: int, steps: int) -> dict[str, Any]:
        """Make a verifier of the base policy in `steps` supervised updates and train it on its critiques.

        Before and after, it judges `samples` solutions of each test problem by the base policy, `critiques` times each.
        """
        verifier, judge, policy = ArithmeticVerifier(), ArithmeticVerifier(balance=False), load_policy(str(self.base))
        folder, data = self.scratch / "base", self.scratch / "critiques.parquet"
        solutions = sample(policy, self.task, self.task.problems(self.folder / "test.jsonl"), samples, self.seed)

        def judged(policy: Policy) -> dict[str, Any]:
            """Accuracy and share of invalid critiques, balanced over verdicts; the votes on each problem."""
            rows = sample(policy, judge, judge.candidates(solutions), critiques, derived_seed(self.seed, 17))
            by_gold = [[(row.reward > 0, not row.valid) for row in rows if row.gold == gold] for gold in judge.golds()]
            accuracy, invalid = np.mean([np.mean(part, axis=0) for part in by_gold], axis=0).tolist()
            weights = [judge.weight(rows[i : i + critiques]) for i in range(0, len(rows), critiques)]
            votes = per_problem(solutions, [samples // 2, samples], weights)
            values = {name: column.round(6).tolist() for name, column in votes.items() if name[:3] in ("maj", "wei")}
            return {"accuracy": accuracy, "invalid": invalid} | values

        teach(self.task, policy.train(), self.seed, steps)
        export_policy(policy.eval(), folder)
        policy = load_policy(str(folder))
        sample_to(data, policy, verifier, verifier.problems(self.data), 2, derived_seed(self.seed, 13))
        trained, _ = self.fit(folder, data, rate, task=verifier)
        if trained is None:
            raise InputError(f"training the verifier diverged at the learning rate {rate:g}; lower it")
        before, after = judged(policy), judged(trained)
        message = f"accuracy {100 * before['accuracy']:.1f} to {100 * after['accuracy']:.1f}"
        return {"before": before, "after": after, "message": message}

    def fit(
        self, policy: Path, data: Path, rate: float, loss: losses.Loss | None = None, points: int = 0, epochs: int = 1,
        task: Task | None = None,
    ) -> tuple[Policy | None, dict[str, Any]]:  # fmt: skip
        """Train a policy on a file of trajectories, by default with TOPR, validating it `points` times an epoch.

        Returns the policy, None if training diverged; and its validation curve, what was logged, the number of updates.
        Where training diverged, the curve continues with that of a policy without valid responses.
        """
        records, loss, task = Records(), loss or losses.TOPR(), task or self.task
        module = PolicyModule(
            str(policy), task, loss, partial(self.setting.optimizer, lr=rate), LocalSampler(), threads=1
        )
        val = str(self.folder / "val.jsonl") if points else None
        trajectories = TrajectoryDataModule(
            train=str(data), val=val, val_samples=2, sampling=task.sampling, batch_size=64,
            seed=self.seed, policy=str(policy), loss=loss, task=task,
        )  # fmt: skip
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, gradient_clip_val=1.0, log_every_n_steps=1,
            val_check_interval=1 / points if points else 1.0, num_sanity_val_steps=0, logger=records,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trained: Policy | None = None
        try:
            trainer.fit(module, trajectories)
            if points and records.validations[-1]["step"] < module.global_step:  # updates follow the last validation
                trainer.validate(module, trajectories, verbose=False)
            trained = module.policy.eval()
        except DivergedError:
            pass
        curve = [{name: row[f"val/{name}"] for name in ("pass@1", "invalid")} for row in records.validations]
        if points and trained is None:
            updates = len(trajectories.plan(0))
            apart = max(1, updates // points)
            curve += [DIVERGED] * (1 + epochs * (updates // apart) + (updates % apart > 0) - len(curve))
        logged = {name: [row[name] for row in records.rows if name in row] for name in TRUNCATED}
        share = float((trajectories.reward > 0).mean())
        return trained, {"curve": curve, "logged": logged, "steps": module.global_step, "positive_share": share}

    def measure(self, policy: Policy | None, split: str, samples: int) -> dict[str, Any]:
        """pass@1, maj@samples and invalid of each problem; None stands for a policy that has diverged."""
        problems = self.task.problems(self.folder / f"{split}.jsonl")
        if policy is None:
            result = {name: [value] * len(problems) for name, value in DIVERGED.items()}
        else:
            values = per_problem(sample(policy, self.task, problems, samples, derived_seed(self.seed, 7)))
            columns = zip(DIVERGED, ("pass@1", f"maj@{samples}", "invalid"), strict=True)
            result = {name: values[column].round(6).tolist() for name, column in columns}
        message = ", ".join(f"{name} {100 * np.mean(column):.1f}" for name, column in result.items())
        return {"result": result, "message": message if policy else "diverged"}


def sample(policy: Policy, task: Task, problems: list[Problem], n: int, seed: int) -> list[Trajectory]:
    """n graded responses to each problem."""
    return sample_and_grade(LocalSampler(), policy, task, problems, n, task.sampling, seed)


def sample_to(path: Path, policy: Policy, task: Task, problems: list[Problem], n: int, seed: int) -> None:
    """Write n graded and scored responses to each problem."""
    rows = sample(policy, task, problems, n, seed)
    add_log_probs(policy, rows, 16384)
    write_trajectories(path, rows, provenance(policy.name, "32-true", task=task.name, sampling=None, iteration=0))
