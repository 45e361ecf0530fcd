"""Experiments on the embedded task: base policies, trainings, iterations, verifiers."""

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers.logger import DummyLogger

from topr import losses
from topr.datamodule import TrajectoryDataModule
from topr.evaluation import derived_seed, per_problem
from topr.io import DivergedError, InputError, atomic
from topr.module import PolicyModule
from topr.policy import Policy, export_policy, load_policy
from topr.reproduce.making import imitate, judgements, make, sample, sample_to
from topr.sampling import LocalSampler
from topr.tasks import Arithmetic, ArithmeticVerifier, Task
from topr.trajectories.curate import Curation, Way, curate

DIVERGED = {
    "pass@1": 0.0,
    "maj": 0.0,
    "invalid": 1.0,
}  # metrics of a policy without valid responses


@dataclass
class Experiment:
    """Experiments of one seed, which decides base policy, data, order and sampling. Results can be written as JSON.
    Several take `rate`, the learning rate; `split`, which policies are measured on; `samples`, responses to a problem.
    """

    folder: Path  # with the base policy, its problems and trajectories
    task: Arithmetic
    optimizer: Any  # a class of `torch.optim`
    seed: int
    scratch: Path = Path()  # an empty folder, set before an experiment is run

    def make_base(self, **base: Any) -> dict[str, Any]:
        """Make a base policy, problems and trajectories; the arguments are those of `make`."""
        if not self.folder.exists():  # it does if a command was killed before it wrote the result
            with atomic(self.folder) as made:
                make(self.task, made, self.seed, **base)
        return {}

    def train(
        self,
        split: str,
        samples: int,
        loss: list | None,
        rate: float = 0.0,
        curation: dict | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Train from the base policy and measure the end. `loss` is a name and arguments, None for no training;
        `curation` arguments of a `Curation` of the data; `more` arguments of `fit`."""
        base, data = self.folder / "base", self.folder / "train.parquet"
        if loss is None:
            return self.measure(load_policy(str(base)), split, samples)
        if curation:
            files, data = [str(data)], self.scratch / "train.parquet"
            curate(files, data, Curation(**curation, seed=self.seed))
        policy, fitted = self.fit(base, data, rate, getattr(losses, loss[0])(**loss[1]), **more)
        return fitted | self.measure(policy, split, samples)

    def iterate(
        self,
        split: str,
        samples: int,
        way: Way,
        rate: float,
        count: int,
        prompts: int,
        budget: int,
        pool: int,
    ) -> dict[str, Any]:
        """Sample, curate and train `count` times, each time from the newest policy, and measure every policy.
        Of `pool` responses to each of the first `prompts` problems (`budget` if `way` is uniform) it keeps `budget`."""
        policy, drawn = load_policy(str(self.folder / "base")), budget if way == "uniform" else pool
        problems = self.task.problems(self.folder / "train.jsonl")[:prompts]
        ends, shares, updates = [self.measure(policy, split, samples)], [], []
        for i in range(count):
            sampled, kept = self.scratch / f"pool-{i}.parquet", self.scratch / f"train-{i}.parquet"
            sample_to(sampled, policy, self.task, problems, drawn, derived_seed(self.seed, 11, i))
            done = curate([str(sampled)], kept, Curation(way, budget=budget, seed=self.seed), i)
            shares.append(done["after"]["positive_share"])
            trained, fitted = self.fit(Path(policy.name), kept, rate)
            updates.append(fitted["steps"])
            ends.append(self.measure(trained, split, samples))
            if trained is None:
                break
            export_policy(trained, self.scratch / f"policy-{i}")
            policy = load_policy(str(self.scratch / f"policy-{i}"))
        left = count - len(updates)  # iterations after one that diverged
        ends, shares, updates = ends + ends[-1:] * left, shares + [0.0] * left, updates + [0] * left
        return ends[-1] | {
            "results": [end["result"] for end in ends],
            "shares": shares,
            "updates": updates,
        }

    def verify(self, rate: float, samples: int, critiques: int, steps: int) -> dict[str, Any]:
        """Make a verifier of the base policy in `steps` supervised updates and train it on its critiques. Before and
        after, it judges `samples` solutions of each test problem by the base policy, `critiques` times each."""
        policy, data = load_policy(str(self.folder / "base")), self.scratch / "critiques.parquet"
        base, verifier, judge = (
            self.scratch / "base",
            ArithmeticVerifier(),
            ArithmeticVerifier(balance=False),
        )
        solutions = sample(
            policy, self.task, self.task.problems(self.folder / "test.jsonl"), samples, self.seed
        )

        def judged(policy: Policy) -> dict[str, Any]:
            rows = sample(
                policy, judge, judge.candidates(solutions), critiques, derived_seed(self.seed, 17)
            )
            by_gold = [
                [(row.reward > 0, not row.valid) for row in rows if row.gold == gold]
                for gold in judge.verdicts
            ]
            accuracy, invalid = np.mean(
                [np.mean(part, axis=0) for part in by_gold], axis=0
            ).tolist()
            weights = [
                judge.weight(rows[i : i + critiques]) for i in range(0, len(rows), critiques)
            ]
            votes = per_problem(solutions, [samples // 2, samples], weights)
            kept = {
                name: votes[name].round(6).tolist()
                for name in votes
                if name.startswith(("maj", "weighted"))
            }
            return {"accuracy": accuracy, "invalid": invalid} | kept

        imitate(policy.train(), judgements(self.task, np.random.default_rng([self.seed, 0])), steps)
        export_policy(policy.eval(), base)
        policy = load_policy(str(base))
        problems = verifier.problems(self.folder / "train.parquet")
        sample_to(data, policy, verifier, problems, 2, derived_seed(self.seed, 13))
        trained, _ = self.fit(base, data, rate, task=verifier)
        if trained is None:
            raise InputError(
                f"training the verifier diverged at the learning rate {rate:g}; lower it"
            )
        return {"before": judged(policy), "after": judged(trained)}

    def fit(
        self, policy: Path, data: Path, rate: float, loss: losses.Loss | None = None, points: int = 0, epochs: int = 1,
        task: Task | None = None,
    ) -> tuple[Policy | None, dict[str, Any]]:  # fmt: skip
        """Train a policy on a file of trajectories, by default with TOPR, validating it `points` times an epoch.
        Returns it, None if training diverged; and validation curve, logged statistics, number of updates. The curve of
        a training that diverged ends as that of a policy without valid responses."""
        rows, clock = (
            list[dict[str, Any]](),
            list[float](),
        )  # what training logs; ends minus beginnings of its batches
        logger = DummyLogger()
        logger.log_metrics = lambda metrics, step: rows.append(metrics)  # type: ignore[method-assign, misc]
        loss, task = loss or losses.TOPR(), task or self.task
        optimizer, val = (
            partial(self.optimizer, lr=rate),
            str(self.folder / "val.jsonl") if points else None,
        )
        module = PolicyModule(str(policy), task, loss, optimizer, LocalSampler(), threads=1)
        trajectories = TrajectoryDataModule(
            train=str(data), val=val, val_samples=2, sampling=task.sampling, batch_size=64,
            seed=self.seed, policy=str(policy), loss=loss, task=task,
        )  # fmt: skip
        timer = LambdaCallback(
            on_train_batch_start=lambda *_: clock.append(-time.process_time()),
            on_train_batch_end=lambda *_: clock.append(time.process_time()),
        )
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, gradient_clip_val=1.0, log_every_n_steps=1,
            val_check_interval=1 / points if points else 1.0, num_sanity_val_steps=0, logger=logger,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=timer,
        )  # fmt: skip
        trained: Policy | None = None
        with suppress(DivergedError):
            trainer.fit(module, trajectories)
            trained = module.policy.eval()
        whole, rest = divmod(int(trainer.num_training_batches), int(trainer.val_check_batch or 1))
        if points and rest and trained is not None:  # updates follow the last validation
            trainer.validate(module, trajectories, verbose=False)
        curve = [
            {name: row[f"val/{name}"] for name in ("pass@1", "invalid")}
            for row in rows
            if "val/pass@1" in row
        ]
        if points and trained is None:
            curve += [DIVERGED] * (1 + epochs * whole + (rest > 0) - len(curve))
        truncated = "weight/positives_truncated", "weight/negatives_truncated"
        logged = {name: [row[name] for row in rows if name in row] for name in truncated}
        share = float((trajectories.reward > 0).mean())
        found = {
            "curve": curve,
            "logged": logged,
            "steps": module.global_step,
            "positive_share": share,
        }
        return trained, found | {
            "train_cpu_s": sum(clock[: len(clock) // 2 * 2])
        }  # one may not have ended

    def measure(self, policy: Policy | None, split: str, samples: int) -> dict[str, Any]:
        """pass@1, maj@samples and invalid of each problem; None stands for a policy that has diverged."""
        problems = self.task.problems(self.folder / f"{split}.jsonl")
        if policy is None:
            return {"result": {name: [value] * len(problems) for name, value in DIVERGED.items()}}
        values = per_problem(
            sample(policy, self.task, problems, samples, derived_seed(self.seed, 7))
        )
        columns = zip(DIVERGED, ("pass@1", f"maj@{samples}", "invalid"), strict=True)
        return {"result": {name: values[column].round(6).tolist() for name, column in columns}}
