"""Generative verifier: judge a candidate solution by a short critique and a verdict (the paper's Table 2)."""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topr.io import InputError
from topr.policy import render_prompt
from topr.sampling import Sampling
from topr.tasks.task import (
    Grade,
    Problem,
    Prompt,
    Task,
    after_thinking,
    exact_grade,
    question_prompt,
)
from topr.trajectories.file import Trajectory, read_trajectories, resolve_files


@dataclass(eq=False)
class Verifier(Task):
    """Problems are the trajectories of a file: a question, a candidate solution, and whether it is correct."""

    name = "verifier"
    sampling = Sampling(
        temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"]
    )
    task: Task | None = (
        None  # the candidates' task, whose prompt is removed from around the question
    )
    balance: bool = (
        True  # drop random candidates, always the same ones, until as many are correct as incorrect
    )
    marker, verdicts = (
        "Verdict:",
        {"correct": True, "incorrect": False},
    )  # the one on a correct solution first

    def problems(self, source: str | Path) -> list[Problem]:
        """Read problems from a trajectory file, or from several by a glob."""
        files = resolve_files(str(source), "solutions to judge")
        problems = self.candidates(
            [trajectory for path in files for trajectory in read_trajectories(path)]
        )
        if not self.balance:
            return problems
        golds = dict.fromkeys(problem.gold for problem in problems)
        if missing := self.verdicts.keys() - golds.keys():
            raise InputError(
                f"{source}: no solution has the verdict {min(missing)!r}; sample more solutions"
            )
        by_gold = [
            [i for i, problem in enumerate(problems) if problem.gold == gold] for gold in golds
        ]
        count, rng = min(map(len, by_gold)), random.Random(0)
        return [
            problems[i]
            for i in sorted(i for indices in by_gold for i in rng.sample(indices, count))
        ]

    def candidates(self, trajectories: list[Trajectory]) -> list[Problem]:
        correct, incorrect = self.verdicts
        return [
            Problem(
                f"{t.prompt_id}/{index}",
                t.prompt,
                correct if t.reward > 0 else incorrect,
                t.response,
            )
            for index, t in enumerate(trajectories)
        ]

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        """Question and candidate, with the request for a critique that ends in a verdict."""
        question, solution = (
            self.question(problem.prompt, tokenizer),
            after_thinking(problem.solution or ""),
        )
        for text in (
            *self.sampling.stop,
            *tokenizer.all_special_tokens,
        ):  # cut what could start a new chat message
            solution = solution.partition(text)[0]
        return question_prompt(
            "verifier", f"{question}\n\nSolution: {solution.strip()}", tokenizer, self.marker
        )

    def question(self, prompt: str, tokenizer: Any) -> str:
        """The question within a prompt of the candidates' task; the whole prompt if it is not one of that task."""
        if self.task is not None:
            blank = Problem("", "\0", "")
            before, _, after = render_prompt(
                self.task.prompt(blank, tokenizer), tokenizer
            ).partition("\0")
            if prompt.startswith(before) and prompt.endswith(after):
                return prompt[len(before) : len(prompt) - len(after)]
        return prompt

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last verdict is the gold; invalid without a verdict."""
        _, marker, rest = re.sub("[*_`]", "", after_thinking(response)).rpartition(self.marker)
        found = re.match(
            rf"\s*(?:\\boxed\{{)?[\"']?({'|'.join(self.verdicts)})[^\w\n]*(?:\n|$)",
            rest,
            re.IGNORECASE,
        )
        return exact_grade(found[1].lower() if marker and found else None, gold)

    def weight(self, critiques: list[Trajectory]) -> float:
        """A solution's weight in a vote: the share of its critiques that call it correct, in [0, 1]."""
        return sum(self.verdicts.get(t.answer or "", False) for t in critiques if t.valid) / len(
            critiques
        )
