"""Sample, curate, train, and again with the policy that came out of it; every policy on the way is evaluated.

python -m topr.iterate --config configs/arithmetic.yaml --iterations 4

Under --out lie, for each iteration i, iteration_i/test (responses of the policy that it begins with, to data.test),
iteration_i/samples (its responses to data.problems), iteration_i/train.parquet (those that are trained on) and
iteration_i/fit (the run, and in it the next policy); results.json, .md and .png; and tensorboard/, one run over all.
Each of them is whole or absent. Killed, the same command goes on where it was and ends with the same results.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jsonargparse
import yaml

from topr.curation import Curation, Way, add_arguments, curate, tell
from topr.evaluation import cell
from topr.io import ArgumentParser, InputError, atomic, check_counts, check_folder, command
from topr.progress import measure, summary, table, write_events, write_results
from topr.ranks import die_with_parent
from topr.tasks import Task
from topr.trajectories import read_metadata

TRAIN = Path(__file__).parent.parent / "train.py"
SEEDS = 1000  # iterations that a seed has seeds for: the last of them is that of every test
# given by the driver
OWN = ("--data.train", "--data.out", "--seed_everything", "--ckpt_path", "--print_config", "--trainer.logger")
# of the configuration, what may change when an interrupted command is given again: where it runs, not what it computes
FREE = ("model.sampler", "model.threads", "model.activation_checkpointing", "model.reshard_after_forward")
FREE += ("data.microbatch_tokens", "data.num_workers", "trainer.enable_progress_bar", "trainer.accelerator")
FREE += ("trainer.devices", "trainer.num_nodes", "trainer.strategy", "model.compile")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The driver's arguments, and those for train.py."""
    parser = ArgumentParser(
        prog="python -m topr.iterate",
        description="Sample, curate, train and evaluate, several times over.",
        epilog="Everything else, --config FILE first of all, goes to train.py; its fit --help lists the keys.",
    )
    parser.add_argument("--iterations", type=int, default=4, help="times to sample and train (default 4)")
    parser.add_argument("--out", type=Path, help="folder to write (default: the logger's, its name with -iterated)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is left to chance (default 0)")
    parser.add_argument("--curate", choices=get_args(Way), default="uniform", help="what to train on: topr.curation")
    parser.add_argument("--pool", type=int, help="responses to each training problem (default: data.samples)")
    add_arguments(parser)
    parser.add_argument(
        "--before-sampling",
        metavar="COMMAND",
        help="for the shell, with the policy's folder in $POLICY: to put it on the servers of a ServerSampler",
    )
    args, rest = parser.parse_known_args()
    check_counts("--", most=SEEDS - 1, iterations=args.iterations)
    check_counts("--", least=0, most=2**32 // SEEDS - 1, seed=args.seed)
    check_counts("--", pool=args.pool, budget=args.budget)
    for argument in rest:
        if argument.startswith(OWN):
            raise InputError(f"{argument.partition('=')[0]} is set anew for each iteration; give --out and --seed")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # by torchrun
        raise InputError("start topr.iterate once and not on every rank: train.py starts the processes of this node")
    return args, rest


def train(*arguments: str, read: bool = False) -> str | None:
    """Run train.py in a process of its own, which is ended, and waited for, with this one.

    Returns:
        What it printed, if that is to be read.

    Raises:
        SystemExit: it failed and has said why: 2 for bad input, 143 for a signal, else 1.
    """
    sys.stdout.flush()
    child = subprocess.Popen(
        [sys.executable, TRAIN, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if read else None,
        text=True,
        start_new_session=True,  # else a terminal's Ctrl-C would reach it beside the signal below
        preexec_fn=die_with_parent,
    )
    try:
        told, _ = child.communicate()
    except BaseException:  # a signal's, most likely
        child.terminate()
        child.wait()
        raise
    code = child.returncode
    if code not in (0, 2, 143, -signal.SIGTERM):
        print(f"train.py {arguments[0]} ended with code {code}; the same command goes on from there", file=sys.stderr)
    if code:
        raise SystemExit({2: 2, 143: 143, -signal.SIGTERM: 143}.get(code, 1))
    return told


class Iterations:
    """The stages of an iteration, each of which does nothing where its output lies there.

    Args:
        args: the driver's arguments.
        rest: those for train.py.

    Raises:
        InputError: they do not go together, or not with what lies under --out.
    """

    def __init__(self, args: argparse.Namespace, rest: list[str]):
        self.args, self.rest, self.served = args, rest, None
        config = yaml.safe_load(train("fit", *rest, "--print_config", read=True))
        self.policy, self.data = config["model"]["policy"], config["data"]
        self.curation = self._check(config)
        self.out = args.out or Path("{save_dir}/{name}-iterated".format(**config["trainer"]["logger"]["init_args"]))
        check_folder("--out", self.out)
        self._remember(config)

    def _check(self, config: dict[str, Any]) -> Curation:
        """What the driver needs of the configuration; the rest is checked by the stages."""
        args, samples = self.args, self.data["samples"]
        parser = jsonargparse.ArgumentParser()
        parser.add_argument("task", type=Task)
        task = parser.instantiate(parser.parse_object({"task": config["model"]["task"]})).task
        for name in ("test", "problems"):
            if not self.data[name]:
                raise InputError(f"data.{name} is not set; topr.iterate needs data.test and data.problems")
            try:
                task.problems(self.data[name])  # as a mistake in the latter would be found after the first test
            except InputError as error:
                raise InputError(f"data.{name}: {error}") from error
        logger, sampler = config["trainer"]["logger"], config["model"]["sampler"] or {}
        one = isinstance(logger, dict) and logger["class_path"].endswith("TensorBoardLogger")
        if not one or config["trainer"]["fast_dev_run"]:
            raise InputError(
                "each fit needs a folder: give one logger, a TensorBoardLogger, and no trainer.fast_dev_run"
            )
        if "ServerSampler" in sampler.get("class_path", "") and not args.before_sampling:
            raise InputError(
                "model.sampler is a ServerSampler, but each iteration samples from another policy: give "
                "--before-sampling COMMAND, which puts the one in $POLICY on the server, or sample in process"
            )
        args.pool = args.pool or samples
        if args.curate != "share" and args.budget is None:
            args.budget = samples
        if args.budget and args.budget > args.pool:
            raise InputError(f"--budget {args.budget} is more than the {args.pool} responses sampled; raise --pool")
        return Curation(args.curate, args.budget, args.share, args.total)

    def _remember(self, config: dict[str, Any]) -> None:
        """Keep what was asked for, or compare with what was."""
        names = ("iterations", "seed", "curate", "pool", "budget", "share", "total")
        now = {f"--{name}": getattr(self.args, name) for name in names} | flat(config)
        path = self.out / "iterate.json"
        try:
            before = json.loads(path.read_text()) if path.exists() else now
            raised = before["--iterations"] < now["--iterations"]
            changed = [key for key in before | now if before.get(key) != now.get(key) and not key.startswith(FREE)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} does not say what was begun there; name another --out") from error
        begun = any(self.out.glob("iteration_*"))  # a command that made nothing may be mended
        for key in changed:
            if begun and (key != "--iterations" or not raised):
                raise InputError(
                    f"{self.out} was begun with {key} = {before.get(key)!r:.80}, now it is {now.get(key)!r:.80}; give "
                    "the command as it was (--iterations may be raised), or another --out"
                )
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(now, indent=2) + "\n")

    def folder(self, i: int) -> Path:
        return self.out / f"iteration_{i}"

    def sample(self, policy: str, seed: int, problems: str, samples: int, out: Path) -> None:
        """Responses of a policy in a folder."""
        if self.args.before_sampling and self.served != policy:
            known = str(Path(policy).absolute()) if Path(policy).exists() else policy
            code = subprocess.run(self.args.before_sampling, shell=True, env=os.environ | {"POLICY": known}).returncode
            if code:
                raise InputError(f"--before-sampling ended with code {code} for the policy {known}; mend it")
            self.served = policy
        keys = {"model.policy": policy, "seed_everything": seed, "data.out": out}
        keys |= {"data.problems": problems, "data.samples": samples}
        train("predict", *self.rest, *(f"--{key}={value}" for key, value in keys.items()))

    def test(self, i: int, policy: str) -> dict[str, Any]:
        """What `measure` says of a policy's responses to data.test."""
        path = self.folder(i) / "test.json"
        if not path.exists():
            seed = SEEDS * self.args.seed + SEEDS - 1  # the same for every policy
            self.sample(policy, seed, self.data["test"], self.data["samples"], self.folder(i) / "test")
            with atomic(path) as temporary:
                temporary.write_text(json.dumps(measure(self.folder(i) / "test")) + "\n")
        return json.loads(path.read_text())

    def choose(self, i: int, policy: str) -> dict[str, Any]:
        """Sample the training problems and write train.parquet: what `curate` says of it."""
        path, folder, seed = self.folder(i) / "train.parquet", self.folder(i) / "samples", SEEDS * self.args.seed + i
        if not path.exists():
            self.sample(policy, seed, self.data["problems"], self.args.pool, folder)
            files = [str(part) for part in sorted(folder.glob("part-*.parquet"))]
            if not files:
                raise InputError(f"{folder} holds no responses to train on; look at the sampler's warnings")
            print(tell(curate(files, path, replace(self.curation, seed=seed), iteration=i)))
        return read_metadata(path)["sampling"]["curation"]

    def fit(self, i: int, policy: str) -> Path:
        """Train a policy on train.parquet: the folder of the run."""
        folder, logger = self.folder(i), "trainer.logger.init_args"
        keys = {"model.policy": policy, "seed_everything": SEEDS * self.args.seed + i, "ckpt_path": "last"}
        keys |= {"data.train": folder / "train.parquet", "data.test": "null"}
        keys |= {f"{logger}.save_dir": folder, f"{logger}.name": "fit"}

        def done() -> list[Path]:
            return sorted(folder.glob("fit/version_*/summary.json"))

        if not done():
            train("fit", *self.rest, *(f"--{key}={value}" for key, value in keys.items()))
        return done()[0].parent


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by their dotted keys."""
    found = {}
    for key, inner in value.items():
        found |= flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) and inner else {f"{prefix}{key}": inner}
    return found


def run(args: argparse.Namespace, rest: list[str]) -> None:
    iterations = Iterations(args, rest)
    policy, updates, tests, rows = iterations.policy, 0, [], []
    for i in range(args.iterations + 1):
        print(f"\niteration {i} of {args.iterations}: {policy}")
        tests.append(iterations.test(i, policy))
        row = {"iteration": i, "policy": policy, "updates": updates, **summary(tests, args.seed)}
        print(f"pass@1 {cell(row['pass@1'])}, invalid {cell(row['invalid'])}")
        last = i == args.iterations
        row["curation"] = None if last else iterations.choose(i, policy)
        version = None if last else iterations.fit(i, policy)
        rows.append(row)
        tested = (iterations.folder(i) / "test.json").stat().st_mtime
        write_events(iterations.out / "tensorboard", row, tested, version)
        write_results(iterations.out, rows)
        if version:
            policy = str(version / "policy")
            updates += json.loads((version / "summary.json").read_text())["steps"]
    print(f"\n{table(rows)}\nwrote results.json, results.md, results.png and tensorboard/ under {iterations.out}")


def main() -> None:
    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with command():
        run(*parse())


if __name__ == "__main__":
    main()
