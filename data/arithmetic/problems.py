"""Draw arithmetic problems, and imperfect demonstrations of how to solve them."""

import hashlib
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from topr.tasks import Problem

APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = "++-*"  # drawn uniformly, so that plus is twice as likely
OPERANDS = range(1, 10)
LARGEST = 99  # intermediate value; none is negative
SPLITS = {0: "val", 1: "test", 2: "train", 3: "train"}  # by remainder of a hash; all others: base

# Filler around a step: letters of a Markov chain before it, a random separator behind it.
# Letter i (at first i = 0) is followed by letter 4 i + k modulo 16, with k uniform in 0 … 3.
LETTERS = "abcdefghijklmnop"
LETTERS_PER_STEP = 5
SUCCESSORS = 4
SEPARATORS = ";,."


@dataclass
class Errors:
    """Probabilities of mistakes in demonstrations."""

    direct: float = 0.20  # an answer without steps
    missing: float = 0.12  # steps without an answer
    digit: float = 0.06  # per step: a wrong digit in the result
    skip: float = 0.06  # per step: the operand is left out
    loop: float = 0.06  # per step: it is repeated until the length limit
    # per step, by operator and operand: the carry into the tens, or the borrow, is forgotten
    carry: dict[str, dict[int, float]] = field(default_factory=dict)


@dataclass
class Setting:
    """Which problems are drawn, and how they are demonstrated."""

    operations: tuple[int, int] = (2, 4)  # fewest and most of a problem
    weights: list[float] | None = None  # of each number of operations; equal by default
    max_new_tokens: int = 40
    filler: bool = False  # random wording around the steps, without bearing on the answer
    errors: Errors = field(default_factory=Errors)


def draw(setting: Setting, rng: np.random.Generator) -> Problem:
    """A random problem."""
    fewest, most = setting.operations
    value = int(rng.choice(OPERANDS))
    prompt = str(value)
    for _ in range(rng.choice(range(fewest, most + 1), p=setting.weights)):
        steps = []
        for symbol, operand in product(OPERATORS, OPERANDS):
            result = APPLY[symbol](value, operand)
            if 0 <= result <= LARGEST:
                steps.append((f"{symbol}{operand}", result))
        text, value = steps[rng.integers(len(steps))]
        prompt += text
    return Problem(prompt + ">", prompt + ">", str(value))


def split_of(prompt: str) -> str:
    """The split of a problem, by a hash of its text: 5% val, 5% test, 10% train, 80% base."""
    number = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")
    return SPLITS.get(number % 20, "base")


def problems_of(setting: Setting, split: str, rng: np.random.Generator) -> Iterator[Problem]:
    """Endless problems of a split."""
    while True:
        problem = draw(setting, rng)
        if split_of(problem.prompt) == split:
            yield problem


def demonstration(
    setting: Setting, errors: Errors, prompt: str, rng: np.random.Generator
) -> tuple[str, bool]:
    """An imperfect solution, and whether it ends; an endless one is cut at the length limit."""
    first, *rest = re.findall(r"[0-9]+|[-+*]", prompt)
    value = int(first)
    solution = ""
    direct = rng.random() < errors.direct
    missing = rng.random() < errors.missing
    for symbol, digit in zip(rest[::2], rest[1::2], strict=True):
        operand = int(digit)
        event = 1.0 if direct else rng.random()  # below 1 it decides between skip, digit and loop
        if event < errors.skip:
            continue
        if event < errors.skip + errors.digit:
            result = wrong_digit(APPLY[symbol](value, operand), rng)
        else:
            result = apply(errors.carry, value, symbol, operand, rng)
        step = f"{value}{symbol}{operand}={result}"
        step = wrap(step, rng) if setting.filler else f"{step};"
        if 1 - errors.loop <= event < 1.0:
            endless = solution + step * setting.max_new_tokens
            return endless[: setting.max_new_tokens], False
        solution += step
        value = result
    if direct:
        return f"#{value}", True
    if missing:
        return solution, True
    return f"{solution}#{value}", True


def apply(
    rates: dict[str, dict[int, float]],
    value: int,
    symbol: str,
    operand: int,
    rng: np.random.Generator,
) -> int:
    """The result of a step; from a value of 10 on, what is carried may be forgotten."""
    result = APPLY[symbol](value, operand)
    carry = APPLY[symbol](value % 10, operand) // 10
    rate = rates.get(symbol, {}).get(operand)
    if rate and carry and value >= 10 and rng.random() < rate:
        return result - 10 * carry
    return result


def wrong_digit(value: int, rng: np.random.Generator) -> int:
    """The value with another digit in one place."""
    digits = str(abs(value))
    at = rng.integers(len(digits))
    other = (int(digits[at]) + rng.integers(1, 10)) % 10
    changed = int(f"{digits[:at]}{other}{digits[at + 1 :]}")
    return changed if value >= 0 else -changed


def wrap(step: str, rng: np.random.Generator) -> str:
    """The step between random letters and a random separator."""
    words = ""
    letter = 0
    for choice in rng.integers(SUCCESSORS, size=LETTERS_PER_STEP):
        letter = (SUCCESSORS * letter + choice) % len(LETTERS)
        words += LETTERS[letter]
    return words + step + SEPARATORS[rng.integers(len(SEPARATORS))]
