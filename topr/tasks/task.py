"""What a task is: problems with a known answer, a prompt for each, and a grade for a response."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from topr.io import InputError
from topr.sampling import Sampling
from topr.trajectories.rows import load_rows

PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text())
Prompt = (
    str | list[dict[str, str]]
)  # text that the policy continues, or chat messages that it answers


class Grade(NamedTuple):
    reward: float  # +1 correct, -1 incorrect
    valid: (
        bool | None
    )  # whether the response holds a readable answer; None: the grader gave up, and the reward is -1
    answer: str | None  # the answer in canonical form, equal for equal answers; None if invalid


def exact_grade(answer: str | None, gold: str) -> Grade:
    """+1 if the answer equals the gold, else -1; invalid if there is no answer."""
    return Grade(1.0 if answer == gold else -1.0, answer is not None, answer)


@dataclass
class Problem:
    id: str
    prompt: str
    gold: str  # the reference answer
    solution: str | None = None  # a candidate solution, for verifiers


class Task(ABC):
    """Base class of all tasks. A subclass overrides `grade`, and whatever else differs."""

    name = "task"
    requires_end = False  # whether a response that the length limit cut off is invalid
    sampling = Sampling()  # defaults of evaluate.py; train.py takes data.sampling
    columns: dict[str, tuple[type, ...]] = {
        "prompt": (str,),
        "gold": (str,),
    }  # required in each row of problems
    optional: dict[str, tuple[type, ...]] = {"id": (str, int)}  # columns that may be absent

    def problems(self, source: str | Path) -> list[Problem]:
        """Read problems from a file or a hub data set (see `load_rows`); an InputError if one is malformed."""
        rows = load_rows(source, self.columns, self.optional)
        try:
            problems = [self.problem(row, index) for index, row in enumerate(rows)]
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
        ids = [problem.id for problem in problems]
        if len(set(ids)) < len(ids):
            raise InputError(
                f"{source}: several problems have the id {max(ids, key=ids.count)!r}; make ids unique"
            )
        return problems

    def problem(self, row: dict[str, Any], index: int) -> Problem:
        """Convert a row, `{"prompt": …, "gold": …}`, to a problem. Its id is `id`, by default the row's index."""
        return Problem(str(row.get("id", index)), row["prompt"], row["gold"])

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        """The prompt for a problem; see `encode_prompt`."""
        return problem.prompt

    @abstractmethod
    def grade(self, response: str, gold: str) -> Grade:
        """Grade a response, without its end token, against the reference answer. Never executes model output."""


def question_prompt(task: str, question: str, tokenizer: Any, marker: str = "") -> Prompt:
    """A question with the task's instruction: a chat message, or else a text with examples, as the tokenizer has it."""
    instruction = PROMPTS[task]["instruction"].replace("{marker}", marker)
    if tokenizer.chat_template is not None:
        return [{"role": "user", "content": f"{question}\n\n{instruction}"}]
    shown = "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
        for row in PROMPTS[task]["examples"]
    )
    return f"{instruction}\n\n{shown.replace('{marker}', marker)}Question: {question}\nAnswer:"


def after_thinking(response: str) -> str:
    """What a reasoning model says after `</think>`."""
    return response.rpartition("</think>")[2]
