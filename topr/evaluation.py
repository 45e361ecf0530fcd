"""Sampling, grading and scoring of problems: what validation, prediction, evaluate.py and the drivers share."""

from collections.abc import Iterable
from itertools import groupby

import numpy as np
from torch import nn

from topr.io import InputError
from topr.metrics import bootstrap_interval, maj_at_k, pass_at_k
from topr.policy import encode_prompt
from topr.sampling import Sampler, Sampling
from topr.tasks.task import Grade, Problem, Task
from topr.trajectories import Trajectory


def sample_and_grade(
    sampler: Sampler,
    model: nn.Module,
    tokenizer,
    task: Task,
    problems: list[Problem],
    n: int,
    sampling: Sampling,
    seed: int,
) -> list[Trajectory]:
    """n graded responses to each problem, one problem after the other, `ref_logprobs` still empty."""
    prompts = [encode_prompt(task.prompt(problem, tokenizer), tokenizer) for problem in problems]
    ids = [prompt_ids for _, prompt_ids in prompts]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    for problem, prompt_ids in zip(problems, ids, strict=True):
        if len(prompt_ids) + sampling.max_new_tokens > context:
            raise InputError(
                f"problem {problem.id!r}: its prompt of {len(prompt_ids)} tokens and max_new_tokens = "
                f"{sampling.max_new_tokens} exceed the policy's context of {context}; lower max_new_tokens or drop it"
            )
    trajectories = []
    for problem, (text, prompt_ids), responses in zip(
        problems, prompts, sampler.sample(model, tokenizer, ids, n, sampling, seed), strict=True
    ):
        for response in responses:
            own = response.ids[:-1] if response.finished else response.ids
            answer = tokenizer.decode(own)  # special tokens in its midst stay: they were sampled, and spoil an answer
            graded = min((answer.partition(stop)[0] for stop in sampling.stop), key=len, default=answer)
            grade = task.grade(graded, problem.gold)
            if task.requires_end and not response.finished:
                grade = Grade(-1.0, False, None)
            trajectories.append(
                Trajectory(
                    prompt_id=problem.id,
                    group=problem.id,
                    prompt=text,
                    prompt_ids=prompt_ids,
                    response=answer,
                    response_ids=response.ids,
                    ref_logprobs=[],
                    reward=grade.reward,
                    finished=response.finished,
                    valid=grade.valid,
                    answer=grade.answer,
                    gold=problem.gold,
                )
            )
    return trajectories


def per_problem(trajectories: Iterable[Trajectory]) -> dict[str, np.ndarray]:
    """Each metric's value for each problem, problems in the order of their first response.

    pass@1, pass@k and maj@k for k = the responses of a problem, invalid (share without a readable answer), length.
    """
    values: dict[str, list[float]] = {}
    for _, rows in groupby(trajectories, key=lambda t: t.prompt_id):
        rows = list(rows)
        n, correct = len(rows), [t.reward > 0 for t in rows]
        answers = [t.answer if t.valid else None for t in rows]
        scores = {
            "pass@1": sum(correct) / n,
            f"pass@{n}": pass_at_k(n, sum(correct), n),
            f"maj@{n}": maj_at_k(answers, correct, n),
            "invalid": 1 - sum(bool(t.valid) for t in rows) / n,
            "length": float(np.mean([len(t.response_ids) for t in rows])),
        }
        for name, value in scores.items():
            values.setdefault(name, []).append(value)
    return {name: np.array(column) for name, column in values.items()}


def summarise(values: dict[str, np.ndarray], seed: int = 0) -> dict[str, dict]:
    """Mean and 95% bootstrap interval over problems of each metric: `{name: {"mean": …, "interval": [low, high]}}`."""
    return {
        name: {"mean": float(column.mean()), "interval": list(bootstrap_interval(column, seed=seed))}
        for name, column in values.items()
    }


def table(rows: dict[str, dict]) -> str:
    """Markdown table of summaries, one row a label; shares in per cent with their intervals."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row if _is_metric(row[name])))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, row in rows.items():
        lines.append(f"| {label} | " + " | ".join(_cell(name, row.get(name)) for name in names) + " |")
    return "\n".join(lines)


def _is_metric(value) -> bool:
    return isinstance(value, dict) and "interval" in value


def _cell(name: str, value: dict | None) -> str:
    if value is None:
        return ""
    scale = 1 if name == "length" else 100
    mean, low, high = (scale * number for number in (value["mean"], *value["interval"]))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"
