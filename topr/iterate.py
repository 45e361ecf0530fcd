"""Sample, curate and train, several times over, each time from the newest policy.

python -m topr.iterate --config configs/arithmetic.yaml --iterations 4

All other arguments go to train.py. Each step's output is complete or absent, so that the same
command resumes a killed one.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
from jsonargparse.typing import NonNegativeInt, PositiveInt

from topr.distributed import die_with_parent
from topr.io import InputError, OneSentenceErrors, check_folder, command, lock, write_text
from topr.trajectories.curate import Curation, curate

TRAIN = Path(__file__).parent.parent / "train.py"
ALL = 1_000_000  # more than the responses to any problem


class Parser(OneSentenceErrors, argparse.ArgumentParser):
    """Unlike jsonargparse's, it can leave arguments to another command."""


def make_parser() -> Parser:
    parser = Parser(prog="python -m topr.iterate", description=__doc__)
    add = parser.add_argument
    add("--iterations", type=PositiveInt, default=4, help="times to sample and train")
    add("--out", type=Path, default=Path("runs/iterated"), help="folder to write")
    add("--seed", type=NonNegativeInt, default=0, help="of everything that is random")
    add("--pool", type=PositiveInt, help="responses to each problem; default: data.samples")
    ways = ["uniform", "anna_karenina"]
    add("--curate", choices=ways, default="uniform", help="which responses to train on")
    add("--budget", type=PositiveInt, default=ALL, help="of them, for a problem; default: all")
    return parser


def iterate(args: argparse.Namespace, rest: list[str]) -> None:
    """Repeat the three steps; `rest` holds the arguments of train.py."""
    claim_folder(args, rest)
    policy = None  # that of the configuration
    runs = []
    for number in range(args.iterations):
        folder = args.out / f"iteration_{number}"
        seed = 1000 * args.seed + number
        common = [*rest, f"--seed_everything={seed}"]
        if policy is not None:
            common.append(f"--model.policy={policy}")
        chosen = folder / "train.parquet"
        if not chosen.exists():
            samples = folder / "samples"
            pool = [f"--data.samples={args.pool}"] if args.pool else []
            train("predict", *common, *pool, f"--data.out={samples}")
            files = sorted(map(str, samples.glob("part-*.parquet")))
            curate(files, chosen, Curation(args.curate, args.budget, seed=seed), number)
        run = folder / "fit" / "version_0"
        if not (run / "summary.json").exists():
            logger = "--trainer.logger.init_args"
            place = [f"{logger}.save_dir={folder}", f"{logger}.name=fit", "--ckpt_path=last"]
            train("fit", *common, f"--data.train={chosen}", *place)
        policy = run / "policy"
        runs.append(run)
        report(args.out, runs)


def claim_folder(args: argparse.Namespace, rest: list[str]) -> None:
    """Raise an InputError if the folder holds results of other arguments."""
    check_folder("--out", args.out)
    lock(args.out)
    settings = vars(args) | {"train.py": rest}
    del settings["iterations"]  # more of them may follow
    text = json.dumps(settings, default=str)
    path = args.out / "arguments.json"
    if path.exists() and path.read_text() != text:
        message = f"{args.out} holds iterations with other arguments (see {path})"
        raise InputError(f"{message}; give the same ones, or another --out")
    write_text(path, text)


def train(*arguments: str) -> None:
    """Run train.py in a process that ends before this one does. SystemExit if it fails: it has
    printed why."""
    with subprocess.Popen(
        [sys.executable, TRAIN, *arguments],
        preexec_fn=die_with_parent,
        start_new_session=True,  # Ctrl-C reaches it once: by the signal below
    ) as process:
        try:
            code = process.wait()
        except BaseException:  # most likely a signal's
            process.terminate()  # leaving the block waits for its end
            raise
    if code:
        raise SystemExit(code if code in (2, 143) else 1)


def report(out: Path, runs: list[Path]) -> None:
    """Write and print how the policies did on data.test: the first one's figures, then those after
    each training."""
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    if "after" in summaries[0]:  # not without data.test
        rows = [summaries[0]["before"]]
        rows += [summary["after"] for summary in summaries]
        figures = pd.DataFrame(rows).rename_axis("iterations")
        write_text(out / "results.csv", figures.to_csv())
        print(f"\n{figures.to_string(float_format='{:.3f}'.format)}")
    print(f"\nThe newest policy is {runs[-1] / 'policy'}", flush=True)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(143))
    with command():
        iterate(*make_parser().parse_known_args())


if __name__ == "__main__":
    main()
