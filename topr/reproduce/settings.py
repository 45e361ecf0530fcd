"""The two embedded settings: task, base policies, optimiser, and the sizes of the experiments."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from topr.tasks.arithmetic.task import Arithmetic, configured

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "data" / "arithmetic"
LOSSES: dict[str, list] = {
    name: [name, {}] for name in ("TOPR", "REINFORCE", "PPO", "DPO")
}  # class and arguments, by method
LOSSES |= {"positives only": ["PositivesOnly", {}], "PPO, sequence ratio": ["PPO", {"ratio": "sequence"}]}


# how base policies are made: updates and learning rates, batch size, problems, trajectories of a training problem
BASE = {"stages": [(1150, 3e-3)], "batch_size": 96, "problems": {"train": 500, "val": 200, "test": 300}, "samples": 16}
STRONG_BASE = {"stages": [(1000, 3e-3), (800, 1.5e-3), (700, 5e-4)], "batch_size": 128}
# three quarters of the responses are right, so that many are needed for data with few positives
STRONG_BASE |= {"problems": {"train": 500, "val": 200, "test": 500}, "samples": 32}


@dataclass(frozen=True)
class Setting:
    """An embedded task and what is done with it. The defaults are the quick start's, whose base policy is weak."""

    task: Arithmetic = field(default=Arithmetic(), repr=False)
    optimizer: Any = torch.optim.AdamW  # a class of `torch.optim`
    base: dict[str, Any] | None = field(default_factory=lambda: BASE)  # None for the shipped one, with its data
    claims: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    rates: tuple[float, ...] = (2e-5, 1e-4, 3e-4, 1e-3)  # the grid of learning rates, the same for every method
    tuning_seeds: int = 2  # number of seeds on which learning rates are chosen
    share_tuning_seeds: int = 1  # the same for claim 5, which has many methods
    methods: tuple[str, ...] = ("TOPR", "positives only", "REINFORCE", "PPO", "PPO, sequence ratio", "DPO")
    budget: int | None = None  # trajectories of a problem that the methods are trained on; None for all
    points: int = 8  # validations of an epoch
    samples: int = 16  # responses to each test problem, in claims 5 to 7 at most 8
    shares: tuple[float, ...] = (0.05, 0.15, 0.3, 0.5, 0.9)  # effective, of positives
    small_rate: float | None = None  # a learning rate for all shares alike
    total: int = 3200  # trajectories of a given share of positives
    prompts: int = 240  # of an iteration
    pool: int = 24  # responses to each of them, from which Anna Karenina sampling takes 8
    verifier_steps: int = 300  # supervised updates that make a verifier of a base policy


QUICK: dict[str, Any] = {"base": None, "budget": 4, "rates": (1e-4, 1e-3), "tuning_seeds": 1, "samples": 4, "points": 5}
QUICK |= {"shares": (0.05, 0.15, 0.5, 0.9), "total": 800, "prompts": 100, "pool": 16, "verifier_steps": 100}
# a strong base policy of high entropy
STRONG: dict[str, Any] = {"task": configured(ROOT / "configs/arithmetic_strong.yaml", {}), "optimizer": torch.optim.SGD}
STRONG |= {"base": STRONG_BASE, "claims": (1, 4, 5, 6, 7)}
STRONG |= {"rates": (0.01, 0.03, 0.1, 0.2, 0.3), "tuning_seeds": 3, "share_tuning_seeds": 3, "small_rate": 0.01}
STRONG |= {"methods": ("TOPR", "positives only", "REINFORCE"), "budget": 8, "points": 10, "samples": 8}
STRONG |= {"shares": (0.05, 0.15, 0.5, 0.9), "prompts": 300, "pool": 32}
SETTINGS = {"standard": Setting(), "strong": Setting(**STRONG)}
