"""Make the embedded task's data. data/README.md has the commands that made the shipped data.

python -m topr.tasks.arithmetic --out FOLDER: a base policy, problems, trajectories.
python -m topr.tasks.arithmetic verifier --out FOLDER: a verifier's base policy, and solutions for it to judge.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from topr.io import ArgumentParser, InputError, command
from topr.tasks.arithmetic.making import make, make_verifier
from topr.tasks.arithmetic.task import Arithmetic, configured


def main() -> None:
    torch.set_num_threads(1)  # as fast as more for a model of this size, and the same bits everywhere
    with command():
        if sys.argv[1:2] == ["verifier"]:
            parser = ArgumentParser(prog="python -m topr.tasks.arithmetic verifier")
            parser.add_function_arguments(make_verifier)
            make_verifier(**parser.parse_args(sys.argv[2:]))
        else:
            make_task()


def make_task() -> None:
    parser = ArgumentParser(prog="python -m topr.tasks.arithmetic", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--seed", type=NonNegativeInt, default=0, help="of everything; another seed gives other problems, too")
    add("--config", type=Path, help="experiment whose task to make, instead of the default one")
    add("--operations", type=int, nargs=2, help="smallest and largest number of operations")
    add("--operands", type=int, nargs=2, help="smallest and largest operand")
    add("--largest", type=int, help="bound on intermediate values")
    add("--operators", help="drawn uniformly")
    add("--steps", type=PositiveInt, nargs="+", default=[1150], help="supervised updates of each stage")
    add("--lr", type=PositiveFloat, nargs="+", default=[3e-3], help="learning rate of each stage")
    add("--batch-size", type=PositiveInt, default=96, help="demonstrations per supervised update")
    for split, count in (("train", 500), ("val", 200), ("test", 300)):
        add(f"--{split}", type=PositiveInt, default=count, help=f"{split} problems")
    add("--samples", type=NonNegativeInt, default=16, help="trajectories per training problem; 0 writes no such file")
    args = vars(parser.parse_args())
    if len(args["lr"]) != len(args["steps"]):
        raise InputError(f"--lr has {len(args['lr'])} values, --steps {len(args['steps'])}; give one of each per stage")
    config = args.pop("config")
    task = configured(config) if config else Arithmetic()
    changes = {name: args.pop(name) for name in ("operations", "operands", "largest", "operators")}
    make(replace(task, **{name: value for name, value in changes.items() if value is not None}), **args)


if __name__ == "__main__":
    main()
