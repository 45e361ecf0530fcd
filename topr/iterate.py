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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.commands import ArgumentParser, command
from topr.distributed import die_with_parent
from topr.evaluation import per_problem, read_parts, summarise
from topr.evaluation.report import write_report
from topr.identity import content_hash, data_hash, policy_hash
from topr.io import InputError, check_folder, lock, write_text
from topr.policy import resolve_policy
from topr.runs import DECISIVE, setting
from topr.trajectories import Trajectory, read_metadata
from topr.trajectories.curate import Way, curate

TRAIN = str(Path(__file__).parent.parent / "train.py")
LOGGER = "--trainer.logger.init_args"
# arguments of train.py that every iteration sets anew
NOT_ALLOWED = ("--data.train", "--data.out", "--seed_everything", "--ckpt_path", "--trainer.logger")


def train(*arguments: str, capture: bool = False) -> str:
    """Run train.py in a process that ends before this one does.

    Returns:
        what it prints, with `capture`.

    Raises:
        SystemExit: it failed and has printed why.
    """
    sys.stdout.flush()
    with subprocess.Popen(
        [sys.executable, TRAIN, *arguments],
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
        raise SystemExit(process.returncode if process.returncode in (2, 143) else 1)
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
        config = self.load_config()
        out = self.prepare(config)
        policy = config["model"]["policy"]
        data = config["data"]
        tests: list[pd.DataFrame] = []
        rows: list[dict[str, Any]] = []
        for number in range(self.iterations + 1):
            folder = out / f"iteration_{number}"
            seed = 1000 * self.seed + 999  # of every test
            self.predict(policy, folder / "test", seed, data["test"], data["samples"])
            tests.append(by_problem(read_parts(folder / "test")))
            rows.append({"policy": policy} | compare(tests, self.seed))
            if number < self.iterations:
                seed = 1000 * self.seed + number
                self.predict(
                    policy, folder / "samples", seed, data["problems"], self.pool or data["samples"]
                )
                options = self.curation | {"seed": seed, "iteration": number}
                rows[-1]["curation"] = select(folder, options)
                policy = str(self.fit(policy, folder, seed) / "policy")
            labelled = {f"iteration {place}": row for place, row in enumerate(rows)}
            text = write_report(out, {"iterations": rows}, labelled)
            print(f"\n{text}\nwrote results.json, results.md and results.png under {out}")

    def prepare(self, config: dict[str, Any]) -> Path:
        """Set what depends on the configuration; the folder to write, free for this command."""
        samples = config["data"]["samples"]
        if self.curate != "share":
            self.budget = self.budget or samples
        elif self.share is None:
            raise InputError("share needs --share")
        self.curation: dict[str, Any] = {"way": self.curate, "budget": self.budget}
        self.curation |= {"share": self.share, "total": self.total}
        logger = config["trainer"]["logger"]["init_args"]
        out = self.out or Path(logger["save_dir"], f"{logger['name']}-iterated")
        check_folder("--out", out)
        lock(out)
        check_same(out, config, self.curation, self.seed, self.pool or samples)
        return out

    def load_config(self) -> dict[str, Any]:
        """The configuration of train.py."""
        for argument in self.rest:
            if argument.startswith(NOT_ALLOWED):
                message = f"{argument} cannot be given: topr.iterate sets what differs by iteration"
                raise InputError(f"{message}, from --out and --seed")
        config = yaml.safe_load(train("fit", *self.rest, "--print_config", capture=True))
        if "ServerSampler" in str(config["model"]["sampler"]) and not self.before_sampling:
            message = "a ServerSampler needs --before-sampling COMMAND"
            raise InputError(f"{message}, which puts the policy in $POLICY on the server")
        return config

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

    def fit(self, policy: str, folder: Path, seed: int) -> Path:
        """Train a policy on train.parquet; the folder of the run."""
        run = folder / "fit" / "version_0"
        if not (run / "summary.json").exists():
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
        return run


def select(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Write train.parquet, a selection of the samples in a folder; figures of it."""
    chosen = folder / "train.parquet"
    if not chosen.exists():
        files = sorted(map(str, (folder / "samples").glob("part-*.parquet")))
        curate(files=files, out=chosen, **options)
    return read_metadata(chosen)["sampling"]["curation"]


def check_same(out: Path, config: dict[str, Any], *own: Any) -> None:
    """Keep a hash of what decides the results in iterate.json; an InputError if the folder holds
    results of another command."""
    keys = [*DECISIVE, "trainer.max_epochs", "data.samples", "data.sampling"]
    decisive = [setting(config, key) for key in keys]
    decisive.append(policy_hash(config["model"]["policy"]))
    for problems in (config["data"]["test"], config["data"]["problems"]):
        decisive.append(data_hash([problems]) if os.path.isfile(problems) else problems)
    now = {"settings": content_hash(decisive, own)}
    path = out / "iterate.json"
    if any(out.glob("iteration_*")) and json.loads(path.read_text()) != now:
        message = f"{out} holds results of other settings, or of changed files"
        raise InputError(f"{message}; give the same command, or another --out")
    write_text(path, json.dumps(now) + "\n")


def by_problem(test: list[Trajectory]) -> pd.DataFrame:
    """Metrics of each problem, by its id."""
    ids = dict.fromkeys(trajectory.prompt_id for trajectory in test)
    return pd.DataFrame(per_problem(test), index=list(ids))


def compare(tests: list[pd.DataFrame], seed: int) -> dict[str, Any]:
    """Metrics of the last test, and its differences to the first and the previous one."""
    last = tests[-1]
    row = {"problems": len(last)} | summarise(last, seed)
    if len(tests) > 1:
        for name, other in (("first", tests[0]), ("previous", tests[-2])):
            # of the problems and metrics in both: a server may have dropped responses
            paired = (last - other).dropna(axis=1, how="all").dropna().sort_index()
            row[f"difference_to_{name}"] = summarise(paired, seed)
    return row


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
