"""Make the embedded task's data. data/README.md has the commands that made what is shipped.

python data/arithmetic/make.py --out FOLDER: a base policy, problems, trajectories.
python data/arithmetic/make.py verifier --out FOLDER: a verifier's base policy, and solutions for it to judge.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import yaml
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from topr.evaluation import SamplingJob
from topr.io import ArgumentParser, InputError, check_folder, command
from topr.policy import export_policy, load_policy
from topr.reproduce.making import imitate, judgements, make
from topr.sampling import LocalSampler
from topr.tasks import Arithmetic
from topr.tasks.arithmetic import configured
from topr.trajectories.__main__ import report


def main() -> None:
    torch.set_num_threads(
        1
    )  # as fast as more for a model of this size, and the same bits everywhere
    with command():
        if sys.argv[1:2] == ["verifier"]:
            parser = ArgumentParser(prog="python data/arithmetic/make.py verifier")
            parser.add_function_arguments(make_verifier)
            make_verifier(**parser.parse_args(sys.argv[2:]))
        else:
            make_task()


def make_task() -> None:
    parser = ArgumentParser(prog="python data/arithmetic/make.py", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add(
        "--seed",
        type=NonNegativeInt,
        default=0,
        help="of everything; another seed gives other problems, too",
    )
    add("--config", type=Path, help="experiment whose task to make, instead of the default one")
    add(
        "--steps",
        type=PositiveInt,
        nargs="+",
        default=[1150],
        help="supervised updates of each stage",
    )
    add("--lr", type=PositiveFloat, nargs="+", default=[3e-3], help="learning rate of each stage")
    add("--batch-size", type=PositiveInt, default=96, help="demonstrations per supervised update")
    for split, count in (("train", 500), ("val", 200), ("test", 300)):
        add(f"--{split}", type=PositiveInt, default=count, help=f"{split} problems")
    add(
        "--samples",
        type=NonNegativeInt,
        default=16,
        help="trajectories per training problem; 0 writes no such file",
    )
    args = vars(parser.parse_args())
    out, config, samples = args["out"], args.pop("config"), args["samples"]
    if len(args["lr"]) != len(args["steps"]):
        raise InputError(
            f"--lr has {len(args['lr'])} values, --steps {len(args['steps'])}; give one of each per stage"
        )
    check_folder("--out", out)
    try:
        task = configured(config) if config else Arithmetic()
    except (OSError, yaml.YAMLError, LookupError, TypeError) as error:
        raise InputError(f"{config} has no model.task; name an experiment that has one") from error
    if not isinstance(task, Arithmetic):
        raise InputError(
            f"{config} has another model.task than topr.tasks.Arithmetic, whose data this command makes"
        )
    make(task, **args)
    if samples:
        print(report([str(out / "train.parquet")]))
    print(
        f"wrote a base policy, problems and {samples} trajectories per training problem under {out}"
    )


def make_verifier(
    out: Path,
    data: Path = Path("data/arithmetic"),
    seed: NonNegativeInt = 0,
    steps: PositiveInt = 400,  # supervised updates of the base policy
    samples: PositiveInt = 4,  # solutions of each validation and test problem
) -> None:
    """Write a verifier's base policy, made from the one in `data`, and solutions for it to judge under `out`."""
    check_folder("--out", out)
    policy, task = load_policy(str(data / "base")), Arithmetic()
    for split in ("val", "test"):
        problems = task.problems(data / f"{split}.jsonl")
        job = SamplingJob(policy.name, task, problems, samples, task.sampling, seed)
        job.sample_part(out / f"{split}.parquet", problems, LocalSampler(), policy)
    imitate(policy, judgements(task, np.random.default_rng([seed, 0])), steps)
    export_policy(policy, out / "base")
    print(f"wrote base, val.parquet and test.parquet under {out}")


if __name__ == "__main__":
    main()
