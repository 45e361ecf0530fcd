"""Make what the embedded task ships: base policies, problems, trajectories, solutions to judge."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt

from topr.evaluation import SamplingJob, sample_and_grade
from topr.io import write_text
from topr.policy import export_policy, load_policy, provenance
from topr.sampling import LocalSampler
from topr.tasks.arithmetic.imitation import imitate, make_policy, make_tokenizer
from topr.tasks.arithmetic.task import Arithmetic
from topr.tasks.arithmetic.verifier import teach
from topr.trajectories import add_log_probs, write_trajectories
from topr.trajectories.inspect import report


def make(
    task: Arithmetic,
    out: Path,
    seed: int,  # of everything; another seed gives other problems, too
    stages: list[tuple[int, float]],  # updates and learning rate of each stage of the base policy's training
    batch_size: int,  # demonstrations per update
    problems: dict[str, int],  # number of problems of each split, train first
    samples: int,  # trajectories per problem of train; 0 writes no trajectory file
) -> None:
    """Write a base policy, problems of every split, and graded, scored trajectories of the train split under `out`."""
    splits = {}
    for i, (split, count) in enumerate(problems.items(), start=1):
        splits[split] = task.distinct(split, count, np.random.default_rng([seed, i]))
        rows = [{"id": problem.id, "prompt": problem.prompt, "gold": problem.gold} for problem in splits[split]]
        write_text(out / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 0])
    policy = make_policy(make_tokenizer(task.filler.symbols + task.filler.separators if task.filler else ""))
    demonstrations = ((prompt, *task.demonstration(prompt, task.errors, rng)) for prompt in task.base(rng))
    for steps, lr in stages:
        imitate(policy, demonstrations, steps, lr, batch_size)
    export_policy(policy, out / "base")
    if samples:
        trajectories = sample_and_grade(LocalSampler(), policy, task, splits["train"], samples, task.sampling, seed)
        add_log_probs(policy, trajectories, microbatch_tokens=16384)
        sampling = asdict(task.sampling) | {"samples": samples, "seed": seed}
        metadata = provenance(str(out / "base"), "32-true", task=task.name, sampling=sampling, iteration=0)
        write_trajectories(out / "train.parquet", trajectories, metadata)
        print(report([str(out / "train.parquet")]))
    print(f"wrote a base policy, problems and {samples} trajectories per training problem under {out}")


def make_verifier(
    out: Path,
    data: Path = Path("data/arithmetic"),
    seed: NonNegativeInt = 0,
    steps: PositiveInt = 400,  # supervised updates of the base policy
    samples: PositiveInt = 4,  # solutions of each validation and test problem
) -> None:
    """Write a verifier's base policy, made from the one in `data`, and solutions for it to judge under `out`."""
    base, task = str(data / "base"), Arithmetic()
    policy = load_policy(base)
    for split in ("val", "test"):
        problems = task.problems(data / f"{split}.jsonl")
        job = SamplingJob(base, task, problems, samples, task.sampling, seed)
        job.sample_part(out / f"{split}.parquet", problems, LocalSampler(), policy)
    teach(task, policy, seed, steps)
    export_policy(policy, out / "base")
    print(f"wrote base, val.parquet and test.parquet under {out}")
