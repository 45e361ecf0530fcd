"""What a task is: problems with a known answer, a prompt, and a grade for a response."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from topr.io import InputError
from topr.rows import load_rows
from topr.sampling import Sampling


class Grade(NamedTuple):
    """Verdict on one response."""

    reward: float  # +1 correct, -1 incorrect
    valid: bool | None  # an answer could be read from it; None: the grader ran out of time, and the reward is -1
    answer: str | None  # that answer in canonical form, equal for equal answers; None if invalid


@dataclass
class Problem:
    """A question with its reference answer."""

    id: str
    prompt: str
    gold: str
    solution: str | None = None  # a candidate to be judged


class Task(ABC):
    """Base of all tasks; a task of your own overrides `grade`, and what else differs."""

    name: str = "task"
    requires_end = False  # whether a response cut by the length limit is invalid whatever it says
    sampling = Sampling()  # how evaluate.py samples
    columns: dict[str, tuple[type, ...]] = {"prompt": (str,), "gold": (str,)}  # what each row of the problems holds
    optional: dict[str, tuple[type, ...]] = {"id": (str, int)}  # and what it may hold

    def problems(self, source: str | Path) -> list[Problem]:
        """Problems from a file or a hub data set (see `load_rows`), made from rows by `problem`.

        Raises:
            InputError: the source is missing or malformed, or an id occurs twice.
        """
        rows = load_rows(source, self.columns, self.optional)
        try:
            problems = [self.problem(row, number) for number, row in enumerate(rows)]
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
        twice = [id for id, count in Counter(problem.id for problem in problems).items() if count > 1]
        if twice:
            raise InputError(f"{source}: id {twice[0]!r} stands for several problems; make ids unique")
        return problems

    def problem(self, row: dict[str, Any], number: int) -> Problem:
        """A problem from a row: `{"prompt": …, "gold": …}`, `id` optional (the row's number, from 0)."""
        return Problem(str(row.get("id", number)), row["prompt"], row["gold"])

    def prompt(self, problem: Problem, tokenizer) -> str | list[dict[str, str]]:
        """The text that the policy continues, or chat messages that it answers; see `encode_prompt`."""
        return problem.prompt

    @abstractmethod
    def grade(self, response: str, gold: str) -> Grade:
        """Grade a response, without its end token, against the reference answer. Never executes model output."""


def ask(question: str, instruction: str, examples: Sequence[tuple[str, str]], tokenizer) -> str | list[dict[str, str]]:
    """A prompt for a question: chat messages where the tokenizer has a chat template, worked examples elsewhere."""
    if tokenizer.chat_template is not None:
        return [{"role": "user", "content": f"{question}\n\n{instruction}"}]
    worked = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in examples)
    return f"{instruction}\n\n{worked}Question: {question}\nAnswer:"


def after_thinking(response: str) -> str:
    """What a reasoning model says after its thoughts."""
    return response.rpartition("</think>")[2]
