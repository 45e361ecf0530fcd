"""Sample, curate, train, and again with the new policy; every policy on the way is tested.

python -m topr.iterate --config configs/arithmetic.yaml --iterations 4

All other arguments go to train.py (those of fit). Sampling and training are processes of it. The
output of each step is complete or absent, so that the same command resumes a killed one.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.distributed import die_with_parent
from topr.evaluation import per_problem, read_parts, summarise
from topr.evaluation.report import write_report
from topr.identity import data_hash, policy_hash
from topr.io import ArgumentParser, InputError, check_folder, command, lock, write_text
from topr.policy import resolve_policy
from topr.trajectories import Trajectory, read_metadata
from topr.trajectories.curate import Curation, Way, curate

TRAIN = str(Path(__file__).parent.parent / "train.py")
LOGGER = "--trainer.logger.init_args"
# arguments of train.py that every iteration sets anew, or that leave no policy behind
NOT_ALLOWED = (
    "--data.train",
    "--data.out",
    "--seed_everything",
    "--ckpt_path",
    "--print_config",
    "--trainer.logger",
    "--trainer.fast_dev_run",
)
# beginnings of the settings that decide where train.py runs, not what it computes
MAY_CHANGE = (
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.enable_progress_bar",
    "model.sampler",
    "model.threads",
    "model.compile",
    "model.activation_checkpointing",
    "model.reshard_after",
    "data.microbatch_tokens",
    "data.num_workers",
)


def train(*arguments: str, capture: bool = False) -> str:
    """Run train.py in a process that ends before this one does.

    Returns:
        what it prints, with `capture`.

    Raises:
        SystemExit: it failed and has printed why; 2 for bad input, 143 for a signal, else 1.
    """
    sys.stdout.flush()
    with subprocess.Popen(
        [sys.executable, TRAIN, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        preexec_fn=die_with_parent,
        start_new_session=True,  # Ctrl-C reaches it once: by the signal below
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:  # most likely a signal's
            process.terminate()  # leaving the block waits for its end
            raise
    if process.returncode:
        known = {2: 2, 143: 143, -signal.SIGTERM: 143}
        raise SystemExit(known.get(process.returncode, 1))
    return output


@dataclass
class Driver:
    """Sample, curate, train and test, several times over. A complete step is not repeated.

    Args:
        rest: arguments of train.py
        iterations: times to sample and train
        out: folder to write; by default the logger's, its name with -iterated
        seed: of everything that is random
        curate: what to train on, see python -m topr.trajectories curate
        budget: trajectories of each problem to train on; data.samples by default
        share: of positives to train on, for share
        total: trajectories to train on, for share
        pool: responses to each training problem; data.samples by default
        before_sampling: shell command that puts the policy whose folder is in $POLICY on the
            servers of a ServerSampler
    """

    rest: list[str]
    iterations: PositiveInt = 4
    out: Path | None = None
    seed: NonNegativeInt = 0
    curate: Way = "uniform"
    budget: PositiveInt | None = None
    share: OpenUnitInterval | None = None
    total: PositiveInt | None = None
    pool: PositiveInt | None = None
    before_sampling: str = ""
    served = ""  # the policy that a `ServerSampler` has

    def run(self) -> None:
        """Iterate, and report after each iteration."""
        config = load_config(self.rest, self.before_sampling)
        out = self.prepare(config)
        data = config["data"]
        policy = config["model"]["policy"]
        updates = 0
        tests = []
        rows = {}
        for number in range(self.iterations + 1):
            folder = out / f"iteration_{number}"
            seed = 1000 * self.seed + 999  # of every test
            self.predict(policy, folder / "test", seed, data["test"], data["samples"])
            tests.append(read_parts(folder / "test"))
            row = {"iteration": number, "policy": policy, "updates": updates}
            row |= compare(tests, self.seed)
            if number < self.iterations:
                seed = 1000 * self.seed + number
                row["curation"] = self.select(policy, folder, seed, data["problems"], number)
                run = self.fit(policy, folder, seed)
                policy = str(run / "policy")
                updates += json.loads((run / "summary.json").read_text())["steps"]
            rows[str(number)] = row
            text = write_report(out, {"iterations": list(rows.values())}, {out.name: rows})
            print(f"\n{text}\nwrote results.json, results.md and results.png under {out}")

    def prepare(self, config: dict[str, Any]) -> Path:
        """Set what depends on the configuration; the folder to write, free for this command."""
        samples = config["data"]["samples"]
        self.pool = self.pool or samples
        if self.curate != "share":
            self.budget = self.budget or samples
        self.curation = Curation(self.curate, self.budget, self.share, self.total)
        logger = config["trainer"]["logger"]["init_args"]
        out = self.out or Path(logger["save_dir"], f"{logger['name']}-iterated")
        check_folder("--out", out)
        lock(out)
        own = {"iterations": self.iterations, "seed": self.seed, "pool": self.pool}
        check_settings(out, asdict(self.curation) | own | contents(config))
        return out

    def predict(self, policy: str, out: Path, seed: int, problems: str, samples: int) -> None:
        """Sample responses to problems into a folder of trajectory files."""
        if out.exists():
            return
        if self.before_sampling and self.served != policy:
            environment = os.environ | {"POLICY": str(resolve_policy(policy).absolute())}
            if subprocess.run(self.before_sampling, shell=True, env=environment).returncode:
                raise InputError(f"--before-sampling failed for the policy {policy}")
            self.served = policy
        partial = out.with_suffix(".partial")
        train(
            "predict",
            *self.rest,
            f"--model.policy={policy}",
            f"--seed_everything={seed}",
            f"--data.problems={problems}",
            f"--data.samples={samples}",
            f"--data.out={partial}",
        )
        partial.rename(out)

    def select(self, policy: str, folder: Path, seed: int, problems: str, number: int) -> dict:
        """Write train.parquet, a selection of responses to training problems; figures of it."""
        chosen = folder / "train.parquet"
        if not chosen.exists():
            self.predict(policy, folder / "samples", seed, problems, self.pool)
            files = sorted(map(str, (folder / "samples").glob("part-*.parquet")))
            curate(files, chosen, replace(self.curation, seed=seed), iteration=number)
        return read_metadata(chosen)["sampling"]["curation"]

    def fit(self, policy: str, folder: Path, seed: int) -> Path:
        """Train a policy on train.parquet; the folder of the run."""
        summaries = "fit/version_*/summary.json"
        if not any(folder.glob(summaries)):
            train(
                "fit",
                *self.rest,
                f"--model.policy={policy}",
                f"--seed_everything={seed}",
                f"--data.train={folder / 'train.parquet'}",
                "--data.test=null",  # `predict` tests
                f"{LOGGER}.save_dir={folder}",
                f"{LOGGER}.name=fit",
                "--ckpt_path=last",
            )
        return next(folder.glob(summaries)).parent


def load_config(rest: list[str], before_sampling: str) -> dict[str, Any]:
    """The configuration of train.py; an InputError for what would otherwise go wrong unnoticed."""
    for argument in rest:
        if argument.startswith(NOT_ALLOWED):
            message = f"{argument} cannot be given: topr.iterate sets what differs by iteration"
            raise InputError(f"{message}, from --out and --seed")
    config = yaml.safe_load(train("fit", *rest, "--print_config", capture=True))
    if "ServerSampler" in str(config["model"]["sampler"]) and not before_sampling:
        message = "a ServerSampler needs --before-sampling COMMAND"
        raise InputError(f"{message}, which puts the policy in $POLICY on the server")
    return config


def contents(config: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted keys, with hashes of the policy and the problems in place of names."""
    settings = pd.json_normalize(config).to_dict("records")[0]
    settings["model.policy"] = policy_hash(settings["model.policy"])
    for key in ("data.test", "data.problems"):
        files = sorted(glob(str(settings[key])))
        if files:  # else it is a hub data set, which keeps its name
            settings[key] = data_hash(files)
    return settings


