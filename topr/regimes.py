"""The embedded settings that carry the claims, and how their base policies are made."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from topr.curation import Curation, curate
from topr.io import InputError
from topr.tasks.arithmetic import Arithmetic
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
                raise InputError(f"{self.shipped} ships no trajectories; leave --quick to the quick regime")
            shutil.copytree(self.shipped / "base", folder / "base")
            for split in ("train", "val", "test"):
                shutil.copy(self.shipped / f"{split}.jsonl", folder)
            few = Curation("uniform", budget=scale["samples"], seed=seed)
            curate([str(self.shipped / "train.parquet")], folder / "train.parquet", few)
            return
        problems: dict[str, Any] = {split: scale[split] for split in ("train", "val", "test")}
        make(self.task, folder, seed, self.stages, self.batch_size, problems, scale["samples"])


REGIMES = {
    # a weak base, low entropy, large movement: the quick start
    "quick": Regime(
        task=Arithmetic(),
        optimizer=torch.optim.AdamW,
        rates=[2e-5, 1e-4, 3e-4, 1e-3],
        stages=[(1150, 3e-3)],
        batch_size=96,
        scale={"train": 500, "val": 200, "test": 300, "samples": 16},
        claims=[1, 2, 3, 4, 5, 6, 7, 8],
        shipped=ROOT / "data/arithmetic",
    ),
}
