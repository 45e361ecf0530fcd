"""Imperfect critiques of imperfect solutions, which the verifier's base policy imitates."""

from collections.abc import Iterator

import numpy as np

from data.arithmetic.problems import Errors, Setting, demonstration, problems_of
from topr.tasks import Arithmetic

# rates of critiques without steps, of those without a verdict, and of wrong digits
DIRECT = 0.20
MISSING = 0.12
WRONG = 0.10
FLAWLESS = Errors(direct=0, missing=0, digit=0, skip=0, loop=0)


def critique(correct: str, solution: str, is_correct: bool, rng: np.random.Generator) -> str:
    """An imperfect critique of a solution, by comparison with a correct one."""
    expected = correct.split("#")[0].split(";")[:-1]
    written = ""
    for number, step in enumerate(solution.split("#")[0].split(";")[:-1][:9]):
        right = step in expected[number : number + 1]
        written += str(int(right ^ (rng.random() < WRONG)))
    verdict = f"#{int(is_correct ^ (rng.random() < WRONG))}"
    if rng.random() < DIRECT:
        return verdict
    if rng.random() < MISSING:
        return written
    return written + verdict


def judgements(setting: Setting, rng: np.random.Generator) -> Iterator[tuple[str, str, bool]]:
    """Endless verifier prompts with imperfect critiques, and that each critique ends.

    The solutions are correct and incorrect ones in turn.
    """
    wanted = True
    task = Arithmetic()
    for problem in problems_of(setting, "base", rng):
        correct, _ = demonstration(setting, FLAWLESS, problem.prompt, rng)
        for _ in range(100):
            solution, finished = demonstration(setting, Errors(), problem.prompt, rng)
            if (finished and task.grade(solution, problem.gold).reward > 0) == wanted:
                text = critique(correct, solution, wanted, rng)
                yield f"{problem.prompt}{solution}>", text, True
                wanted = not wanted
                break
