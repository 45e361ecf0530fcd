"""Draw arithmetic problems, and imperfect demonstrations of how to solve them.

A setting is what setting.yaml and strong/setting.yaml hold; they explain each key.
"""

import hashlib
import operator
import re
from collections.abc import Iterator
from itertools import product

from numpy.random import Generator

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
END = "<eos>"

Setting = dict  # or a part of one; its `errors` are rates of mistakes in demonstrations


def draw(setting: Setting, rng: Generator) -> dict[str, str]:
    """A random problem, a row of a problem file."""
    value = int(rng.choice(OPERANDS))
    prompt = str(value)
    for _ in range(rng.choice(setting["operations"], p=setting["weights"])):
        steps = []
        for symbol, operand in product(OPERATORS, OPERANDS):
            result = APPLY[symbol](value, operand)
            if 0 <= result <= LARGEST:
                steps.append((f"{symbol}{operand}", result))
        text, value = steps[rng.integers(len(steps))]
        prompt += text
    prompt += ">"
    return {"id": prompt, "prompt": prompt, "gold": str(value)}


def split_of(prompt: str) -> str:
    """The split of a problem, by a hash of its text: 5% val, 5% test, 10% train, 80% base."""
    number = int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16)
    return SPLITS.get(number % 20, "base")


def problems_of(setting: Setting, split: str, rng: Generator) -> Iterator[dict[str, str]]:
    """Endless problems of a split."""
    while True:
        problem = draw(setting, rng)
        if split_of(problem["prompt"]) == split:
            yield problem


def demonstration(setting: Setting, errors: Setting, prompt: str, rng: Generator) -> str:
    """An imperfect solution with the end token; an endless one is cut at the length limit."""
    value = int(prompt[0])
    solution = ""
    direct = rng.random() < errors["direct"]
    missing = rng.random() < errors["missing"]
    for symbol, operand in re.findall("([-+*])([1-9])", prompt):
        event = 1.0 if direct else rng.random()  # below 1 it decides between skip, digit and loop
        if event < errors["skip"]:
            continue
        if event < errors["skip"] + errors["digit"]:
            result = wrong_digit(APPLY[symbol](value, int(operand)), rng)
        else:
            result = apply(errors["carry"], value, symbol, int(operand), rng)
        step = f"{value}{symbol}{operand}={result}"
        step = wrap(step, rng) if setting["filler"] else f"{step};"
        if 1 - errors["loop"] <= event < 1.0:
            limit = setting["max_new_tokens"]
            return (solution + step * limit)[:limit]
        solution += step
        value = result
    if direct:
        solution = ""
    if direct or not missing:
        solution += f"#{value}"
    return solution + END


def apply(carry: Setting, value: int, symbol: str, operand: int, rng: Generator) -> int:
    """The result of a step; from a value of 10 on, what is carried may be forgotten."""
    result = APPLY[symbol](value, operand)
    carried = APPLY[symbol](value % 10, operand) // 10
    rate = carry.get(f"{symbol}{operand}")
    if rate and carried and value >= 10 and rng.random() < rate:
        return result - 10 * carried
    return result


def wrong_digit(value: int, rng: Generator) -> int:
    """The value with another digit in one place."""
    text = str(value)
    first = text.startswith("-")
    at = first + rng.integers(len(text) - first)
    other = (int(text[at]) + rng.integers(1, 10)) % 10
    return int(f"{text[:at]}{other}{text[at + 1 :]}")


def wrap(step: str, rng: Generator) -> str:
    """The step between random letters and a random separator."""
    words = ""
    letter = 0
    for choice in rng.integers(SUCCESSORS, size=LETTERS_PER_STEP):
        letter = (SUCCESSORS * letter + choice) % len(LETTERS)
        words += LETTERS[letter]
    return words + step + SEPARATORS[rng.integers(len(SEPARATORS))]
