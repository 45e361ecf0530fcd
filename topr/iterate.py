"""Sample, curate and train, several times over, each time from the newest policy.

python -m topr.iterate --config configs/arithmetic.yaml --iterations 4

All other arguments go to train.py. Each step's output is complete or absent, so that the same
command resumes a killed one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
from jsonargparse.typing import NonNegativeInt, PositiveInt

from topr.io import claim, write_text
from topr.io.commands import OneSentenceErrors, command
from topr.io.distributed import die_with_parent
from topr.trajectories.curate import curate
from topr.trajectories.file import resolve_files

TRAIN = Path(__file__).parent.parent / "train.py"
LOGGER = "--trainer.logger.init_args"
ALL = 1_000_000  # more than the responses to any problem


class Parser(OneSentenceErrors, argparse.ArgumentParser):
    """Unlike jsonargparse's, it can leave arguments to another command."""


def make_parser() -> Parser:
    parser = Parser(prog="python -m topr.iterate", description=__doc__)
    add = parser.add_argument
    add("--iterations", type=PositiveInt, default=4, help="times to sample and train")
    add("--out", type=Path, default=Path("runs/iterated"), help="folder to write")
    add("--seed", type=NonNegativeInt, default=0, help="of everything that is random")
    add(
        "--curate",
        choices=["uniform", "anna_karenina"],
        default="uniform",
        help="which responses to train on",
    )
    add("--budget", type=PositiveInt, default=ALL, help="of them, for a problem; default: all")
    return parser


def iterate(args: argparse.Namespace, rest: list[str]):
    """Repeat the three steps; `rest` holds the arguments of train.py. A step that is complete finds
    its output, and refuses one of other arguments."""
    claim(args.out, [args.curate, args.budget, args.seed, rest])
    policy: list = []  # at first that of the configuration
    summaries = []
    for number in range(args.iterations):
        folder = args.out / f"iteration_{number}"
        seed = 1000 * args.seed + number
        common = [*rest, *policy, f"--seed_everything={seed}"]
        samples = folder / "samples"
        chosen = folder / "train.parquet"
        # in process: a server would go on with the policy that it has
        train(
            "predict", *common, f"--data.out={samples}", "--model.sampler=null", "--ckpt_path=null"
        )
        files = resolve_files(sorted(map(str, samples.glob("*.parquet"))))
        curate(args.curate, files, chosen, args.budget, seed=seed, iteration=number, overwrite=True)
        # a logger whose folder is known, in the place of others
        common += [
            f"--data.train={chosen}",
            "--ckpt_path=last",
            "--trainer.logger=TensorBoardLogger",
        ]
        train("fit", *common, f"{LOGGER}.save_dir={folder}", f"{LOGGER}.name=fit")
        # a fit that made no checkpoint has started again in a folder of its own
        run = max((folder / "fit").glob("version_*"), key=os.path.getmtime)
        policy = [f"--model.policy={run / 'policy'}", "--model.weights=null"]
        summaries.append(json.loads((run / "summary.json").read_text()))
        figures = pd.json_normalize(summaries).T  # a column for each iteration
        write_text(args.out / "results.csv", figures.to_csv())
        print(f"\n{figures.to_string()}\n\nThe newest policy is {run / 'policy'}", flush=True)


def train(*arguments: str):
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
        raise SystemExit(code)


def main():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(143))
    with command():
        iterate(*make_parser().parse_known_args())


if __name__ == "__main__":
    main()