def check_settings(out: Path, now: dict[str, Any]) -> None:
    """Keep the settings in iterate.json; an InputError if the folder holds results of others."""
    path = out / "iterate.json"
    if any(out.glob("iteration_*")):
        before = json.loads(path.read_text())
        # it may be raised
        before["iterations"] = max(before["iterations"], now["iterations"])
        for key in before | now:
            if before.get(key) != now.get(key) and not key.startswith(MAY_CHANGE):
                change = f"{key} = {before.get(key)!r:.80}, now it is {now.get(key)!r:.80}"
                message = f"{out} holds results with {change}"
                raise InputError(f"{message}; give the same command, or another --out")
    write_text(path, json.dumps(now, indent=2) + "\n")


def compare(tests: list[list[Trajectory]], seed: int) -> dict[str, Any]:
    """Metrics of the last test, and its differences to the first and the previous one."""
    last = by_problem(tests[-1])
    row: dict[str, Any] = {"problems": len(last), "samples": len(tests[-1]) // len(last)}
    row |= summarise(columns(last), seed)
    if len(tests) > 1:
        for name, other in (("first", tests[0]), ("previous", tests[-2])):
            # of the problems and metrics in both: a server may have dropped responses
            paired = (last - by_problem(other)).dropna(axis=1, how="all").dropna().sort_index()
            row[f"difference_to_{name}"] = summarise(columns(paired), seed)
    return row


def by_problem(test: list[Trajectory]) -> pd.DataFrame:
    """Metrics of each problem, by its id."""
    ids = dict.fromkeys(trajectory.prompt_id for trajectory in test)
    return pd.DataFrame(per_problem(test), index=list(ids))


def columns(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    return {name: frame[name].to_numpy() for name in frame}


def parse() -> Driver:
    """The driver with its own arguments, and in `rest` all others, in their order."""
    parser = ArgumentParser(prog="python -m topr.iterate", description=__doc__)
    parser.add_class_arguments(Driver, as_group=False, skip={"rest"})
    own: list[str] = []
    rest: list[str] = []
    taken = rest
    for argument in sys.argv[1:]:
        if argument.startswith("--"):  # else it is the value of the argument before
            name = argument.partition("=")[0]
            taken = own if name in parser._option_string_actions else rest
        taken.append(argument)
    return Driver(rest, **vars(parser.parse_args(own)))


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(143))
    with command():
        parse().run()


if __name__ == "__main__":
    main()
