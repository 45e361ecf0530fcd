"""Generative verifier: judges a candidate solution by a critique and a verdict (paper, Table 2)."""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
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
    """Problems are trajectories: a question, a candidate solution, and whether it is correct.

    Args:
        task: the candidates' task. Its prompt is removed from around the question.
        balance: keep as many correct as incorrect candidates: a random choice with a fixed seed.
    """

    name = "verifier"
    sampling = Sampling(stop=["\nQuestion:"])
    task: Task | None = None
    balance: bool = True
    marker = "Verdict:"
    verdicts = ("correct", "incorrect")  # on a correct solution, on an incorrect one

    def problems(self, source: str | Path) -> list[Problem]:
        """Read problems from a trajectory file, or from several by a glob.

        Raises:
            InputError: `balance` is set, and no candidate is correct or none is incorrect.
        """
        trajectories = []
        for path in resolve_files(str(source), "solutions to judge"):
            trajectories += read_trajectories(path)
        problems = self.candidates(trajectories)
        if not self.balance:
            return problems
        by_verdict: dict[str, list[Problem]] = {}
        for problem in problems:
            by_verdict.setdefault(problem.gold, []).append(problem)
        if len(by_verdict) < 2:
            raise InputError(
                f"{source}: every solution is {problems[0].gold}; sample more solutions"
            )
        count = min(map(len, by_verdict.values()))
        rng = random.Random(0)
        kept: set[str] = set()
        for alike in by_verdict.values():
            kept.update(problem.id for problem in rng.sample(alike, count))
        return [problem for problem in problems if problem.id in kept]

    def candidates(self, trajectories: list[Trajectory]) -> list[Problem]:
        """A problem for each trajectory, whose reward decides the right verdict."""
        correct, incorrect = self.verdicts
        problems = []
        for index, t in enumerate(trajectories):
            gold = correct if t.reward > 0 else incorrect
            problems.append(Problem(f"{t.prompt_id}/{index}", t.prompt, gold, t.response))
        return problems

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        """Question and candidate, with the request for a critique that ends in a verdict."""
        question = self.question(problem.prompt, tokenizer)
        solution = after_thinking(problem.solution or "")
        # A candidate must not end the question, or start a new chat message.
        for text in [*self.sampling.stop, *tokenizer.all_special_tokens]:
            solution = solution.partition(text)[0]
        asked = f"{question}\n\nSolution: {solution.strip()}"
        return question_prompt("verifier", asked, tokenizer, self.marker)

    def question(self, prompt: str, tokenizer: Any) -> str:
        """The question within a prompt of the candidates' task; otherwise the whole prompt."""
        if self.task is None:
            return prompt
        blank = Problem("", "\0", "")
        rendered = render_prompt(self.task.prompt(blank, tokenizer), tokenizer)
        before, _, after = rendered.partition("\0")
        if prompt.startswith(before) and prompt.endswith(after):
            return prompt[len(before) : len(prompt) - len(after)]
        return prompt

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last verdict is the gold; invalid without a verdict."""
        text = re.sub("[*_`]", "", after_thinking(response))
        found = re.match(
            rf"(?s:.*){self.marker}\s*(.*)", text
        )  # the rest of the last marker's line
        verdict = found[1].strip(" .!").lower() if found else None
        return exact_grade(verdict if verdict in self.verdicts else None, gold)

    def weight(self, critiques: list[Trajectory]) -> float:
        """A solution's weight in a vote: the share of its critiques that call it correct."""
        correct, _ = self.verdicts
        return fmean(critique.answer == correct for critique in critiques)
