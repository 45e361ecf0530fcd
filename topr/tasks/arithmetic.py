"""Left-to-right arithmetic, hard enough to learn from and easy enough for a policy that trains on a laptop.

Prompt `9+3*2-4>`, correct response `9+3=12;12*2=24;24-4=20;#20` and the end token.
"""

import hashlib
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from topr.io import ArgumentParser, InputError
from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, Task, exact_grade
from topr.tasks.verifier import Verifier

APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass
class Bug:
    """A systematic mistake with values from 10: the carry into the tens, or the borrow from them, is forgotten."""

    operator: Literal["+", "-", "*"]
    operands: tuple[int, int]  # smallest and largest operand that is affected
    rate: float  # probability in steps that carry or borrow

    def result(self, value: int, symbol: str, operand: int) -> int | None:
        """The wrong result of a step; None if the step is not affected."""
        tens = APPLY[symbol](value % 10, operand % 10) // 10
        affected = symbol == self.operator and self.operands[0] <= operand <= self.operands[1]
        return (
            APPLY[symbol](value, operand) - 10 * tens if affected and value >= 10 and tens else None
        )


@dataclass
class Errors:
    """Probabilities of mistakes in the demonstrations."""

    direct: float = 0.20  # an answer without steps
    missing: float = 0.12  # steps without an answer
    digit: float = 0.06  # per step: a wrong digit in the result
    skip: float = 0.06  # per step: the operand is left out
    loop: float = 0.06  # per step: it is repeated until the length limit
    bugs: list[Bug] = field(default_factory=list)  # per step: the first bug that affects it


@dataclass
class Filler:
    """Random wording around the steps, without bearing on the answer: letters of a Markov chain, and a separator.
    Symbol i (first 0) is followed by symbol `successors` · i + k modulo their number, 0 ≤ k < `successors` uniform."""

    symbols: str = "abcdefghijklmnop"
    length: int = 5  # letters before each step
    successors: int = 4
    separators: str = ";,."  # each step ends with a random one

    def wrap(self, step: str, rng: np.random.Generator) -> str:
        """The step between random letters and a random separator."""
        letters, at = "", 0
        for choice in rng.integers(self.successors, size=self.length):
            at = (self.successors * at + int(choice)) % len(self.symbols)
            letters += self.symbols[at]
        return letters + step + self.separators[rng.integers(len(self.separators))]


@dataclass(eq=False)
class Arithmetic(Task):
    """Left-to-right arithmetic on integers. All but the grading serves to draw problems and demonstrations."""

    name = "arithmetic"
    requires_end = True

    operations: tuple[int, int] = (2, 4)  # smallest and largest number of operations
    operands: tuple[int, int] = (1, 9)  # smallest and largest operand
    largest: int = 99  # bound on intermediate values, which are never negative
    operators: str = "++-*"  # drawn uniformly; a repeated one is as many times more likely
    weights: list[float] | None = (
        None  # of each number of operations, from the smallest; equal by default
    )
    filler: Filler | None = None  # random wording of the demonstrations
    errors: Errors = field(default_factory=Errors)  # mistakes of the demonstrations

    def __post_init__(self) -> None:
        digits = len(str(self.largest))
        step = (
            2 * digits + len(str(self.operands[1])) + 3 + (self.filler.length if self.filler else 0)
        )
        longest = (
            self.operations[1] * step + digits + 6
        )  # a little more than the longest correct response
        self.sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the response ends in `#` and the answer; invalid unless it holds exactly one numeric `#answer`."""
        found = re.fullmatch(r"[^#]*#([0-9]{1,20})", response)
        return exact_grade(str(int(found[1])) if found else None, gold)

    def draw(self, rng: np.random.Generator) -> Problem:
        """A random problem; an InputError if the settings hardly ever admit one."""
        operands, counts = (range(low, high + 1) for low, high in (self.operands, self.operations))
        shares = None if self.weights is None else np.divide(self.weights, sum(self.weights))
        for _ in range(1000) if operands and counts else ():
            value = int(rng.choice(operands))
            prompt = str(value)
            for _ in range(rng.choice(counts, p=shares)):
                steps = [
                    (s, n)
                    for s in self.operators
                    for n in operands
                    if 0 <= APPLY[s](value, n) <= self.largest
                ]
                if not steps:
                    break
                symbol, operand = steps[rng.integers(len(steps))]
                prompt, value = f"{prompt}{symbol}{operand}", APPLY[symbol](value, operand)
            else:
                return Problem(prompt + ">", prompt + ">", str(value))
        raise InputError(
            f"{self} admits no problem; widen operations, operands, operators or largest"
        )

    def distinct(self, split: str, count: int, rng: np.random.Generator) -> list[Problem]:
        """`count` different problems of a split (train, val, test or base); an InputError if it has too few."""
        found: dict[str, Problem] = {}
        for _ in range(1000 * count + 100_000):
            if len(found) == count:
                return list(found.values())
            problem = self.draw(rng)
            if split_of(problem.prompt) == split:
                found.setdefault(problem.prompt, problem)
        raise InputError(
            f"Arithmetic: too few problems for {count} in the {split} split; widen the settings"
        )

    def base(self, rng: np.random.Generator) -> Iterator[str]:
        """Endless prompts of the base split."""
        while True:
            if split_of(prompt := self.draw(rng).prompt) == "base":
                yield prompt

    def demonstration(
        self, prompt: str, errors: Errors, rng: np.random.Generator
    ) -> tuple[str, bool]:
        """An imperfect solution, and whether it ends; an endless one is cut at the length limit."""
        first, *rest = re.findall(r"[0-9]+|[-+*]", prompt)
        value, solution = int(first), ""
        direct, missing = rng.random() < errors.direct, rng.random() < errors.missing
        for symbol, operand in zip(rest[::2], map(int, rest[1::2]), strict=True):
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
            step = self.filler.wrap(step, rng) if self.filler else f"{step};"
            if 1 - errors.loop <= event < 1.0:
                longest = self.sampling.max_new_tokens
                return (solution + step * longest)[:longest], False
            solution, value = solution + step, result
        if direct:
            return f"#{value}", True
        return solution + ("" if missing else f"#{value}"), True


def _wrong_digit(value: int, rng: np.random.Generator) -> int:
    digits = str(abs(value))
    at = rng.integers(len(digits))
    digit = (int(digits[at]) + rng.integers(1, 10)) % 10
    return int(f"{digits[:at]}{digit}{digits[at + 1 :]}") * (-1 if value < 0 else 1)


def split_of(prompt: str) -> str:
    """The split of a problem, by a hash of its text: 5% val, 5% test, 10% train, the rest base."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 20
    return {0: "val", 1: "test", 2: "train", 3: "train"}.get(bucket, "base")


class ArithmeticVerifier(Verifier):
    """Judges solutions of `Arithmetic`: `1` or `0` for every step, then `#` and the verdict.
    Prompt `9+3*2-4>9+3=12;12*2=25;25-4=21;#21>`, correct response `100#0` and the end token."""

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


def configured(config: Path) -> Arithmetic:
    """The task of an experiment's config."""
    parser = ArgumentParser()
    parser.add_argument("--task", type=Task)
    return parser.instantiate(
        parser.parse_object({"task": yaml.safe_load(config.read_text())["model"]["task"]})
    ).task
