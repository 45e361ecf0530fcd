"""Sampling, grading and scoring of problems: what validation, prediction, evaluate.py and the drivers share."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from topr.io import InputError, atomic, sweep
from topr.metrics import bootstrap_interval, maj_at_k, pass_at_k
from topr.policy_files import vocabulary_and_context
from topr.sampling import Sampler, Sampling
from topr.tasks.task import Grade, Problem, Task
from topr.tokenizer import encode_prompt, provenance, render_prompt
from topr.trajectories import Trajectory, add_log_probs, read_metadata, write_trajectories

PART = 32  # problems that are sampled, scored and written at a time


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
    """n graded responses to each problem (a server's may be fewer), in the problems' order, `ref_logprobs` empty."""
    prompts = [encode_prompt(task.prompt(problem, tokenizer), tokenizer) for problem in problems]
    ids = [prompt_ids for _, prompt_ids in prompts]
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


def derived_seed(*parts: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def check_prompts(policy: str, tokenizer, task: Task, problems: list[Problem], sampling: Sampling) -> None:
    """Refuse problems that the policy's context cannot hold, before the first of them is sampled.

    Raises:
        InputError: the first such problem.
    """
    vocabulary, context = vocabulary_and_context(policy)
    for problem in problems:
        ids = encode_prompt(task.prompt(problem, tokenizer), tokenizer)[1]
        length = len(ids)
        if not all(0 <= token < vocabulary for token in ids) or not ids:
            raise InputError(
                f"problem {problem.id!r}: its prompt is empty or beyond the policy's vocabulary of {vocabulary}; drop "
                "the problem or mend the tokenizer"
            )
        if length + sampling.max_new_tokens > context:
            raise InputError(
                f"problem {problem.id!r}: its prompt of {length} tokens and max_new_tokens = {sampling.max_new_tokens} "
                f"exceed the policy's context of {context}; lower max_new_tokens or drop the problem"
            )


def sample_part(
    path: Path,
    about: dict[str, Any],
    sampler: Sampler,
    model: nn.Module,
    tokenizer,
    task: Task,
    problems: list[Problem],
    n: int,
    sampling: Sampling,
    seed: int,
    microbatch_tokens: int,
) -> int:
    """Sample, grade and score problems and write them as one file; the number of trajectories in it.

    No file is written where a server delivered no response that can be used.
    """
    seed = derived_seed(seed, *path.stem.encode())  # the same whichever rank or run writes it
    trajectories = sample_and_grade(sampler, model, tokenizer, task, problems, n, sampling, seed)
    if trajectories:
        add_log_probs(model, trajectories, microbatch_tokens)
        write_trajectories(path, trajectories, about)
    return len(trajectories)


def describe(
    policy: str, tokenizer, precision: str, task: Task, problems: list[Problem], n: int, sampling: Sampling, seed: int
) -> dict[str, Any]:
    """Metadata of sampled trajectories: equal descriptions stand for the same responses and the same grades."""
    first = render_prompt(task.prompt(problems[0], tokenizer), tokenizer)  # worked examples, template

    def settings(part: Any) -> list:
        return [f"{type(part).__module__}.{type(part).__name__}", getattr(part, "__dict__", repr(part))]

    text = json.dumps([settings(task), first, *map(vars, problems)], default=settings)
    how = {**vars(sampling), "samples": n, "seed": seed, "problems": hashlib.sha256(text.encode()).hexdigest()[:16]}
    return provenance(policy, tokenizer, precision, task=task.name, sampling=how, iteration=0)


def missing_parts(folder: Path, problems: list[Problem], about: dict[str, Any]) -> list[tuple[Path, list[Problem]]]:
    """The files of a folder that are still to be sampled, each with its problems, `PART` of them.

    Raises:
        InputError: the folder holds trajectories of another policy, other problems or other sampling.
    """
    parts = {
        folder / f"part-{start // PART:05d}.parquet": problems[start : start + PART]
        for start in range(0, len(problems), PART)
    }
    sweep(folder)
    for path in sorted(folder.glob("*.parquet")):
        found = read_metadata(path)
        differing = [key for key in about if found[key] != about[key]]
        if "sampling" in differing and found["sampling"]:
            there, now = found["sampling"], about["sampling"]
            differing += [f"{key}: {there.get(key)}, now {now[key]}" for key in now if there.get(key) != now[key]]
            differing.remove("sampling")
        if path not in parts or differing:
            raise InputError(
                f"{path} holds other trajectories than this command samples (another "
                f"{'; '.join(differing) or 'set of files'}); name another folder or empty it"
            )
    return [(path, batch) for path, batch in parts.items() if not path.exists()]


def per_problem(
    trajectories: Iterable[Trajectory], ks: Sequence[int] = (), weights: Sequence[float] | None = None
) -> dict[str, np.ndarray]:
    """Each metric's value for each problem, problems in the order of their first response.

    Args:
        trajectories: the responses of one problem behind the other.
        ks: for pass@k and maj@k; the responses of a problem by default, the fewest of any where they differ.
        weights: a verifier's weight of each response, for weighted@k beside maj@k.

    Returns:
        pass@1, pass@k, maj@k, invalid (share without a readable answer), length (mean response tokens), and ungraded
        (share that the grader gave up on) where there is such a response.
    """
    values: dict[str, list[float]] = {}
    trajectories, start = list(trajectories), 0
    gave_up = any(t.valid is None for t in trajectories)
    problems = [list(rows) for _, rows in groupby(trajectories, key=lambda t: t.prompt_id)]
    ks = ks or [min(map(len, problems), default=0)]
    for rows in problems:
        n, correct = len(rows), [t.reward > 0 for t in rows]
        answers = [t.answer if t.valid else None for t in rows]
        scores = {"pass@1": sum(correct) / n}
        for k in ks:
            scores[f"pass@{k}"] = pass_at_k(n, sum(correct), k)
            scores[f"maj@{k}"] = maj_at_k(answers, correct, k)
            if weights is not None:
                scores[f"weighted@{k}"] = maj_at_k(answers, correct, k, weights[start : start + n])
        scores["invalid"] = 1 - sum(bool(t.valid) for t in rows) / n
        scores["length"] = float(np.mean([len(t.response_ids) for t in rows]))
        if gave_up:
            scores["ungraded"] = sum(t.valid is None for t in rows) / n
        for name, value in scores.items():
            values.setdefault(name, []).append(value)
        start += n
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
        lines.append(
            f"| {label} | " + " | ".join(cell(row.get(name), 1 if name == "length" else 100) for name in names) + " |"
        )
    return "\n".join(lines)


def _is_metric(value) -> bool:
    return isinstance(value, dict) and "interval" in value


def cell(value: dict | None, scale: int = 100, sign: str = "") -> str:
    """A mean with its interval, in per cent by default; `sign` is + for differences."""
    if value is None:
        return ""
    mean, low, high = (scale * number for number in (value["mean"], *value["interval"]))
    return f"{mean:{sign}.1f} [{low:.1f}, {high:.1f}]"


def figure(path: Path, results: dict[str, dict[str, dict]]) -> None:
    """Bars with intervals as PNG: a panel for each share, a group for each benchmark, a colour for each policy."""
    from matplotlib.figure import Figure

    benchmarks = list(dict.fromkeys(name for named in results.values() for name in named))
    shares = [
        metric
        for metric in dict.fromkeys(m for named in results.values() for row in named.values() for m in row)
        if any(_is_metric(row.get(metric)) for named in results.values() for row in named.values())
        and metric != "length"
    ]
    drawn = Figure(figsize=(2.2 + 1.9 * len(shares), 3.6), layout="constrained")
    axes = drawn.subplots(1, len(shares), sharey=True, squeeze=False)
    width = 0.8 / len(results)
    for axis, metric in zip(axes[0], shares, strict=True):
        for i, (policy, named) in enumerate(results.items()):
            found = [(x, named[name][metric]) for x, name in enumerate(benchmarks) if metric in named.get(name, {})]
            place = [x + (i - (len(results) - 1) / 2) * width for x, _ in found]
            mean = [100 * row["mean"] for _, row in found]
            ends = [[100 * abs(row["interval"][end] - row["mean"]) for _, row in found] for end in (0, 1)]
            axis.bar(place, mean, width, yerr=ends, capsize=2, label=policy, color=f"C{i}")
        axis.set_title(metric)
        axis.set_xticks(range(len(benchmarks)), benchmarks)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("per cent, 95% interval")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    with atomic(path) as temporary:
        drawn.savefig(temporary, format="png", dpi=150)
