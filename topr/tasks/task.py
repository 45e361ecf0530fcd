"""What a task is: problems with a known answer, a prompt for each, and a grade for a response."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import NamedTuple

import yaml

from topr.io import InputError
from topr.io.settings import Configurable
from topr.sampling.base import Sampling

PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text())
Prompt = str | list[dict[str, str]]  # text to continue, or chat messages to answer


class Grade(NamedTuple):
    """The grade of one response.

    Args:
        reward: +1 correct, -1 incorrect.
        valid: whether the response holds a readable answer; None if the grader gave up (reward -1).
        answer: the answer in canonical form, by which responses vote; None if invalid.
    """

    reward: float
    valid: bool | None
    answer: str | None


def exact_grade(answer: str | None, gold: str) -> Grade:
    """+1 if the answer equals the gold, else -1; invalid if there is no answer."""
    return Grade(1.0 if answer == gold else -1.0, answer is not None, answer)


@dataclass
class Problem:
    id: str
    prompt: str
    gold: str  # the reference answer
    solution: str | None = None  # a candidate solution, for verifiers


class Task(Configurable, ABC):
    """Base class of all tasks. A subclass must define `grade`; the rest has defaults."""

    name = "task"
    requires_end = False  # whether a response that the length limit cut off is invalid
    sampling = Sampling()  # defaults of evaluate.py; train.py takes data.sampling
    sources: list[Path] = []  # files beside the class's own module that decide grades
    instruction = ""  # a key of prompts.yaml; none: the prompt is the problem's own
    marker = ""  # what the instruction asks for
    skip_unanswered = False  # leave out problems without a gold, which are an error otherwise
    # columns of the problem file by all their names, with their types; see `load_rows`
    columns: dict[str, tuple[type, ...]] = {
        "id|unique_id": (str, int, NoneType),
        "body|Body": (str, NoneType),  # stands before the question
        "prompt|question|Question|problem|Problem": (str,),
        "gold|answer|Answer|final_ans|final_answer|solution": (str, int, float, list),
    }

    def problems(self, source: str | Path) -> list[Problem]:
        """Read problems from a file or a hub data set, as `load_rows` does.

        Raises:
            InputError: a row is malformed or has no gold, or two problems have the same id.
        """
        from topr.trajectories.rows import load_rows

        problems = [
            self.problem(row, index) for index, row in enumerate(load_rows(source, self.columns))
        ]
        for problem in problems:
            if not problem.gold and not self.skip_unanswered:
                raise InputError(f"{source}: {self.name} finds no answer to {problem.id}; add one")
        if len({problem.id for problem in problems}) < len(problems):
            raise InputError(f"{source}: several problems have the same id; make ids unique")
        return [problem for problem in problems if problem.gold]

    def problem(self, row: dict, index: int) -> Problem:
        """Convert a row of the problem file. Without an `id` the row's index is the id."""
        prompt = " ".join(filter(None, [row.get("body"), row["prompt"]]))
        return Problem(str(row.get("id", index)), prompt, self.gold(row["gold"]))

    def gold(self, answer) -> str:
        """The reference answer in what a row says; empty: there is none."""
        return str(answer)

    def prompt(self, problem: Problem, tokenizer) -> Prompt:
        """The prompt for a problem; `encode_prompt` tokenises it.

        With an instruction, models with a chat template get one chat message, others a text with
        worked examples."""
        if not self.instruction:
            return problem.prompt
        texts = PROMPTS[self.instruction]
        instruction = texts["instruction"].replace("{marker}", self.marker)
        if tokenizer.chat_template is not None:
            return [{"role": "user", "content": f"{problem.prompt}\n\n{instruction}"}]
        examples = texts["examples"].replace("{marker}", self.marker)
        return f"{instruction}\n\n{examples}\n\nQuestion: {problem.prompt}\nAnswer:"

    @abstractmethod
    def grade(self, response: str, gold: str) -> Grade:
        """Grade a response, without its end token, against the reference answer.

        Must never execute model output."""

    def grade_leniently(self, response: str, gold: str) -> Grade | None:
        """A second grade by a looser rule, reported as `lenient`; None: there is no such rule."""
        return None


def after_thinking(response: str) -> str:
    """What a reasoning model says after `</think>`."""
    return response.rpartition("</think>")[2]


def before(text: str, stops: Iterable[str]) -> str:
    """The part of a text before the first of these strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text
