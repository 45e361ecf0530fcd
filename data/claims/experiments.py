"""The experiments of one seed: trainings, iterations, verifiers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from data.claims.commands import ROOT, Commands
from topr.evaluation import per_problem, read_parts
from topr.io import write_text

SETTINGS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text())
LOSSES = SETTINGS["losses"] | SETTINGS["clipped"]
# of a policy that does not exist, because training diverged
DIVERGED = {"pass@1": 0.0, "maj": 0.0, "invalid": 1.0}
DIFFICULTIES = ["up to a quarter", "up to a half", "more than half"]
BUDGET = 8  # responses to a problem that an iteration trains on
ITERATIONS = {"val": 2, "test": 4}
Scores = dict[str, Any]  # by metric
Rows = dict[str, Scores]  # by label; braces stand for the label of the run


class Experiment:
    """The experiments of a seed, which decides base policy, problems, order and sampling.

    Several methods take `rate`, the learning rate; `split`, the problems on which policies are
    measured; `samples`, the responses to each of them.
    """

    def __init__(self, commands: Commands, setting: dict[str, Any], seed: int):
        self.commands = commands
        self.setting = setting
        self.seed = seed
        self.config = setting["config"]
        self.base = ROOT / "data/arithmetic"
        if setting["base"] is not None:
            self.base = commands.run("base", *setting["base"], seed=seed)

    def train(
        self,
        split: str,
        samples: int,
        rate: float,
        loss: str = "",
        more: str = "",
        curation: str = "",
        points: str = "",
        epochs: str = "1",
    ) -> Rows:
        """Train the base policy, and measure the end.

        Args:
            loss: of settings.yaml; without one nothing is trained
            more: other arguments of fit
            curation: arguments of curate, which selects the data
            points: validations of an epoch, beside one before and one after training; only with
                the split `test`
        """
        policy = self.base / "base"
        if not loss:
            return {"{}": self.measure(policy, split, samples)}
        data = self.base / "train.parquet"
        if self.setting["budget"] and not curation:
            curation = f"uniform --budget={self.setting['budget']}"
        if curation:
            data = self.curate(data, *curation.split())
        arguments = [*LOSSES[loss].split(), *more.split(), f"--trainer.max_epochs={epochs}"]
        validates = bool(points) and split == "test"
        if validates:
            arguments += [f"--data.val={self.base}/val.jsonl"]
            arguments += [f"--trainer.val_check_interval={1 / int(points)}"]
        policy, metrics = self.fit(policy, data, rate, *arguments)
        scores = self.measure(policy, split, samples)
        scores["updates"] = metrics["train/loss"].count()
        scores["CPU seconds"] = self.commands.cpu_s[policy.parents[2].name]
        if loss.startswith("PPO"):
            scores["without gradient"] = without_gradient(metrics, positive_share(data))
        if validates:
            end = self.measure(policy, "val", 2)
            for name in ("pass@1", "invalid"):
                scores[f"val/{name}"] = [*metrics[f"val/{name}"].dropna(), end[name]]
        return {"{}": scores}

    def iterate(self, split: str, samples: int, rate: float, way: str) -> Rows:
        """Sample, curate and train several times, each time from the newest policy.

        Of a pool of responses to each problem it keeps 8; if `way` is uniform, no more are sampled.
        Every policy is measured.
        """
        lines = (self.base / "train.jsonl").read_text().splitlines(keepends=True)
        problems = self.commands.cache / f"{self.base.name}-{self.setting['prompts']}.jsonl"
        write_text(problems, "".join(lines[: self.setting["prompts"]]))
        pool = BUDGET if way == "uniform" else self.setting["pool"]
        policy = self.base / "base"
        rows = {"{} at iteration 0": self.measure(policy, split, samples)}
        shares = {}
        for i in range(ITERATIONS[split]):
            share = 0.0
            if policy.exists():
                pooled = self.sample(policy, problems, pool, 1000 * self.seed + i)
                data = self.curate(pooled, way, f"--budget={BUDGET}", f"--iteration={i}")
                share = positive_share(data)
                policy, _ = self.fit(policy, data, rate)
            shares[f"iteration {i + 1}"] = share
            rows[f"{{}} at iteration {i + 1}"] = rows["{}"] = self.measure(policy, split, samples)
        return rows | {"positives, {}": shares}

    def verify(self, rate: float, **_: Any) -> Rows:
        """Make a verifier of the base policy in supervised updates, and train it.

        It trains on two of its own critiques of each trajectory. Before and after it judges 8
        solutions of each test problem, 4 times each.
        """
        steps = self.setting["verifier_steps"]
        policy = self.commands.run("verifier", data=self.base, steps=steps, seed=self.seed) / "base"
        solutions = self.base / "train.parquet"
        self.config = "configs/arithmetic_verifier.yaml"
        critiques = self.sample(policy, solutions, 2, 1000 * self.seed)
        trained, _ = self.fit(policy, critiques, rate)
        after = self.judge(trained)
        gains = {f"@{k}": after[f"weighted@{k}"] - after[f"maj@{k}"] for k in (4, 8)}
        return {"before": self.judge(policy), "after": after, "votes": gains}

    def judge(self, verifier: Path) -> Scores:
        """Accuracy and invalid critiques of a verifier, and votes that it weighs.

        For the accuracy, correct and incorrect solutions count as equally many.
        """
        given = {"policy": self.base / "base", "problems": self.base / "test.jsonl"}
        folder = self.commands.run("judge", verifier=verifier, seed=self.seed, **given)
        critiques = pd.read_parquet(next(folder.glob("responses/arithmetic-verifier-*")))
        critiques["accuracy"] = critiques["reward"] > 0
        critiques["invalid"] = ~critiques["valid"]
        scores = critiques.groupby("gold")[["accuracy", "invalid"]].mean().mean().to_dict()
        (results,) = json.loads((folder / "results.json").read_text()).values()
        for name in ("maj@4", "weighted@4", "maj@8", "weighted@8"):
            scores[name] = results["arithmetic"][name]["mean"]
        return scores

    def fit(self, policy: Path, data: Path, rate: float, *more: str) -> tuple[Path, pd.DataFrame]:
        """Train a policy; the new one, which does not exist after divergence, and metrics."""
        given = {"config": self.config, "policy": policy, "data": data, "rate": rate}
        run = self.commands.run("fit", *more, seed=self.seed, **given) / "fit/version_0"
        return run / "policy", pd.read_csv(run / "metrics.csv")

    def sample(self, policy: Path, problems: Path, samples: int, seed: int) -> Path:
        """The trajectory files, by a glob, with responses of a policy."""
        given = {"config": self.config, "policy": policy, "problems": problems}
        return self.commands.run("sample", samples=samples, seed=seed, **given) / "part-*.parquet"

    def curate(self, files: Path, way: str, *more: str) -> Path:
        """A file with a selection of trajectories."""
        folder = self.commands.run("curate", *more, files=files, way=way, seed=self.seed)
        return folder / "train.parquet"

    def measure(self, policy: Path, split: str, samples: int) -> Scores:
        """pass@1, maj@samples, invalid; and pass@1 by how often the base policy is right."""
        solved = self.per_problem(self.base / "base", split, samples)["pass@1"]
        values = pd.DataFrame(DIVERGED, index=solved.index)
        if policy.exists():
            values = self.per_problem(policy, split, samples)
        groups = pd.cut(solved, [-1, 0.25, 0.5, 1], labels=DIFFICULTIES)
        by_difficulty = values["pass@1"].groupby(groups, observed=False).mean()
        return {**values.mean(), **by_difficulty.fillna(0)}

    def per_problem(self, policy: Path, split: str, samples: int) -> pd.DataFrame:
        """Metrics of each problem."""
        problems = self.base / f"{split}.jsonl"
        files = self.sample(policy, problems, samples, 1000 * self.seed + 999)
        values = per_problem(read_parts(files.parent))
        values["maj"] = values[f"maj@{samples}"]
        return pd.DataFrame(values)[list(DIVERGED)]


def positive_share(data: Path) -> float:
    reward = pd.read_parquet(data, columns=["reward"])["reward"]
    return float((reward > 0).mean())


def without_gradient(metrics: pd.DataFrame, share: float) -> float:
    """Share of responses beyond the clip in the last fifth of a training.

    For the token ratio it is the mean share of their tokens. `share`: of positives in the data.
    """
    last = []
    for sign in ("positives", "negatives"):
        column = metrics[f"weight/{sign}_truncated"].dropna()  # a batch may lack a sign
        last.append(column.tail(max(1, len(column) // 5)).mean())
    return float(np.dot(last, [share, 1 - share]))
