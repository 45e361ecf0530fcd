"""The generative verifier of the embedded task: `1` or `0` for every step of a solution, then `#` and the verdict.

Prompt `9+3*2-4>9+3=12;12*2=25;25-4=21;#21>`, correct response `100#0` and the end token.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from topr.sampling import Sampling
from topr.tasks.arithmetic.task import Arithmetic, Errors
from topr.tasks.task import Grade, Problem, exact_grade
from topr.tasks.verifier import Verifier

DIRECT, MISSING, WRONG = 0.20, 0.12, 0.10  # rates of critiques without steps, of those without verdict, of wrong digits


class ArithmeticVerifier(Verifier):
    """Judges solutions of `Arithmetic`, from any trajectory file."""

    name = "arithmetic_verifier"
    requires_end = True
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=12)
    verdicts = {"1": True, "0": False}

    def prompt(self, problem: Problem, tokenizer: Any) -> str:
        """The question and the candidate solution."""
        return f"{problem.prompt}{problem.solution}>"

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the verdict after the digits is the gold; invalid in any other form."""
        found = re.fullmatch(r"[01]*#([01])", response)
        return exact_grade(found[1] if found else None, gold)


def critique(correct: str, solution: str, is_correct: bool, rng: np.random.Generator) -> str:
    """An imperfect critique of a solution, by comparison with a correct one."""
    steps, expected = (text.split("#")[0].split(";")[:-1] for text in (solution, correct))
    digits = [i < len(expected) and step == expected[i] for i, step in enumerate(steps)]
    written = "".join(str(int(digit ^ (rng.random() < WRONG))) for digit in digits[:9])
    verdict = f"#{int(is_correct ^ (rng.random() < WRONG))}"
    if rng.random() < DIRECT:
        return verdict
    return written + ("" if rng.random() < MISSING else verdict)


def critiques(task: Arithmetic, rng: np.random.Generator) -> Iterator[tuple[str, str, bool]]:
    """Endless verifier prompts with imperfect critiques, of correct and incorrect solutions in turn."""
    wanted = True
    for prompt in task.base(rng):
        correct, _ = task.demonstration(prompt, Errors(0, 0, 0, 0, 0), rng)
        for _ in range(100):
            solution, finished = task.demonstration(prompt, Errors(), rng)
            if (finished and task.grade(solution, correct.split("#")[1]).reward > 0) == wanted:
                yield f"{prompt}{solution}>", critique(correct, solution, wanted, rng), True
                wanted = not wanted
                break
