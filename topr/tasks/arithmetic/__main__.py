"""Make the embedded task's data. data/README.md has the commands that made the shipped data.

python -m topr.tasks.arithmetic --out FOLDER: a base policy, problems, trajectories.
python -m topr.tasks.arithmetic verifier --out FOLDER: a verifier's base policy, and solutions for it to judge.
"""

import sys
from pathlib import Path

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from topr.io import ArgumentParser, InputError, check_folder, command
from topr.tasks.arithmetic import making
from topr.tasks.arithmetic.task import configured


def main() -> None:
    torch.set_num_threads(1)  # as fast as more for a model of this size, and the same bits everywhere
    with command():
        if sys.argv[1:2] != ["verifier"]:
            return make_task()
        parser = ArgumentParser(prog="python -m topr.tasks.arithmetic verifier")
        parser.add_function_arguments(making.make_verifier)
        args = parser.parse_args(sys.argv[2:])
        check_folder("--out", args.out)
        making.make_verifier(**args)


def make_task() -> None:
    parser = ArgumentParser(prog="python -m topr.tasks.arithmetic", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--seed", type=NonNegativeInt, default=0, help="of everything")
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
    add("--samples", type=NonNegativeInt, default=16, help="trajectories per training problem")
    args = parser.parse_args()
    check_folder("--out", args.out)
    if len(args.lr) != len(args.steps):
        raise InputError(f"--lr has {len(args.lr)} values and --steps {len(args.steps)}; give one of each per stage")
    given = {name: args[name] for name in ("operations", "operands", "largest", "operators") if args[name] is not None}
    stages = list(zip(args.steps, args.lr, strict=True))
    problems = {split: args[split] for split in ("train", "val", "test")}
    making.make(configured(args.config, given), args.out, args.seed, stages, args.batch_size, problems, args.samples)


if __name__ == "__main__":
    main()
