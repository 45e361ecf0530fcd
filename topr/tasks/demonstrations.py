"""Imperfect solutions of arithmetic problems, from which a base policy learns: their mistakes and their wording."""

import operator
import re
from dataclasses import dataclass, field

import numpy as np

from topr.io import InputError
from topr.tasks.imitation import SYMBOLS

APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass
class Bug:
    """A systematic mistake: what the units carry into the tens, or borrow from them, is forgotten.

    Only values that have tens suffer it: of the others too little would be left, and negative answers are invalid.

    Args:
        operator: of the steps concerned.
        operands: smallest and largest operand of the steps concerned.
        rate: how often it happens where something is carried or borrowed, with the same wrong result each time.

    Raises:
        InputError: the operator is unknown, or the rate no probability.
    """

    operator: str
    operands: tuple[int, int]
    rate: float

    def __post_init__(self):
        if self.operator not in APPLY or not 0 <= self.rate <= 1:
            raise InputError(f"{self}: operator must be one of {' '.join(APPLY)}, rate a probability")

    def result(self, value: int, symbol: str, operand: int) -> int | None:
        """The wrong result of a step; None where this mistake cannot be made."""
        tens = APPLY[symbol](value % 10, operand % 10) // 10
        concerned = symbol == self.operator and self.operands[0] <= operand <= self.operands[1]
        if not concerned or value < 10 or tens == 0:
            return None
        return APPLY[symbol](value, operand) - 10 * tens


@dataclass
class Errors:
    """Rates of error in the demonstrations that the base policy imitates.

    Raises:
        InputError: they are no probabilities.
    """

    direct: float = 0.20  # answer without steps
    missing: float = 0.12  # steps without answer
    digit: float = 0.06  # per step: a wrong result
    skip: float = 0.06  # per step: the operand is left out
    loop: float = 0.06  # per step: it is repeated for ever
    bugs: list[Bug] = field(default_factory=list)  # per step: the first that can be made may be

    def __post_init__(self):
        rates = self.direct, self.missing, self.digit, self.skip, self.loop
        if min(rates) < 0 or max(self.direct, self.missing, self.digit + self.skip + self.loop) > 1:
            raise InputError(f"{self}: each rate, and the sum of digit, skip and loop, must be a probability")


@dataclass
class Filler:
    """Wording around the steps, as random as a language model's and without bearing on the answer.

    Args:
        symbols: the letters of a Markov chain; behind symbol i each of the symbols `successors` · i + k, modulo their
            number, with 0 ≤ k < `successors`, is equally likely.
        length: of the chain before each step; it begins as if the first symbol stood before it.
        successors: of each symbol.
        separators: one of them, each equally likely, ends a step.

    Raises:
        InputError: a symbol is not of its kind or stands twice, or a number lies outside its range.
    """

    symbols: str = "abcdefghijklmnop"
    length: int = 5
    successors: int = 4
    separators: str = ";,."

    def __post_init__(self):
        texts = self.symbols, self.separators
        if not (
            all(len(set(text)) == len(text) > 0 for text in texts)
            and self.symbols.isalpha()
            and set(self.separators) <= set(";,.:!?")  # neither digits nor what a solution or special tokens hold
            and self.length >= 0
            and 1 <= self.successors <= len(self.symbols)
        ):
            raise InputError(
                f"{self}: symbols must be different letters, separators different ones of ;,.:!?, length at least 0, "
                f"successors from 1 to {len(self.symbols)}"
            )

    @property
    def extra(self) -> list[str]:
        """What a tokenizer must know beside the symbols of a plain solution."""
        return [symbol for symbol in self.symbols + self.separators if symbol not in SYMBOLS]

    def words(self, rng: np.random.Generator) -> str:
        """The chain before a step."""
        written, at = "", 0
        for choice in rng.integers(self.successors, size=self.length):
            at = (self.successors * at + int(choice)) % len(self.symbols)
            written += self.symbols[at]
        return written

    def separator(self, rng: np.random.Generator) -> str:
        """The end of a step."""
        return self.separators[rng.integers(len(self.separators))]


def demonstrate(
    prompt: str, errors: Errors, filler: Filler | None, longest: int, rng: np.random.Generator
) -> tuple[str, bool]:
    """An imperfect solution and whether it ends; one that does not is cut at `longest` characters."""
    first, *rest = re.findall(r"[0-9]+|[-+*]", prompt)
    value, steps = int(first), []
    direct, missing = rng.random() < errors.direct, rng.random() < errors.missing
    for symbol, number in zip(rest[::2], rest[1::2], strict=True):
        operand = int(number)
        result = APPLY[symbol](value, operand)
        event = rng.random() if not direct else 1.0
        if event < errors.skip:
            continue
        if event < errors.skip + errors.digit:
            result = _wrong_digit(result, rng)
        else:
            for bug in errors.bugs:
                if (wrong := bug.result(value, symbol, operand)) is not None:
                    result = wrong if rng.random() < bug.rate else result
                    break
        step = f"{value}{symbol}{operand}={result}"
        step = f"{filler.words(rng)}{step}{filler.separator(rng)}" if filler else f"{step};"
        if 1 - errors.loop <= event < 1.0:
            return ("".join(steps) + step * longest)[:longest], False
        steps.append(step)
        value = result
    if direct:
        return f"#{value}", True
    return "".join(steps) + ("" if missing else f"#{value}"), True


def _wrong_digit(value: int, rng: np.random.Generator) -> int:
    digits = list(str(abs(value)))
    position = rng.integers(len(digits))
    digits[position] = str((int(digits[position]) + rng.integers(1, 10)) % 10)
    return int("".join(digits)) * (-1 if value < 0 else 1)
