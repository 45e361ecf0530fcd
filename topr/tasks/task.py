"""What a task is: problems with a known answer, a prompt, and a grade for a response."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from topr.io import InputError, load_jsonl
from topr.sampling import Sampling


class Grade(NamedTuple):
    """Verdict on one response."""

    reward: float  # +1 correct, -1 incorrect
    valid: bool  # an answer could be read from it
    answer: str | None  # that answer in canonical form, equal for equal answers; None if invalid


@dataclass
class Problem:
    """A prompt with its reference answer."""

    id: str
    prompt: str
    gold: str


class Task(ABC):
    """Base of all tasks; a task of your own overrides `grade`, and what else differs."""

    name: str = "task"
    requires_end = False  # whether a response cut by the length limit is invalid whatever it says
    sampling = Sampling()  # how evaluate.py samples

    def problems(self, path: str | Path) -> list[Problem]:
        """Problems from JSON lines `{"prompt": …, "gold": …}`, `id` optional (the line's number).

        Raises:
            InputError: the file is missing or malformed, or an id occurs twice.
        """
        rows = load_jsonl(path, {"prompt": (str,), "gold": (str,)})
        problems = [Problem(str(row.get("id", i)), row["prompt"], row["gold"]) for i, row in enumerate(rows)]
        twice = [id for id, count in Counter(problem.id for problem in problems).items() if count > 1]
        if twice:
            raise InputError(f"{path}: id {twice[0]!r} stands for several problems; make ids unique")
        return problems

    def prompt(self, problem: Problem, tokenizer) -> str:
        """The text that the policy continues; it is tokenised with special tokens."""
        return problem.prompt

    @abstractmethod
    def grade(self, response: str, gold: str) -> Grade:
        """Grade a response, without its end token, against the reference answer. Never executes model output."""
