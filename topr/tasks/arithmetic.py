"""The embedded task: left-to-right arithmetic, with a base policy small enough to ship and to train on a laptop.

Prompt `9+3*2-4>`, response `9+3=12;12*2=24;24-4=20;#20` and the end token. This command makes everything anew:

    python -m topr.tasks.arithmetic --seed 0 --out data/arithmetic
"""

import argparse
import hashlib
import json
import operator
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from topr.io import ArgumentParser, InputError, atomic, check_counts, check_folder, command
from topr.sampling import Sampling
from topr.tasks.imitation import imitate, make_model, make_tokenizer
from topr.tasks.task import Grade, Problem, Task

APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_NEW_TOKENS = 40


@dataclass
class Errors:
    """Rates of error in the demonstrations that the base policy imitates."""

    direct: float = 0.20  # answer without steps
    missing: float = 0.12  # steps without answer
    digit: float = 0.06  # per step: a wrong result
    skip: float = 0.06  # per step: the operand is left out
    loop: float = 0.06  # per step: it is repeated for ever


class Arithmetic(Task):
    """Left-to-right arithmetic on small integers, every intermediate value between 0 and `largest`.

    Args:
        operations: fewest and most operations of a problem, drawn uniformly.
        operands: smallest and largest operand.
        largest: bound on every intermediate value.
        operators: drawn uniformly; a repeated one is as much likelier.

    Raises:
        InputError: the ranges admit no problem.
    """

    name = "arithmetic"
    requires_end = True
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)

    def __init__(
        self,
        operations: tuple[int, int] = (2, 4),
        operands: tuple[int, int] = (1, 9),
        largest: int = 99,
        operators: str = "++-*",
    ):
        if not (1 <= operations[0] <= operations[1] and 0 <= operands[0] <= operands[1] <= largest):
            raise InputError(
                f"Arithmetic: operations {operations} must rise from at least 1, operands {operands} from at least 0 "
                f"to at most largest = {largest}"
            )
        if not operators or set(operators) - set(APPLY):
            raise InputError(f"Arithmetic: operators {operators!r} must be taken from {''.join(APPLY)!r}")
        self.operations, self.operands, self.largest, self.operators = operations, operands, largest, operators

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the response ends in `#` and the answer; invalid unless it holds exactly one numeric `#answer`."""
        found = re.fullmatch(r"[^#]*#([0-9]{1,20})", response)
        if found is None:
            return Grade(-1.0, False, None)
        answer = str(int(found[1]))
        return Grade(1.0 if answer == gold else -1.0, True, answer)

    def draw(self, rng: np.random.Generator) -> Problem:
        """A random problem.

        Raises:
            InputError: the settings hardly ever admit one.
        """
        operands = range(self.operands[0], self.operands[1] + 1)
        for _ in range(1000):
            value = int(rng.choice(operands))
            prompt = str(value)
            for _ in range(rng.integers(self.operations[0], self.operations[1] + 1)):
                steps = [(s, n) for s in self.operators for n in operands if 0 <= APPLY[s](value, n) <= self.largest]
                if not steps:
                    break
                symbol, operand = steps[rng.integers(len(steps))]
                prompt, value = f"{prompt}{symbol}{operand}", APPLY[symbol](value, operand)
            else:
                return Problem(prompt + ">", prompt + ">", str(value))
        raise InputError(
            f"Arithmetic: operands {self.operands}, operators {self.operators!r} and largest = {self.largest} leave no "
            "problem; widen them"
        )

    def distinct(self, split: str, count: int, rng: np.random.Generator) -> list[Problem]:
        """`count` different problems of a split: train, val, test or base (what the base policy learns from).

        Raises:
            InputError: the split has too few.
        """
        found: dict[str, Problem] = {}
        for _ in range(1000 * count + 100_000):
            if len(found) == count:
                return list(found.values())
            problem = self.draw(rng)
            if split_of(problem.prompt) == split:
                found.setdefault(problem.prompt, problem)
        raise InputError(f"Arithmetic: these settings have too few problems for {count} in the {split} split")

    def base(self, rng: np.random.Generator) -> Iterator[str]:
        """Prompts of the base split without end, from which a base policy learns."""
        while True:
            prompt = self.draw(rng).prompt
            if split_of(prompt) == "base":
                yield prompt

    def demonstration(self, prompt: str, errors: Errors, rng: np.random.Generator) -> tuple[str, bool]:
        """An imperfect solution and whether it ends, the base policy's training text."""
        first, *rest = re.findall(r"[0-9]+|[-+*]", prompt)
        value, steps = int(first), []
        direct, missing = rng.random() < errors.direct, rng.random() < errors.missing
        for symbol, operand in zip(rest[::2], rest[1::2], strict=True):
            right = APPLY[symbol](value, int(operand))
            event = rng.random() if not direct else 1.0
            if event < errors.skip:
                continue
            if event < errors.skip + errors.digit:
                right = _wrong_digit(right, rng)
            step = f"{value}{symbol}{operand}={right};"
            if 1 - errors.loop <= event < 1.0:
                return ("".join(steps) + step * MAX_NEW_TOKENS)[:MAX_NEW_TOKENS], False
            steps.append(step)
            value = right
        if direct:
            return f"#{value}", True
        return "".join(steps) + ("" if missing else f"#{value}"), True


