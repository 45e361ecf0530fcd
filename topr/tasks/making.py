"""Make what the embedded task ships: a base policy, problems, trajectories."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from topr.evaluation import sample_and_grade
from topr.io import atomic
from topr.policy import export_policy
from topr.report import report
from topr.sampling import LocalSampler
from topr.tasks.imitation import imitate, make_model, make_tokenizer
from topr.tokenizer import provenance
from topr.trajectories import add_log_probs, write_trajectories


def make(
    task,
    out: Path,
    seed: int,
    stages: list[tuple[int, float]],
    batch_size: int,
    problems: dict[str, int],
    samples: int,
) -> None:
    """Write base policy, problems of every split and graded, scored trajectories of the train split under `out`.

    Args:
        task: an `Arithmetic`.
        out: folder to write.
        seed: of everything; other seeds give other problems, too.
        stages: number of updates and learning rate of each stage of the base policy's training.
        batch_size: demonstrations per update.
        problems: number of problems of each split, train first.
        samples: trajectories per problem; without any, no file of them is written.
    """
    splits = {
        split: task.distinct(split, count, np.random.default_rng([seed, 1 + i]))
        for i, (split, count) in enumerate(problems.items())
    }
    torch.manual_seed(seed)
    tokenizer, rng = make_tokenizer(task.symbols), np.random.default_rng([seed, 0])
    model = make_model(tokenizer)
    demonstrations = ((prompt, task.demonstration(prompt, task.errors, rng)) for prompt in task.base(rng))
    for steps, lr in stages:
        imitate(model, tokenizer, demonstrations, steps, lr, batch_size)
    export_policy(model, tokenizer, out / "base")
    for split, drawn in splits.items():
        with atomic(out / f"{split}.jsonl") as path:
            path.write_text(
                "".join(
                    json.dumps({"id": problem.id, "prompt": problem.prompt, "gold": problem.gold}) + "\n"
                    for problem in drawn
                )
            )
    if not samples:
        print(f"wrote base and problems under {out}")
        return
    sampler = LocalSampler()
    trajectories = sample_and_grade(sampler, model, tokenizer, task, splits["train"], samples, task.sampling, seed)
    add_log_probs(model, trajectories, microbatch_tokens=16384)
    how = asdict(task.sampling) | {"samples": samples, "seed": seed}
    base = str(out / "base")
    metadata = provenance(base, tokenizer, "32-true", task=task.name, sampling=how, iteration=0)
    write_trajectories(out / "train.parquet", trajectories, metadata)
    print(f"{report([str(out / 'train.parquet')])}\nwrote base, problems and trajectories under {out}")
