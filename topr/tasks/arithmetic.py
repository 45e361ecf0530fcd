"""The embedded task: left-to-right arithmetic, with a base policy small enough to ship and to train on a laptop.

Prompt `9+3*2-4>`, response `9+3=12;12*2=24;24-4=20;#20` and the end token. These commands make everything anew, of
the quick setting and of one with a strong base policy and high entropy (data/README.md has their arguments in full):

    python -m topr.tasks.arithmetic --out data/arithmetic
    python -m topr.tasks.arithmetic --config configs/arithmetic_strong.yaml --out data/arithmetic/strong
"""

import argparse
import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from topr.io import ArgumentParser, InputError, check_counts, check_file, check_folder, command, first_line
from topr.sampling import Sampling
from topr.tasks.demonstrations import APPLY, Errors, Filler, demonstrate
from topr.tasks.task import Grade, Problem, Task


class Arithmetic(Task):
    """Left-to-right arithmetic on small integers, every intermediate value between 0 and `largest`.

    Args:
        operations: fewest and most operations of a problem.
        operands: smallest and largest operand.
        largest: bound on every intermediate value.
        operators: drawn uniformly; a repeated one is as much likelier.
        weights: of each number of operations, from the fewest to the most; all equal by default.
        filler: wording of the demonstrations around their steps; none by default.
        errors: of the demonstrations.

    Raises:
        InputError: the ranges admit no problem.
    """

    name = "arithmetic"
    requires_end = True
    weights: list[float] | None = None
    filler: Filler | None = None
    errors = Errors()

    def __init__(
        self,
        operations: tuple[int, int] = (2, 4),
        operands: tuple[int, int] = (1, 9),
        largest: int = 99,
        operators: str = "++-*",
        weights: list[float] | None = None,
        filler: Filler | None = None,
        errors: Errors | None = None,
    ):
        if not (1 <= operations[0] <= operations[1] and 0 <= operands[0] <= operands[1] <= largest):
            raise InputError(
                f"Arithmetic: operations {operations} must rise from at least 1, operands {operands} from at least 0 "
                f"to at most largest = {largest}"
            )
        if not operators or set(operators) - set(APPLY):
            raise InputError(f"Arithmetic: operators {operators!r} must be taken from {''.join(APPLY)!r}")
        if weights is not None and not (
            len(weights) == operations[1] - operations[0] + 1 and min(weights) >= 0 and 0 < sum(weights) < math.inf
        ):
            raise InputError(
                f"Arithmetic: weights {weights} must be one number from 0 for each of {operations[0]} to "
                f"{operations[1]} operations, and not all 0"
            )
        self.operations, self.operands, self.largest, self.operators = operations, operands, largest, operators
        # only what is given: the attributes describe a task, and these have no part in what was sampled without them
        given = {"weights": weights, "filler": filler, "errors": errors}
        vars(self).update({name: value for name, value in given.items() if value is not None})

    @property
    def sampling(self) -> Sampling:
        """With room for the longest right response, and a little more."""
        digits = len(str(self.largest))
        step = 2 * digits + len(str(self.operands[1])) + 3 + (self.filler.length if self.filler else 0)
        longest = self.operations[1] * step + digits + 6
        return Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest)

    @property
    def symbols(self) -> list[str]:
        """What its demonstrations hold that those of the default do not."""
        return self.filler.extra if self.filler else []

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
            for _ in range(self._count(rng)):
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

    def _count(self, rng: np.random.Generator) -> int:
        if self.weights is None:
            return rng.integers(self.operations[0], self.operations[1] + 1)
        return self.operations[0] + rng.choice(len(self.weights), p=np.array(self.weights) / sum(self.weights))

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
        return demonstrate(prompt, errors, self.filler, self.sampling.max_new_tokens, rng)


def split_of(prompt: str) -> str:
    """The split a problem belongs to, by its text alone: 5% val, 5% test, 10% train, the rest base."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 20
    return {0: "val", 1: "test", 2: "train", 3: "train"}.get(bucket, "base")


def configured(config: Path | None, given: dict[str, Any]) -> Arithmetic:
    """The task of an experiment's config, or the default one, with the arguments given in place of its own.

    Raises:
        InputError: the config has no such task, or an argument is wrong.
    """
    import jsonargparse
    import yaml

    kind, arguments = None, {}
    if config is not None:
        check_file(config, "name a YAML file")
        try:
            task = yaml.safe_load(config.read_text())["model"]["task"]
            kind, arguments = task["class_path"], dict(task.get("init_args", {}))
        except (yaml.YAMLError, LookupError, TypeError, ValueError):  # whatever else stands there
            pass
        if kind != "topr.tasks.Arithmetic":
            raise InputError(f"{config} has no model.task of the class topr.tasks.Arithmetic; name a config that has")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Arithmetic, "task")
    try:
        return parser.instantiate(parser.parse_object({"task": arguments | given})).task
    except (jsonargparse.ArgumentError, ValueError) as error:
        inner = error  # the parser may have wrapped one of ours
        while inner is not None and not isinstance(inner, InputError):
            inner = inner.__cause__ or inner.__context__
        raise InputError(first_line(inner or error)) from error


def main() -> None:
    parser = ArgumentParser(
        prog="python -m topr.tasks.arithmetic",
        description="Make the embedded task anew: base policy, problems, trajectories. The same on every run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, help="an experiment's, whose task is made in place of the default one")
    settings = [
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=f"{text}, in place of the task's", **kind)
        for name, kind, text in (
            ("operations", {"type": int, "nargs": 2}, "fewest and most operations"),
            ("operands", {"type": int, "nargs": 2}, "smallest and largest operand"),
            ("largest", {"type": int}, "bound on intermediate values"),
            ("operators", {}, "drawn uniformly"),
        )
    ]
    parser.add_argument("--steps", type=int, nargs="+", default=[1150], help="supervised updates of each stage")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3], help="learning rate of each stage")
    parser.add_argument("--batch-size", type=int, default=96, help="demonstrations per supervised update")
    parser.add_argument("--train", type=int, default=500, help="training problems")
    parser.add_argument("--val", type=int, default=200, help="validation problems")
    parser.add_argument("--test", type=int, default=300, help="test problems")
    parser.add_argument("--samples", type=int, default=16, help="trajectories per training problem; 0: none")
    with command():
        args = parser.parse_args()
        import torch

        from topr.tasks.making import make

        torch.set_num_threads(1)  # as fast as more for a model of this size, and the same bits everywhere
        problems = {"train": args.train, "val": args.val, "test": args.test}
        check_counts("--", **problems, batch_size=args.batch_size)
        check_counts("--", least=0, samples=args.samples, seed=args.seed)
        for steps in args.steps:
            check_counts("--", steps=steps)
        if len(args.lr) != len(args.steps) or not all(0 < lr < math.inf for lr in args.lr):
            raise InputError(f"--lr must name a learning rate above 0 for each of the {len(args.steps)} --steps")
        given = {item.dest: getattr(args, item.dest) for item in settings if item.dest in args}
        task = configured(args.config, given)
        check_folder("--out", args.out)
        stages = list(zip(args.steps, args.lr, strict=True))
        make(task, args.out, args.seed, stages, args.batch_size, problems, args.samples)


if __name__ == "__main__":
    main()
