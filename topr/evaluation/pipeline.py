"""Sample and grade responses to problems, in parts, so that a killed run resumes."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from topr.io import InputError
from topr.io.distributed import end_all_ranks_on_error, gather, rank, world_size
from topr.policy.files import encode_prompt, load_tokenizer, vocabulary_and_context
from topr.policy.model import Policy
from topr.run.identity import content_hash, provenance, source_hash
from topr.sampling.base import Response, Sampler, Sampling
from topr.tasks.task import Grade, Problem, Task, before
from topr.trajectories.file import Trajectory, read_metadata, read_trajectories, write_trajectories

PART = 32  # problems whose responses are sampled together and written as one file


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

    def __post_init__(self):
        tokenizer = load_tokenizer(self.policy)
        _, context = vocabulary_and_context(self.policy)
        self.ids = [problem.id for problem in self.problems]
        self.prompts = []  # text and token ids, of each problem
        for problem in self.problems:
            text, ids = encode_prompt(self.task.prompt(problem, tokenizer), tokenizer)
            self.prompts.append((text, ids))
            if len(ids) + self.sampling.max_new_tokens > context:
                raise InputError(
                    f"{self.task.name}, problem {problem.id!r}: {len(ids)} prompt tokens and "
                    f"max_new_tokens = {self.sampling.max_new_tokens} exceed the policy's context "
                    f"of {context}",
                    "lower the latter",
                )

    @cached_property
    def metadata(self) -> dict:
        """Metadata of the files: equal metadata stand for equal responses and grades."""
        sampling = {
            **vars(self.sampling),
            "samples": self.samples,
            "seed": self.seed,
            # the instruction, the worked examples and the template decide responses, too
            "problems": content_hash(self.ids, self.prompts),
            "grader": content_hash(
                source_hash(self.task), [problem.gold for problem in self.problems]
            ),
        }
        return provenance(
            self.policy, self.precision, task=self.task.name, sampling=sampling, iteration=0
        )

    @property
    def responses_hash(self) -> str:
        """Equal hashes stand for equal responses."""
        return content_hash(ungraded(self.metadata))

    def parts_to_write(self, folder: Path | None) -> list:
        """The files that this rank shall write, each with the numbers of its `PART` problems.

        Each rank has equally many, some of them without problems: ranks of sharded policies need
        each other, and `limit_predict_batches` counts a file that is there. Without a folder,
        nothing is written. Files that another grader has graded are graded again.

        Raises:
            InputError: the folder holds another job's files.
        """
        written = sorted(folder.glob("*.parquet")) if folder else []
        with end_all_ranks_on_error():
            for path in written:
                found = read_metadata(path)
                if ungraded(found) != ungraded(self.metadata):
                    raise InputError(
                        f"{path} holds responses of another policy, to other problems or of "
                        "other sampling",
                        "name another folder",
                    )
                if found | self.metadata != found and rank() == 0:
                    self.grade_again(path)
        parts = []
        numbers = list(range(len(self.problems)))
        for start in range(0, len(numbers), PART):
            part = folder and folder / f"part-{start // PART:05d}.parquet"
            parts.append((None, []) if part in written else (part, numbers[start : start + PART]))
        parts = gather(parts)[0]  # another rank may have looked later, and found more
        parts += [(None, [])] * (-len(parts) % world_size())
        return parts[rank() :: world_size()]

    def sample_parts(
        self, parts: list[list[int]], sampler: Sampler, policy: Policy
    ) -> Iterator[list[Trajectory]]:
        """Graded responses to the problems of these numbers, part by part; a server works on the
        next part meanwhile. `ref_logprobs` is empty, or that of the server that sampled them.

        The responses do not depend on which problems are sampled together.
        """
        begun: deque[Callable] = deque()
        for place, numbers in enumerate(parts):
            for ahead in parts[place + len(begun) : place + 2]:
                prompts = [self.prompts[number][1] for number in ahead]
                begun.append(
                    sampler.begin(policy, prompts, self.samples, self.sampling, self.seed, ahead)
                )
            trajectories = []
            for number, responses in zip(numbers, begun.popleft()(), strict=True):
                trajectories += [self.grade(number, response) for response in responses]
            yield trajectories

    def grade_again(self, path: Path):
        """Replace the grades of a file of this job."""
        trajectories = []
        for row in read_trajectories(path):
            response = Response(row.response_ids, row.finished, tuple(row.ref_logprobs))
            trajectories.append(self.grade(self.ids.index(row.prompt_id), response))
        write_trajectories(path, trajectories, self.metadata)
        print(f"{path} has another grader's grades: graded again")

    def grade(self, number: int, response: Response) -> Trajectory:
        """The trajectory of a response to the problem of this number."""
        problem = self.problems[number]
        prompt, prompt_ids = self.prompts[number]
        ids, finished, log_probs = response
        # special tokens before the end stay in the text: they make an answer wrong
        text = load_tokenizer(self.policy).decode(ids[:-1] if finished else ids)
        said = before(text, self.sampling.stop)
        grade = Grade(reward=-1.0, valid=False, answer=None)
        # a response has ended at a stop string, too
        if finished or said != text or not self.task.requires_end:
            grade = self.task.grade(said, problem.gold)
        return Trajectory(
            prompt_id=problem.id,
            group=problem.id,
            prompt=prompt,
            prompt_ids=prompt_ids,
            response=text,
            response_ids=ids,
            ref_logprobs=list(log_probs),
            finished=finished,
            gold=problem.gold,
            **grade._asdict(),
        )


def ungraded(metadata: dict) -> dict:
    """The metadata that decide responses, without those that decide grades only."""
    return metadata | {
        "sampling": (metadata["sampling"] or {}) | {"grader": None},
        "task": None,
        "schema": None,
    }


def read_parts(folder: Path) -> list[Trajectory]:
    """The trajectories that a job has written to a folder."""
    trajectories = []
    for path in sorted(folder.glob("part-*.parquet")):
        trajectories += read_trajectories(path)
    return trajectories
