"""Sample, grade, score and write the responses to problems, in parts, so that a killed run resumes."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from topr.io import InputError, explained, first_line, is_out_of_memory, sweep
from topr.policy import (
    Policy,
    encode_prompt,
    load_tokenizer,
    provenance,
    render_prompt,
    vocabulary_and_context,
)
from topr.sampling import Sampler, Sampling
from topr.tasks import GSM8K, MATH, Arithmetic, ArithmeticVerifier, Grade, Problem, Task, Verifier
from topr.tasks.arithmetic import Filler
from topr.trajectories import (
    Trajectory,
    add_log_probs,
    read_metadata,
    read_trajectories,
    write_trajectories,
)

PART = 32  # problems whose responses are sampled together and written as one file
STRONG = Arithmetic(
    operations=(2, 5), filler=Filler()
)  # as far as grades and the length of responses go
# name: task, file or hub data set of its problems, verifier of its solutions
BENCHMARKS: dict[str, tuple[Task, str, Verifier]] = {
    "arithmetic": (Arithmetic(), "data/arithmetic/test.jsonl", ArithmeticVerifier(balance=False)),
    "arithmetic_strong": (
        STRONG,
        "data/arithmetic/strong/test.jsonl",
        ArithmeticVerifier(balance=False),
    ),
    "gsm8k": (GSM8K(), "openai/gsm8k/main:test", Verifier(GSM8K(), balance=False)),
    "math500": (MATH(), "HuggingFaceH4/MATH-500:test", Verifier(MATH(), balance=False)),
}


def find_benchmark(name: str) -> tuple[Task, str | None, Verifier | None]:
    """Task, default problems and verifier of a benchmark: one of `BENCHMARKS`, or a user's task by its class path."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    module, _, kind = name.rpartition(".")
    known = (
        f"choose from {', '.join(BENCHMARKS)}, or a task of your own such as my_task.Parity=FILE"
    )
    with explained(
        f"--benchmark {name!r} is unknown", (ImportError, AttributeError, ValueError), known
    ):
        return getattr(import_module(module or kind), kind)(), None, None


def sample_and_grade(
    sampler: Sampler,
    policy: Policy,
    task: Task,
    problems: list[Problem],
    n: int,
    sampling: Sampling,
    seed: int,
    numbers: Sequence[int] = (),
) -> list[Trajectory]:
    """n graded responses to each problem (a server's may be fewer), in the problems' order, `ref_logprobs` empty; for
    `seed` and `numbers` see `Sampler.sample`."""
    tokenizer = policy.tokenizer
    prompts = [encode_prompt(task.prompt(problem, tokenizer), tokenizer) for problem in problems]
    found = sampler.sample(policy, [ids for _, ids in prompts], n, sampling, seed, numbers)
    trajectories = []
    for problem, (prompt, prompt_ids), responses in zip(problems, prompts, found, strict=True):
        for ids, finished in responses:
            # special tokens before the end stay in the text: they were sampled, and make an answer wrong
            text = tokenizer.decode(ids[:-1] if finished else ids)
            graded = min((text.partition(stop)[0] for stop in sampling.stop), key=len, default=text)
            ungradable = task.requires_end and not finished
            grade = Grade(-1.0, False, None) if ungradable else task.grade(graded, problem.gold)
            origin, verdict = (
                (problem.id, problem.id, prompt, prompt_ids),
                (grade.valid, grade.answer, problem.gold),
            )
            trajectories.append(
                Trajectory(*origin, text, ids, [], grade.reward, finished, *verdict)
            )
    return trajectories


def derived_seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def check_prompts(policy: str, task: Task, problems: list[Problem], sampling: Sampling) -> None:
    """Raise an InputError for the first problem whose prompt the policy's vocabulary or context does not hold."""
    tokenizer, (vocabulary, context) = load_tokenizer(policy), vocabulary_and_context(policy)
    for problem in problems:
        ids = encode_prompt(task.prompt(problem, tokenizer), tokenizer)[1]
        if not ids or max(ids) >= vocabulary or len(ids) + sampling.max_new_tokens > context:
            long = f"{len(ids)} prompt tokens and max_new_tokens = {sampling.max_new_tokens} exceed"
            bad = f"the prompt is empty or beyond the policy's vocabulary of {vocabulary}; drop it"
            raise InputError(
                f"problem {problem.id!r}: {long} the policy's context of {context}, or {bad}"
            )


@contextmanager
def explain_out_of_memory(activity: str, remedy: str) -> Iterator[None]:
    """Raise an InputError that says what ran out of memory and which key to lower, with its present value."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory in {activity} ({first_line(error)}); lower {remedy}"
        ) from error


@dataclass(frozen=True)
class SamplingJob:
    """Everything that decides responses and their grades, which are stored as the trajectory files of a folder."""

    policy: str  # folder or hub name
    task: Task
    problems: list[Problem]
    samples: int  # responses per problem
    sampling: Sampling
    seed: int
    precision: str = "32-true"  # or bf16-mixed

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the files: equal metadata stands for equal responses and grades."""
        tokenizer = load_tokenizer(self.policy)
        first = render_prompt(
            self.task.prompt(self.problems[0], tokenizer), tokenizer
        )  # worked examples, template

        def settings(part: Any) -> list:
            return [
                f"{type(part).__module__}.{type(part).__name__}",
                getattr(part, "__dict__", repr(part)),
            ]

        text = json.dumps([settings(self.task), first, *map(vars, self.problems)], default=settings)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        sampling = {
            **vars(self.sampling),
            "samples": self.samples,
            "seed": self.seed,
            "problems": digest,
        }
        return provenance(
            self.policy, self.precision, task=self.task.name, sampling=sampling, iteration=0
        )

    def missing_parts(self, folder: Path) -> list[tuple[Path, list[Problem]]]:
        """The files still to write, each with its `PART` problems; an InputError if the folder holds another job's."""
        starts = range(0, len(self.problems), PART)
        parts = {
            folder / f"part-{start // PART:05d}.parquet": self.problems[start : start + PART]
            for start in starts
        }
        sweep(folder)
        now = self.metadata | self.metadata["sampling"]
        for path in sorted(folder.glob("*.parquet")):
            found = read_metadata(path)
            found |= found["sampling"] or {}
            changed = [
                f"{key}: {found.get(key)}, now {now[key]}"
                for key in now
                if found.get(key) != now[key]
            ]
            if path not in parts or changed:
                other = f"other trajectories than this command samples ({'; '.join(changed) or 'other files'})"
                raise InputError(f"{path} holds {other}; name another folder or empty it")
        return [(path, problems) for path, problems in parts.items() if not path.exists()]

    def sample_part(
        self,
        path: Path,
        problems: list[Problem],
        sampler: Sampler,
        policy: Policy,
        microbatch_tokens: int = 16384,
    ) -> None:
        """Sample, grade, score and write the responses, if any, to these problems, which are neighbours in the job."""
        start = self.problems.index(problems[0])
        job = sampler, policy, self.task, problems, self.samples, self.sampling, self.seed
        if trajectories := sample_and_grade(*job, numbers=range(start, start + len(problems))):
            add_log_probs(policy, trajectories, microbatch_tokens)
            write_trajectories(path, trajectories, self.metadata)


def read_parts(folder: Path) -> list[Trajectory]:
    """The trajectories that a job has written to a folder."""
    return [
        row for path in sorted(folder.glob("part-*.parquet")) for row in read_trajectories(path)
    ]
