"""Generative verifier: judge candidate solutions, write a short critique and a verdict (the paper's Table 2)."""

import random
import re
from collections import defaultdict
from pathlib import Path

from topr.io import InputError
from topr.rows import resolve_files
from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, Task, after_thinking, ask
from topr.tokenizer import render_prompt
from topr.trajectories import Trajectory, read_trajectories

EXAMPLES = [
    (
        "A box holds 12 pencils. How many pencils are in 5 boxes?",
        "5 boxes hold 12 * 5 = 50 pencils. The answer is 50.",
        "12 * 5 is 60, not 50, so the product is wrong.\nVerdict: incorrect",
    ),
    (
        "Ida walks 3 km to school and back on each of 5 days. How far does she walk?",
        "Each day she walks 3 * 2 = 6 km. In 5 days she walks 6 * 5 = 30 km. The answer is 30.",
        "Both ways are counted, and 6 * 5 is 30.\nVerdict: correct",
    ),
    (
        "Half of 24 pupils play an instrument, and a third of those play the violin. How many play the violin?",
        "24 / 3 = 8 pupils play the violin. The answer is 8.",
        "A third is to be taken of the 12 who play an instrument, which is 4; the solution takes it of all 24.\n"
        "Verdict: incorrect",
    ),
]


class Verifier(Task):
    """Problems are the trajectories of a file: a question, a candidate solution, and whether it is correct.

    Args:
        task: what the candidates solve; its prompt is taken off the question again.
        balance: leave out candidates, by chance but always the same ones, until as many are correct as not.
    """

    name = "verifier"
    sampling = Sampling(temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"])
    marker, verdicts = "Verdict:", {"correct": True, "incorrect": False}

    def __init__(self, task: Task | None = None, balance: bool = True):
        self.task, self.balance = task, balance

    def problems(self, source: str | Path) -> list[Problem]:
        """Problems from a trajectory file, or several by a glob.

        Raises:
            InputError: there is none, it is no trajectory file, or all its candidates are alike.
        """
        rows = [
            trajectory
            for path in resolve_files(str(source), "solutions to judge")
            for trajectory in read_trajectories(path)
        ]
        problems = self.candidates(rows)
        if not self.balance:
            return problems
        by_gold = defaultdict(list)
        for number, problem in enumerate(problems):
            by_gold[problem.gold].append(number)
        count = min(len(by_gold[gold]) for gold in self.golds())
        if not count:
            kind = next(gold for gold in self.golds() if not by_gold[gold])
            raise InputError(
                f"{source}: a verifier learns from correct and incorrect solutions, and no solution has the verdict "
                f"{kind!r}; sample more of them, or by a better policy"
            )
        chance = random.Random(0)
        kept = sorted(number for numbers in by_gold.values() for number in chance.sample(numbers, count))
        return [problems[number] for number in kept]

    def golds(self) -> tuple[str, str]:
        """The verdicts on a correct and on an incorrect solution."""
        right, wrong = sorted(self.verdicts, key=self.verdicts.get, reverse=True)
        return right, wrong

    def candidates(self, trajectories: list[Trajectory]) -> list[Problem]:
        """One problem for each trajectory, in their order."""
        right, wrong = self.golds()
        return [
            Problem(f"{t.prompt_id}/{number}", t.prompt, right if t.reward > 0 else wrong, t.response)
            for number, t in enumerate(trajectories)
        ]

    def prompt(self, problem: Problem, tokenizer) -> str | list[dict[str, str]]:
        """Question and candidate, with the request for a critique that ends in a verdict."""
        instruction = (
            "Check the solution step by step. Write a short critique, and end with a line that says "
            f'"{self.marker} correct" or "{self.marker} incorrect".'
        )
        examples = [(f"{question}\n\nSolution: {solution}", verdict) for question, solution, verdict in EXAMPLES]
        question, solution = self.question(problem.prompt, tokenizer), after_thinking(problem.solution)
        # what ended the solution is no part of it, and no turn of the conversation may begin within
        for text in (*self.sampling.stop, *tokenizer.all_special_tokens):
            solution = solution.partition(text)[0]
        return ask(f"{question}\n\nSolution: {solution.strip()}", instruction, examples, tokenizer)

    def question(self, prompt: str, tokenizer) -> str:
        """The question within the prompt that the task made of it; the whole prompt where it made another."""
        if self.task is not None:
            blank = Problem("", "\0", "")
            before, _, after = render_prompt(self.task.prompt(blank, tokenizer), tokenizer).partition("\0")
            if prompt.startswith(before) and prompt.endswith(after):
                return prompt[len(before) : len(prompt) - len(after)]
        return prompt

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last verdict is the gold; invalid without one."""
        _, marker, rest = re.sub("[*_`]", "", after_thinking(response)).rpartition(self.marker)
        found = re.match(rf"\s*(?:\\boxed\{{)?[\"']?({'|'.join(self.verdicts)})[^\w\n]*(?:\n|$)", rest, re.IGNORECASE)
        if not marker or found is None:
            return Grade(-1.0, False, None)
        verdict = found[1].lower()
        return Grade(1.0 if verdict == gold else -1.0, True, verdict)

    def weight(self, critiques: list[Trajectory]) -> float:
        """A solution's weight: the share of its critiques that call it correct, in [0, 1]."""
        return sum(self.verdicts.get(t.answer, False) for t in critiques if t.valid) / len(critiques)
