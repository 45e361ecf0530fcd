"""The embedded settings that carry the claims, and how their base policies are made."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from topr.curation import Curation, curate
from topr.io import InputError
from topr.tasks.arithmetic import Arithmetic, configured
from topr.tasks.making import make

ROOT = Path(__file__).parent.parent


class Regime(NamedTuple):
    """A task, its base policy and how it is trained."""

    task: Arithmetic
    optimizer: type[torch.optim.Optimizer]
    rates: list[float]  # of learning: the grid, the same for every method
    stages: list[tuple[int, float]]  # updates and learning rates of the base policy's supervised training
    batch_size: int  # of it
    scale: dict[str, int]  # problems of train, val and test, and trajectories of a training problem
    claims: list[int]  # that are measured with it
    shipped: Path
    bases: str  # name of its base policies, which regimes may share
    study: dict[str, Any] = {}  # what a `Study` is made with, where its defaults do not fit

    @property
    def settings(self) -> dict[str, Any]:
        """What a result depends on beside the arguments of its job."""
        task = type(self.task).__name__, vars(self.task)
        return {
            "task": task,
            "optimizer": self.optimizer.__name__,
            "stages": self.stages,
            "batch_size": self.batch_size,
        }

    def make(self, folder: Path, seed: int, scale: dict[str, int]) -> None:
        """Write base policy, problems and trajectories under `folder`.

        Args:
            folder: to write.
            seed: of everything.
            scale: problems of train, val and test, and `samples`, trajectories per training problem. With `samples`
                alone, everything is taken from what is shipped, and the trajectories by chance from the shipped ones.

        Raises:
            InputError: nothing is shipped.
        """
        if list(scale) == ["samples"]:
            if not (self.shipped / "train.parquet").exists():
                raise InputError(f"{self.shipped} ships no trajectories; leave --quick to the standard regime")
            shutil.copytree(self.shipped / "base", folder / "base")
            for split in ("train", "val", "test"):
                shutil.copy(self.shipped / f"{split}.jsonl", folder)
            few = Curation("uniform", budget=scale["samples"], seed=seed)
            curate([str(self.shipped / "train.parquet")], folder / "train.parquet", few)
            return
        problems: dict[str, Any] = {split: scale[split] for split in ("train", "val", "test")}
        make(self.task, folder, seed, self.stages, self.batch_size, problems, scale["samples"])


_STRONG = Regime(
    task=configured(ROOT / "configs/arithmetic_strong.yaml", {}),
    optimizer=torch.optim.SGD,
    rates=[0.01, 0.03, 0.1, 0.2, 0.3],
    stages=[(1000, 3e-3), (800, 1.5e-3), (700, 5e-4)],
    batch_size=128,
    # a pool from which data with 10% positives can be taken, though three quarters of it are positive
    scale={"train": 500, "val": 200, "test": 500, "samples": 32},
    claims=[1, 4, 5, 6, 7],
    shipped=ROOT / "data/arithmetic/strong",
    bases="strong",
    study={"methods": ["TOPR", "positives only", "REINFORCE"], "budget": 8, "samples": 8}
    | {"grid_seeds": 3, "share_grid_seeds": 3, "shares": [0.05, 0.15, 0.5, 0.9], "small_rate": 0.01},
)
_ADAMW = {"optimizer": torch.optim.AdamW, "rates": [2e-5, 1e-4, 3e-4, 1e-3]}

REGIMES = {
    # a weak base, low entropy, large movement: the quick start
    "standard": Regime(
        task=Arithmetic(),
        **_ADAMW,
        stages=[(1150, 3e-3)],
        batch_size=96,
        scale={"train": 500, "val": 200, "test": 300, "samples": 16},
        claims=[1, 2, 3, 4, 5, 6, 7, 8],
        shipped=ROOT / "data/arithmetic",
        bases="standard",
        study={"points": 8, "gradients": 600, "prompts": 240, "pool": 24},  # less than usual, for the sake of time
    ),
    # a strong base, high entropy, small movement
    "strong": _STRONG,
    # what the optimiser decides
    "strong_adamw": _STRONG._replace(**_ADAMW, claims=[5, 6], study=_STRONG.study | {"small_rate": 2e-5}),
    # what entropy decides: the same problems and mistakes, without the wording
    "plain": _STRONG._replace(
        task=configured(ROOT / "configs/arithmetic_strong.yaml", {"filler": None}), claims=[5, 6], bases="plain"
    ),
}
