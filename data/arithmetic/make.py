"""Make the embedded task's data. data/README.md has the commands that made what is shipped.

python data/arithmetic/make.py base --out FOLDER: a base policy, problems, trajectories.
python data/arithmetic/make.py verifier --out FOLDER: a verifier's base policy, and solutions for
it to judge.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from data.arithmetic.critiques import judgements
from data.arithmetic.imitation import imitate, make_policy, make_tokenizer
from data.arithmetic.problems import (
    LETTERS,
    SEPARATORS,
    Problem,
    Setting,
    demonstration,
    problems_of,
)
from topr.commands import ArgumentParser, command
from topr.evaluation import SamplingJob
from topr.io import check_folder, write_text
from topr.policy import export_policy, load_policy
from topr.sampling import LocalSampler
from topr.tasks import Arithmetic
from topr.trajectories import write_trajectories


def make_base(
    out: Path,
    setting: Setting = Setting(),
    seed: NonNegativeInt = 0,
    stages: tuple[tuple[PositiveInt, PositiveFloat], ...] = ((1150, 3e-3),),
    batch_size: PositiveInt = 96,
    train: PositiveInt = 500,
    val: PositiveInt = 200,
    test: PositiveInt = 300,
    samples: NonNegativeInt = 16,
) -> None:
    """Write a base policy, problems, and graded and scored trajectories.

    Args:
        out: folder to write
        seed: of everything; another seed gives other problems, too
        stages: number of supervised updates and learning rate of each stage
        batch_size: demonstrations per supervised update
        train: train problems
        val: val problems
        test: test problems
        samples: trajectories per train problem; 0 writes none
    """
    check_folder("--out", out)
    for number, (split, count) in enumerate({"train": train, "val": val, "test": test}.items(), 1):
        rng = np.random.default_rng([seed, number])
        write_text(out / f"{split}.jsonl", different(problems_of(setting, split, rng), count))

    torch.manual_seed(seed)
    policy = make_policy(make_tokenizer(LETTERS + SEPARATORS if setting.filler else ""))
    examples = demonstrations(setting, np.random.default_rng([seed, 0]))
    for steps, lr in stages:
        imitate(policy, examples, steps, lr, batch_size)
    export_policy(policy, out / "base")

    if samples:
        task = Arithmetic(setting.max_new_tokens)
        write_responses(out / "train.parquet", out, task, samples, seed)


def make_verifier(
    out: Path,
    data: Path = Path("data/arithmetic"),
    seed: NonNegativeInt = 0,
    steps: PositiveInt = 400,
    samples: PositiveInt = 4,
) -> None:
    """Write a verifier's base policy, and solutions for it to judge.

    Args:
        out: folder to write
        data: folder with the base policy and its problems
        seed: of everything
        steps: supervised updates, from the base policy on
        samples: solutions of each val and test problem
    """
    check_folder("--out", out)
    for split in ("val", "test"):
        write_responses(out / f"{split}.parquet", data, Arithmetic(), samples, seed)
    policy = load_policy(str(data / "base"))
    imitate(policy, judgements(Setting(), np.random.default_rng([seed, 0])), steps)
    export_policy(policy, out / "base")


def different(problems: Iterator[Problem], count: int) -> str:
    """The first `count` different problems, as JSON lines."""
    found: dict[str, None] = {}
    while len(found) < count:
        problem = next(problems)
        row = {"id": problem.id, "prompt": problem.prompt, "gold": problem.gold}
        found[json.dumps(row) + "\n"] = None
    return "".join(found)


def demonstrations(setting: Setting, rng: np.random.Generator) -> Iterator[tuple[str, str, bool]]:
    """Endless prompts of the base split with imperfect solutions, and whether these end."""
    for problem in problems_of(setting, "base", rng):
        response, finished = demonstration(setting, setting.errors, problem.prompt, rng)
        yield problem.prompt, response, finished


def write_responses(path: Path, data: Path, task: Arithmetic, samples: int, seed: int) -> None:
    """Write graded and scored responses of the base policy to the problems of that name."""
    policy = str(data / "base")
    problems = task.problems(data / f"{path.stem}.jsonl")
    job = SamplingJob(policy, task, problems, samples, task.sampling, seed)
    rows = job.sample(problems, LocalSampler(), load_policy(policy), microbatch_tokens=16384)
    write_trajectories(path, rows, job.metadata)


def main() -> None:
    torch.set_num_threads(1)  # fast enough for this size, and the same bits everywhere
    commands: dict[str, Any] = {"base": make_base, "verifier": make_verifier}
    with command():
        auto_cli(commands, as_positional=False, parser_class=ArgumentParser)


if __name__ == "__main__":
    main()
