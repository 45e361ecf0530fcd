"""Imperfect critiques of imperfect solutions, which the verifier's base policy imitates."""

from collections.abc import Iterator

import numpy as np

from data.arithmetic.problems import Errors, Setting, base_prompts, demonstration
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
    for prompt in base_prompts(setting, rng):
        correct, _ = demonstration(setting, FLAWLESS, prompt, rng)
        for _ in range(100):
            solution, finished = demonstration(setting, Errors(), prompt, rng)
            grade = Arithmetic().grade(solution, correct.split("#")[1])
            if (finished and grade.reward > 0) == wanted:
                yield f"{prompt}{solution}>", critique(correct, solution, wanted, rng), True
                wanted = not wanted
                break
