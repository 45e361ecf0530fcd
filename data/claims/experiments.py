"""The experiments of one seed: base policies, trainings, iterations, verifiers."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from data.claims.commands import ROOT, Commands
from topr.evaluation import per_problem, read_parts
from topr.io import write_text

DIVERGED = {"pass@1": 0.0, "maj": 0.0, "invalid": 1.0}  # of a policy without valid responses
BUDGET = 8  # responses to a problem that an iteration trains on
VALIDATIONS = ["val/pass@1", "val/invalid"]


@dataclass
class Experiment:
    """The experiments of a seed, which decides base policy, problems, order and sampling.

    Several methods take `rate`, the learning rate; `split`, the problems on which policies are
    measured; `samples`, the responses to each of them.
    """

    commands: Commands
    setting: dict[str, Any]
    seed: int

    @cached_property
    def base(self) -> Path:
        """Folder with the base policy, its problems and trajectories."""
        if self.setting["base"] is None:
            return ROOT / "data/arithmetic"
        return self.commands.run("base", *self.setting["base"], seed=self.seed)

    def train(
        self,
        split: str,
        samples: int,
        loss: list[str] | None = None,
        rate: float = 0.0,
        curation: list[str] | None = None,
        points: int = 0,
        epochs: int = 1,
    ) -> dict[str, Any]:
        """Train the base policy, and measure the end.

        Args:
            loss: arguments of fit; by default nothing is trained
            curation: arguments of curate, which selects the data
            points: validations of an epoch, beside one before and one after training
        """
        policy = self.base / "base"
        if loss is None:
            return {"result": self.measure(policy, split, samples)}
        data = self.base / "train.parquet"
        if curation:
            data = self.curate(data, *curation)
        more = [*loss, f"--trainer.max_epochs={epochs}"]
        if points:
            more += [f"--data.val={self.base}/val.jsonl"]
            more += [f"--trainer.val_check_interval={1 / points}"]
        run, metrics = self.fit(policy, data, rate, *more)
        updates = int(metrics["train/loss"].count())
        if points:
            end = self.measure(run / "policy", "val", 2).mean()
            metrics.loc[len(metrics), VALIDATIONS] = end["pass@1"], end["invalid"]
        return {
            "result": self.measure(run / "policy", split, samples),
            "metrics": metrics,
            "positive_share": positive_share(data),
            "updates": updates,
            "CPU seconds": self.commands.cpu_s[run.parents[1].name],
        }

    def iterate(
        self, split: str, samples: int, way: str, rate: float, count: int
    ) -> dict[str, Any]:
        """Sample, curate and train `count` times, each time from the newest policy.

        Of a pool of responses to each problem it keeps 8; if `way` is uniform, no more are sampled.
        Every policy is measured.
        """
        problems = self.first_problems(self.setting["prompts"])
        pool = BUDGET if way == "uniform" else self.setting["pool"]
        policy = self.base / "base"
        results = [self.measure(policy, split, samples)]
        shares = [0.0] * count
        updates = [0] * count
        for i in range(count):
            if policy.exists():
                pooled = self.sample(policy, problems, pool, 1000 * self.seed + i)
                data = self.curate(pooled, way, f"--budget={BUDGET}", f"--iteration={i}")
                run, metrics = self.fit(policy, data, rate)
                policy = run / "policy"
                shares[i] = positive_share(data)
                updates[i] = int(metrics["train/loss"].count())
            results.append(self.measure(policy, split, samples))
        return {"result": results[-1], "results": results, "shares": shares, "updates": updates}

    def verify(self, rate: float, steps: int) -> dict[str, Any]:
        """Make a verifier of the base policy in `steps` supervised updates, and train it.

        It trains on two of its own critiques of each trajectory. Before and after it judges 8
        solutions of each test problem, 4 times each.
        """
        config = "configs/arithmetic_verifier.yaml"
        policy = self.commands.run("verifier", data=self.base, steps=steps, seed=self.seed) / "base"
        solutions = self.base / "train.parquet"
        critiques = self.sample(policy, solutions, 2, 1000 * self.seed, config)
        run, _ = self.fit(policy, critiques, rate, config=config)
        return {"before": self.judge(policy), "after": self.judge(run / "policy")}

    def judge(self, verifier: Path) -> dict[str, float]:
        """Accuracy and invalid critiques of a verifier, and votes that it weighs.

        For the accuracy, correct and incorrect solutions count as equally many.
        """
        base = {"policy": self.base / "base", "problems": self.base / "test.jsonl"}
        folder = self.commands.run("judge", verifier=verifier, seed=self.seed, **base)
        parts = next(folder.glob("responses/arithmetic-verifier-*"))
        critiques = pq.read_table(parts, columns=["reward", "valid", "gold"]).to_pandas()
        critiques["accuracy"] = critiques["reward"] > 0
        critiques["invalid"] = ~critiques["valid"]
        found = critiques.groupby("gold")[["accuracy", "invalid"]].mean().mean().to_dict()
        results = json.loads((folder / "results.json").read_text())
        votes = results[str(base["policy"])]["arithmetic"]
        for name in ("maj@4", "weighted@4", "maj@8", "weighted@8"):
            found[name] = votes[name]["mean"]
        return found

    def fit(
        self, policy: Path, data: Path, rate: float, *more: str, config: str | None = None
    ) -> tuple[Path, pd.DataFrame]:
        """Train a policy; the folder of the run, without a policy if it diverged, and metrics."""
        given = {"config": config or self.setting["config"], "policy": policy, "data": data}
        run = self.commands.run("fit", *more, rate=rate, seed=self.seed, **given) / "fit/version_0"
        return run, pd.read_csv(run / "metrics.csv")

    def sample(
        self, policy: Path, problems: Path, samples: int, seed: int, config: str | None = None
    ) -> Path:
        """The trajectory files, by a glob, with responses of a policy."""
        given = {"config": config or self.setting["config"], "policy": policy, "problems": problems}
        return self.commands.run("sample", samples=samples, seed=seed, **given) / "part-*.parquet"

    def curate(self, files: Path, way: str, *more: str) -> Path:
        """A file with a selection of trajectories."""
        folder = self.commands.run("curate", *more, files=files, way=way, seed=self.seed)
        return folder / "train.parquet"

    def measure(self, policy: Path, split: str, samples: int) -> pd.DataFrame:
        """pass@1, maj@samples and invalid of each problem; a policy that is absent has diverged."""
        problems = self.base / f"{split}.jsonl"
        if not policy.exists():
            count = len(problems.read_text().splitlines())
            return pd.DataFrame(DIVERGED, index=range(count))
        files = self.sample(policy, problems, samples, 1000 * self.seed + 999)
        values = per_problem(read_parts(files.parent))
        return pd.DataFrame(values).rename(columns={f"maj@{samples}": "maj"})[list(DIVERGED)]

    def first_problems(self, count: int) -> Path:
        """A file of the first training problems."""
        lines = (self.base / "train.jsonl").read_text().splitlines(keepends=True)
        path = self.commands.cache / f"{self.base.name}-{count}.jsonl"
        write_text(path, "".join(lines[:count]))
        return path


def positive_share(data: Path) -> float:
    reward = pq.read_table(data, columns=["reward"])["reward"].to_numpy()
    return float((reward > 0).mean())
