"""Generative verifier: judges a candidate solution by a critique and a verdict (paper, Table 2)."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from topr.policy import render_prompt
from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, Prompt, Task, after_thinking, before, exact_grade
from topr.trajectories.curate import with_share
from topr.trajectories.file import Trajectory, read_table, resolve_files


@dataclass(eq=False)
class Verifier(Task):
    """Problems are trajectories: a question, a candidate solution, and whether it is correct.

    Args:
        task: the candidates' task. Its prompt is removed from around the question.
    """

    name = instruction = "verifier"
    sampling = Sampling(stop=["\nQuestion:"])
    task: Task | None = None
    marker = "Verdict:"
    verdicts = ("correct", "incorrect")  # on a correct solution, on an incorrect one

    def problems(self, source: str | Path) -> list[Problem]:
        """Read problems from a trajectory file, or from several by a glob: a random choice of as
        many correct as incorrect candidates, always the same.

        Raises:
            InputError: no candidate is correct, or none is incorrect.
        """
        table = pa.concat_tables(map(read_table, resolve_files(str(source))))
        reward = table["reward"].to_numpy()
        chosen = table.take(with_share(reward, 0.5, None, np.random.default_rng(0)))
        return self.candidates([Trajectory(**row) for row in chosen.to_pylist()])

    def candidates(self, trajectories: list[Trajectory]) -> list[Problem]:
        """A problem for each trajectory, whose reward decides the right verdict."""
        correct, incorrect = self.verdicts
        problems = []
        for index, t in enumerate(trajectories):
            gold = correct if t.reward > 0 else incorrect
            problems.append(Problem(f"{t.prompt_id}/{index}", t.prompt, gold, t.response))
        return problems

    def prompt(self, problem, tokenizer) -> Prompt:
        """Question and candidate, with the request for a critique that ends in a verdict."""
        # A candidate must not end the question, or start a new chat message.
        ends = [*self.sampling.stop, *tokenizer.all_special_tokens]
        solution = before(after_thinking(problem.solution or ""), ends)
        asked = f"{self.question(problem.prompt, tokenizer)}\n\nSolution: {solution.strip()}"
        return super().prompt(replace(problem, prompt=asked), tokenizer)

    def question(self, prompt: str, tokenizer) -> str:
        """The question within a prompt of the candidates' task."""
        if self.task is None:
            return prompt
        blank = self.task.prompt(Problem("", "\0", ""), tokenizer)
        head, _, tail = render_prompt(blank, tokenizer).partition("\0")
        return prompt.removeprefix(head).removesuffix(tail)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last verdict is the gold; invalid without a verdict."""
        text = re.sub("[*_`]", "", after_thinking(response))
        _, marker, rest = text.rpartition(self.marker)
        verdict = re.match(r"\s*(correct|incorrect)[ .!]*$", rest, re.IGNORECASE | re.MULTILINE)
        return exact_grade(verdict[1].lower() if marker and verdict else None, gold)
