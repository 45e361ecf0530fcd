"""The experiments of one seed: trainings, iterations, verifiers."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from lightning.pytorch import Callback

from data.claims.commands import ROOT, Commands
from topr.evaluation.metrics import per_problem
from topr.evaluation.pipeline import read_parts
from topr.tasks import GSM8K
from topr.trajectories import write_trajectories

DIFFICULTIES = ["up to a quarter", "up to a half", "more than half"]


class Responses(Callback):
    """Keeps the responses to test problems.

    Args:
        folder: to write
    """

    def __init__(self, folder: str):
        self.path = Path(folder) / "part-00000.parquet"

    def on_test_batch_end(self, trainer, module, outputs, batch, *args):
        write_trajectories(self.path, outputs["trajectories"], batch.job.metadata)


@dataclass
class Experiment:
    """The experiments of a seed, which decides base policy, problems, order and sampling.

    Each takes the label of its row and a learning rate, and returns further rows, too.

    Args:
        setting: sizes, see settings.yaml
        split: problems on which policies are measured; `val` to choose learning rates
        samples: responses to each of them
    """

    commands: Commands
    setting: dict
    seed: int
    split: str
    samples: int

    def __post_init__(self):
        self.folder = ROOT / "data/arithmetic"
        if self.setting["base"]:
            self.folder = self.run(self.setting["maker"])
        self.base = self.folder / "base"
        self.start = self.measure(self.base, self.split, self.samples)
        seed = self.setting["data_seed"] or self.seed
        self.trajectories = self.sample(self.base, "train", self.setting["trajectories"], seed=seed)

    def run(self, name: str, *more: str, **values) -> Path:
        """The folder with the output of a command; the setting gives values, too."""
        return self.commands.run(name, *more, **{"seed": self.seed} | self.setting | values)

    def train(
        self, label: str, rate: float, arguments: str, curation: str, validate: bool = False
    ) -> dict:
        """Train the base policy and measure the end.

        Other rows are of the problems that the base policy finds hard or easy, and of validations.

        Args:
            arguments: of fit
            curation: arguments of curate, which selects the data
            validate: before, in and after training, unless it serves to choose a rate
        """
        data = self.run("curate", *curation.split(), f"{self.trajectories}/*.parquet")
        more = arguments.split()
        validate = validate and self.split == "test"
        if validate:
            more.append(f"--data.val={self.folder}/val.jsonl")
        run = self.run("fit", *more, policy=self.base, data=data, rate=rate) / "fit/version_0"
        metrics = pd.read_csv(run / "metrics.csv")
        end = self.measure(run / "policy", self.split, self.samples)
        rows = {"before training": self.figures(self.start), label: self.figures(end)}
        for split in self.setting["elsewhere"] if self.split == "test" else []:
            for name, policy in {"before training": self.base, label: run / "policy"}.items():
                measured = self.measure(policy, split, self.samples)
                rows[f"{name}, {split}"] = self.figures(measured)
        if self.setting["unit"] == "problem":
            return rows
        difficulty = pd.cut(self.start["pass@1"], [-1, 0.25, 0.5, 1], labels=DIFFICULTIES)
        for name, row in end.groupby(difficulty, observed=False).mean().iterrows():
            rows[f"{label}, {name}"] = row.fillna(0)
        if "loss/ppo" in arguments:
            rows[label]["without gradient"] = without_gradient(metrics)
        if validate:
            validations = metrics.filter(like="val/").dropna().rename(columns=lambda x: x[4:])
            for i, values in enumerate(validations.to_dict("records")):
                rows[f"{label} at validation {i}"] = values
            end = self.measure(run / "policy", "val", 2)
            rows[f"{label} at validation, end"] = end.mean().drop("maj")  # which others lack
        return rows

    def figures(self, values: pd.DataFrame) -> pd.Series:
        """Of a row: the means over problems, or by problem and metric what intervals are over."""
        if self.setting["unit"] == "problem" and self.split == "test":
            return values.stack()
        return values.mean()

    def iterate(self, label: str, rate: float, way: str, pool: int) -> dict:
        """Sample, curate and train four times (two to choose a rate) from the newest policy.

        Of a pool of responses to each problem it keeps 8. A row for every policy.
        """
        limit = f"--trainer.limit_predict_batches={self.setting['prompt_batches']}"
        policy = self.base
        rows = {"before training": self.start.mean()}
        for i in range(4 if self.split == "test" else 2):
            positives = 0.0  # share of the data
            if policy.exists():
                pooled = self.sample(policy, "train", pool, limit)
                data = self.run(
                    "curate", way, "--budget=8", f"--iteration={i}", f"{pooled}/*.parquet"
                )
                run = self.run("fit", policy=policy, data=data, rate=rate) / "fit/version_0"
                policy = run / "policy"
                positives = pd.read_csv(run / "metrics.csv")["train/positive_share"].mean()
            values = self.measure(policy, self.split, self.samples).mean()
            values["positives"] = positives
            rows[label] = rows[f"{label} at iteration {i + 1}"] = values
        return rows

    def verify(self, label: str, rate: float, **_) -> dict:
        """Make a verifier of the base policy in supervised updates, and train it.

        It trains on two of its own critiques of each trajectory. Before and after it judges 8
        solutions of each test problem, 4 times each.
        """
        verifier = self.run("verifier", policy=self.base) / "base"
        given = {"config": "configs/arithmetic_verifier.yaml", "policy": verifier}
        critiques = self.run(
            "sample", problems=f"{self.trajectories}/*.parquet", samples=2, **given
        )
        run = self.run("fit", data=critiques, rate=rate, **given) / "fit/version_0"
        return {"before": self.judge(verifier), "after": self.judge(run / "policy")}

    def judge(self, verifier: Path) -> pd.Series:
        """Accuracy and invalid critiques of a verifier, and votes that it weighs.

        For the accuracy, correct and incorrect solutions count as equally many.
        """
        folder = self.run(
            "judge", policy=self.base, problems=self.folder / "test.jsonl", verifier=verifier
        )
        critiques = pd.read_parquet(next(folder.glob("responses/arithmetic-verifier-*")))
        balanced = critiques.groupby("gold")[["reward", "valid"]].mean().mean()
        (results,) = json.loads((folder / "results.json").read_text()).values()
        values = pd.DataFrame(results["arithmetic"]).loc["mean"]
        values["accuracy"] = (1 + balanced["reward"]) / 2  # rewards are +1 and -1
        values["invalid"] = 1 - balanced["valid"]
        return values

    def sample(self, policy: Path, split: str, samples: int, *more, way="sample", **values) -> Path:
        """A folder with a policy's responses to each problem of a split; not with log mu if the
        `way` is "measure"."""
        values |= {"policy": policy, "problems": self.folder / f"{split}.jsonl", "samples": samples}
        return self.run(way, *more, **values)

    def measure(self, policy: Path, split: str, samples: int) -> pd.DataFrame:
        """pass@1, maj@samples (as `maj`), invalid and more of each problem; of its greedy response
        the strict and the lenient grade, if the setting says so.

        A policy that does not exist is that of a training that diverged.
        """
        if not policy.exists():
            return (0 * self.measure(self.base, split, samples)).assign(invalid=1.0)
        values = per_problem(read_parts(self.sample(policy, split, samples, way="measure")))
        values["maj"] = values[f"maj@{samples}"]
        if self.setting["greedy"] and self.split == "test":
            greedy = "--data.sampling.temperature=0"
            rows = read_parts(self.sample(policy, split, 1, greedy, way="measure"))
            lenient = [GSM8K().grade_leniently(row.response, row.gold) for row in rows]
            values["greedy"] = per_problem(rows)["pass@1"]
            values["lenient"] = [grade.reward > 0 for grade in lenient]
        return values


def without_gradient(metrics: pd.DataFrame) -> float:
    """Share of responses beyond PPO's clip in the last fifth of a training.

    For the token ratio it is the mean share of their tokens.
    """
    updates = metrics.dropna(subset="train/loss")
    last = updates[len(updates) * 4 // 5 :].mean()
    share = last["train/positive_share"]
    positives = last["weight/positives_truncated"]
    return share * positives + (1 - share) * last["weight/negatives_truncated"]
