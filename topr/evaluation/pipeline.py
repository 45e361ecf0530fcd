"""Sample, grade and score responses to problems, in parts, so that a killed run resumes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from topr.identity import content_hash, grader_hash, provenance
from topr.io import InputError
from topr.policy.files import encode_prompt, load_tokenizer, vocabulary_and_context
from topr.policy.model import Policy
from topr.sampling.base import Sampler, Sampling
from topr.tasks.task import Grade, Problem, Task, before
from topr.trajectories.file import Trajectory, read_metadata, read_trajectories
from topr.trajectories.scoring import add_log_probs

PART = 32  # problems whose responses are sampled together and written as one file


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
    """n graded responses to each problem, in the problems' order, with empty `ref_logprobs`.

    For `seed` and `numbers` see `Sampler.sample`.
    """
    tokenizer = policy.tokenizer
    prompts = [encode_prompt(task.prompt(problem, tokenizer), tokenizer) for problem in problems]
    prompt_ids = [ids for _, ids in prompts]
    sampled = sampler.sample(policy, prompt_ids, n, sampling, seed, numbers)
    trajectories = []
    for problem, (prompt, ids), responses in zip(problems, prompts, sampled, strict=True):
        for response_ids, finished in responses:
            # special tokens before the end stay in the text: they make an answer wrong
            text = tokenizer.decode(response_ids[:-1] if finished else response_ids)
            grade = Grade(reward=-1.0, valid=False, answer=None)
            if finished or not task.requires_end:
                grade = task.grade(before(text, sampling.stop), problem.gold)
            trajectory = Trajectory(
                prompt_id=problem.id,
                group=problem.id,
                prompt=prompt,
                prompt_ids=ids,
                response=text,
                response_ids=response_ids,
                ref_logprobs=[],
                finished=finished,
                gold=problem.gold,
                **grade._asdict(),
            )
            trajectories.append(trajectory)
    return trajectories


def check_prompts(
    policy: str, task: Task, problems: list[Problem], sampling: Sampling
) -> list[str]:
    """The prompts of problems. Raises an InputError for the first that the policy cannot answer."""
    tokenizer = load_tokenizer(policy)
    _, context = vocabulary_and_context(policy)
    prompts = []
    for problem in problems:
        prompt, ids = encode_prompt(task.prompt(problem, tokenizer), tokenizer)
        if len(ids) + sampling.max_new_tokens > context:
            raise InputError(
                f"problem {problem.id!r}: {len(ids)} prompt tokens and max_new_tokens = "
                f"{sampling.max_new_tokens} exceed the policy's context of {context}; "
                "lower the latter"
            )
        prompts.append(prompt)
    return prompts


@dataclass
class SamplingJob:
    """All that decides responses and their grades, which are the trajectory files of a folder.

    Raises:
        InputError: the policy cannot answer a problem.
    """

    policy: str  # folder or hub name
    task: Task
    problems: list[Problem]
    samples: int  # responses per problem
    sampling: Sampling
    seed: int
    precision: str = "32-true"  # or bf16-mixed

    def __post_init__(self) -> None:
        self.prompts = check_prompts(self.policy, self.task, self.problems, self.sampling)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the files: equal metadata stand for equal responses and grades."""
        sampling = {
            **vars(self.sampling),
            "samples": self.samples,
            "seed": self.seed,
            # the instruction, the worked examples and the template decide responses, too
            "problems": content_hash(self.problems, self.prompts),
            "grader": grader_hash(self.task),
        }
        return provenance(
            self.policy, self.precision, task=self.task.name, sampling=sampling, iteration=0
        )

    def missing_parts(self, folder: Path | None) -> list[tuple[Path | None, list[Problem]]]:
        """The files still to write, each with its `PART` problems; no folder: nothing is written.

        Raises:
            InputError: the folder holds another job's files.
        """
        written = list(folder.glob("*.parquet")) if folder else []
        for path in written:
            found = read_metadata(path)
            if found | self.metadata != found:
                raise InputError(
                    f"{path} holds trajectories of another policy, task or set of problems; "
                    "name another folder"
                )
        missing = []
        for start in range(0, len(self.problems), PART):
            part = folder and folder / f"part-{start // PART:05d}.parquet"
            if part not in written:
                missing.append((part, self.problems[start : start + PART]))
        return missing

    def sample(
        self,
        problems: list[Problem],
        sampler: Sampler,
        policy: Policy,
        microbatch_tokens: int = 16384,
    ) -> list[Trajectory]:
        """Graded responses with log mu to these problems, which are neighbours in the job.

        The responses do not depend on which problems are sampled together.
        """
        start = self.problems.index(problems[0])
        trajectories = sample_and_grade(
            sampler,
            policy,
            self.task,
            problems,
            self.samples,
            self.sampling,
            self.seed,
            numbers=range(start, start + len(problems)),
        )
        add_log_probs(policy, trajectories, microbatch_tokens)
        return trajectories


def read_parts(folder: Path) -> list[Trajectory]:
    """The trajectories that a job has written to a folder."""
    trajectories = []
    for path in sorted(folder.glob("part-*.parquet")):
        trajectories += read_trajectories(path)
    return trajectories