def _wrong_digit(value: int, rng: np.random.Generator) -> int:
    digits = list(str(abs(value)))
    position = rng.integers(len(digits))
    digits[position] = str((int(digits[position]) + rng.integers(1, 10)) % 10)
    return int("".join(digits)) * (-1 if value < 0 else 1)


def split_of(prompt: str) -> str:
    """The split a problem belongs to, by its text alone: 5% val, 5% test, 10% train, the rest base."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 20
    return {0: "val", 1: "test", 2: "train", 3: "train"}.get(bucket, "base")


def make(task: Arithmetic, out: Path, seed: int, steps: int, problems: dict[str, int], samples: int) -> None:
    """Write base policy, problems of every split and graded, scored trajectories of the train split under `out`."""
    import torch

    from topr.evaluation import sample_and_grade
    from topr.policy import export_policy
    from topr.report import report
    from topr.sampling import LocalSampler
    from topr.tokenizer import provenance
    from topr.trajectories import add_log_probs, write_trajectories

    splits = {
        split: task.distinct(split, count, np.random.default_rng([seed, 1 + i]))
        for i, (split, count) in enumerate(problems.items())
    }
    torch.manual_seed(seed)
    tokenizer, rng = make_tokenizer(), np.random.default_rng([seed, 0])
    model = make_model(tokenizer)
    imitate(model, tokenizer, ((prompt, task.demonstration(prompt, Errors(), rng)) for prompt in task.base(rng)), steps)
    export_policy(model, tokenizer, out / "base")
    for split, drawn in splits.items():
        with atomic(out / f"{split}.jsonl") as path:
            path.write_text(
                "".join(
                    json.dumps({"id": problem.id, "prompt": problem.prompt, "gold": problem.gold}) + "\n"
                    for problem in drawn
                )
            )
    sampler = LocalSampler()
    trajectories = sample_and_grade(sampler, model, tokenizer, task, splits["train"], samples, task.sampling, seed)
    add_log_probs(model, trajectories, microbatch_tokens=16384)
    how = asdict(task.sampling) | {"samples": samples, "seed": seed}
    base = str(out / "base")
    metadata = provenance(base, tokenizer, "32-true", task=task.name, sampling=how, iteration=0)
    write_trajectories(out / "train.parquet", trajectories, metadata)
    print(f"{report([str(out / 'train.parquet')])}\nwrote base, problems and trajectories under {out}")


def main() -> None:
    parser = ArgumentParser(
        prog="python -m topr.tasks.arithmetic",
        description="Make the embedded task anew: base policy, problems, trajectories. The same on every run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, nargs=2, default=(2, 4), help="fewest and most operations")
    parser.add_argument("--operands", type=int, nargs=2, default=(1, 9), help="smallest and largest operand")
    parser.add_argument("--largest", type=int, default=99, help="bound on intermediate values")
    parser.add_argument("--operators", default="++-*", help="drawn uniformly")
    parser.add_argument("--steps", type=int, default=1150, help="supervised updates of the base policy")
    parser.add_argument("--train", type=int, default=500, help="problems with trajectories")
    parser.add_argument("--val", type=int, default=200, help="validation problems")
    parser.add_argument("--test", type=int, default=300, help="test problems")
    parser.add_argument("--samples", type=int, default=16, help="trajectories per problem")
    with command():
        args = parser.parse_args()
        import torch

        torch.set_num_threads(1)  # as fast as more for a model of this size, and the same bits everywhere
        task = Arithmetic(tuple(args.operations), tuple(args.operands), args.largest, args.operators)
        problems = {"train": args.train, "val": args.val, "test": args.test}
        check_counts("--", **problems, steps=args.steps, samples=args.samples)
        check_folder("--out", args.out)
        make(task, args.out, args.seed, args.steps, problems, args.samples)


if __name__ == "__main__":
    main()
