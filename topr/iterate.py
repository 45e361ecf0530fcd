"""Sample, curate, train, and again with the new policy; every policy on the way is tested.

python -m topr.iterate --config configs/arithmetic.yaml --iterations 4

Every stage is a process of train.py, which gets all other arguments (those of fit). Its output is complete or absent,
so that the same command resumes a killed one.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from jsonargparse.typing import NonNegativeInt, PositiveInt

from topr.distributed import die_with_parent
from topr.evaluation import group_by_problem, per_problem, read_parts, summarise
from topr.evaluation.report import cell, write_report
from topr.io import ArgumentParser, InputError, check_folder, command, lock, write_text
from topr.trajectories import Trajectory, read_metadata
from topr.trajectories.curate import Curation, Way
from topr.trajectories.curate import curate as write_curated

TRAIN = str(Path(__file__).parent.parent / "train.py")
LOGGER = "trainer.logger.init_args"
SET_HERE = (
    "--data.train",
    "--data.out",
    "--seed_everything",
    "--ckpt_path",
    "--print_config",
    "--trainer.logger",
)
# what decides where a command runs, not what it computes
MAY_CHANGE: tuple[str, ...] = (
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "enable_progress_bar",
    "sampler",
)
MAY_CHANGE += (
    "threads",
    "compile",
    "activation_checkpointing",
    "reshard_after",
    "microbatch_tokens",
    "num_workers",
)


def train(stage: str, rest: list[str], given: dict[str, Any], read: bool = False) -> str:
    """Run a stage of train.py in a process that ends before this one does; what it prints, if `read`.
    Raises SystemExit if it fails, having printed why: 2 for bad input, 143 for a signal, else 1."""
    sys.stdout.flush()
    with subprocess.Popen(
        [sys.executable, TRAIN, stage, *rest, *(f"--{key}={value}" for key, value in given.items())],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if read else None, text=True, preexec_fn=die_with_parent,
        start_new_session=True,  # else Ctrl-C in a terminal would reach it in addition to the signal below
    ) as child:  # fmt: skip
        try:
            output, _ = child.communicate()
        except BaseException:  # a signal, most likely
            child.terminate()
            raise
    code = {0: 0, 2: 2, 143: 143, -signal.SIGTERM: 143}.get(child.returncode, 1)
    if code == 1:
        print(
            f"train.py {stage} ended with code {child.returncode}; the same command resumes there",
            file=sys.stderr,
        )
    if code:
        raise SystemExit(code)
    return output


def load_config(rest: list[str], before_sampling: str | None) -> dict[str, Any]:
    """The configuration of train.py; an InputError for what would otherwise fail late, or not at all."""
    for argument in rest:
        if argument.startswith(SET_HERE):
            raise InputError(
                f"{argument.partition('=')[0]} is set anew for each iteration; give --out and --seed"
            )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # by torchrun
        raise InputError(
            "start topr.iterate once and not on every rank: train.py starts the processes of this node"
        )
    config = yaml.safe_load(train("fit", rest, {"print_config": ""}, read=True))
    data, model, trainer = config["data"], config["model"], config["trainer"]
    if "TensorBoardLogger" not in str(trainer["logger"]) or trainer["fast_dev_run"]:
        raise InputError(
            "each fit needs a folder: give one TensorBoardLogger, and no trainer.fast_dev_run"
        )
    if "ServerSampler" in str(model["sampler"]) and not before_sampling:
        raise InputError(
            "a ServerSampler needs --before-sampling COMMAND, which puts the one in $POLICY on the server"
        )
    if not (data["test"] and data["problems"]):
        raise InputError("data.test or data.problems is not set; topr.iterate needs both")
    return config


def check_settings(out: Path, now: dict[str, Any]) -> None:
    """Compare the settings with those of the results in a folder, and keep them in iterate.json."""
    path = out / "iterate.json"
    before = json.loads(path.read_text()) if any(out.glob("iteration_*")) else now
    for key in before | now:
        raised = key == "--iterations" and now[key] > before[key]
        if (
            before.get(key) != now.get(key)
            and not raised
            and not key.partition(".")[2].startswith(MAY_CHANGE)
        ):
            change = f"{key} = {before.get(key)!r:.80}, now it is {now.get(key)!r:.80}"
            raise InputError(
                f"{out} holds results with {change}; give the same command, or another --out"
            )
    write_text(path, json.dumps(now, indent=2) + "\n")


def iterate(
    rest: list[str],  # arguments of train.py
    selection: dict[
        str, Any
    ],  # budget (data.samples by default), share and total of the `Curation`
    iterations: PositiveInt = 4,
    out: Path | None = None,
    seed: NonNegativeInt = 0,
    curate: Way = "uniform",
    pool: PositiveInt | None = None,
    before_sampling: str | None = None,
) -> None:
    """Sample, curate, train and test, several times over.

    Args:
        iterations: times to sample and train
        out: folder to write; by default the logger's, its name with -iterated
        seed: of everything that is random
        curate: what to train on, see python -m topr.trajectories curate
        pool: responses to each training problem; data.samples by default
        before_sampling: shell command that puts the policy whose folder is in $POLICY on the servers of a ServerSampler
    """
    config = load_config(rest, before_sampling)
    policy, data, logger = (
        config["model"]["policy"],
        config["data"],
        config["trainer"]["logger"]["init_args"],
    )
    pool = pool or data["samples"]
    if curate != "share":
        selection["budget"] = selection["budget"] or data["samples"]
        if selection["budget"] > pool:
            raise InputError(
                f"--budget {selection['budget']} is more than the {pool} responses sampled; raise --pool"
            )
    curation = Curation(curate, **selection)
    overlays = [
        path.stem for path in map(Path, rest) if path.parent.name == "loss"
    ]  # as train.py names its runs
    out = out or Path(
        logger["save_dir"], "-".join(filter(None, [logger["name"], *overlays[-1:], "iterated"]))
    )
    check_folder("--out", out)
    lock(out)
    own = {"--iterations": iterations, "--seed": seed, "--curate": curate, "--pool": pool}
    own |= {f"--{name}": value for name, value in selection.items()}
    check_settings(out, own | pd.json_normalize(config).to_dict("records")[0])  # by dotted key
    served = None

    def sample(folder: Path, seed: int, problems: str, samples: int) -> None:
        nonlocal served
        if folder.exists():
            return
        if before_sampling and served != policy:
            name = str(Path(policy).absolute()) if Path(policy).exists() else policy
            if code := subprocess.run(
                before_sampling, shell=True, env=os.environ | {"POLICY": name}
            ).returncode:
                raise InputError(
                    f"--before-sampling ended with code {code} for the policy {name}; correct it"
                )
            served = policy
        partial = folder.with_name(f"{folder.name}.partial")
        given = {"model.policy": policy, "seed_everything": seed, "data.out": partial}
        train("predict", rest, given | {"data.problems": problems, "data.samples": samples})
        partial.rename(folder)

    updates, tests, rows = 0, [], []
    for i in range(iterations + 1):
        print(f"\niteration {i} of {iterations}: {policy}")
        folder, chosen = out / f"iteration_{i}", out / f"iteration_{i}" / "train.parquet"
        sample(
            folder / "test", 1000 * seed + 999, data["test"], data["samples"]
        )  # the same seed for every test
        tests.append(read_parts(folder / "test"))
        row = {
            "iteration": i,
            "policy": policy,
            "updates": updates,
            **compare(tests, seed),
            "curation": None,
        }
        print(f"pass@1 {cell(row['pass@1'])}, invalid {cell(row['invalid'])}")
        if i < iterations:
            here = 1000 * seed + i
            if not chosen.exists():
                sample(folder / "samples", here, data["problems"], pool)
                files = [str(path) for path in sorted((folder / "samples").glob("part-*.parquet"))]
                write_curated(files, chosen, replace(curation, seed=here), iteration=i)
            row["curation"] = read_metadata(chosen)["sampling"]["curation"]
            if not list(folder.glob("fit/version_*/summary.json")):
                given = {
                    "model.policy": policy,
                    "seed_everything": here,
                    "ckpt_path": "last",
                    "data.train": chosen,
                }
                given |= {
                    "data.test": "null",
                    f"{LOGGER}.save_dir": folder,
                    f"{LOGGER}.name": "fit",
                }
                train("fit", rest, given)
            summary = next(folder.glob("fit/version_*/summary.json"))
            policy = str(summary.parent / "policy")
            updates += json.loads(summary.read_text())["steps"]
        rows.append(row)
        text = write_report(
            out, {"iterations": rows}, {out.name: {str(row["iteration"]): row for row in rows}}
        )
    print(f"\n{text}\nwrote results.json, results.md and results.png under {out}")


def compare(tests: list[list[Trajectory]], seed: int) -> dict[str, Any]:
    """Metrics of the last of several tests, and its differences to the first and the previous, paired by problem."""
    problems = [[rows[0].prompt_id for rows in group_by_problem(test)] for test in tests]
    values = [per_problem(test) for test in tests]
    row = {
        "problems": len(problems[-1]),
        "samples": len(tests[-1]) // len(problems[-1]),
        **summarise(values[-1], seed),
    }
    for name, other in (
        {"difference_to_first": 0, "difference_to_previous": -2}.items() if len(tests) > 1 else ()
    ):
        # a server may have left out all responses to a problem
        _, here, there = np.intersect1d(problems[-1], problems[other], return_indices=True)
        both = [metric for metric in values[-1] if metric in values[other]]
        row[name] = summarise(
            {m: values[-1][m][here] - values[other][m][there] for m in both}, seed
        )
    return row


def parse() -> dict[str, Any]:
    """The arguments of `iterate`: its own, and in `rest` all others, in their order."""
    parser = ArgumentParser(prog="python -m topr.iterate", description=__doc__)
    parser.add_function_arguments(iterate, as_group=False, skip={"rest", "selection"})
    limits = parser.add_class_arguments(Curation, as_group=False, skip={"way", "seed"})
    own, rest = list[str](), list[str]()
    taken = rest
    for argument in sys.argv[1:]:
        if argument.startswith("--"):
            taken = own if argument.partition("=")[0] in parser._option_string_actions else rest
        taken.append(argument)
    args = vars(parser.parse_args(own))
    return {"rest": rest, "selection": {name: args.pop(name) for name in limits}, **args}


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(143))
    with command():
        iterate(**parse())


if __name__ == "__main__":
    main()
