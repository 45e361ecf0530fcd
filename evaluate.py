"""Evaluate policies on benchmarks: `python evaluate.py --policy runs/x/version_0/policy --benchmark arithmetic`."""

import gc
import hashlib
import json
import os
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt

from topr.distributed import Progress, end_with_parent, gather, rank
from topr.evaluation import (
    SamplingJob,
    check_prompts,
    explain_out_of_memory,
    per_problem,
    summarise,
)
from topr.evaluation.pipeline import BENCHMARKS, find_benchmark, read_parts
from topr.evaluation.report import write_report
from topr.io import ArgumentParser, InputError, check_folder, command
from topr.policy import load_policy, load_tokenizer, own_device
from topr.sampling import LocalSampler, Sampling, Stop
from topr.trajectories import Trajectory, agreed, write_trajectories


def evaluate(
    policy: list[str],
    benchmark: list[str],
    sampling: dict[str, Any],
    k: list[PositiveInt],
    samples: PositiveInt = 16,
    verifier: str | None = None,
    critiques: PositiveInt = 4,
    out: Path = Path("results"),
    seed: NonNegativeInt = 0,
    rows: PositiveInt | None = None,
    microbatch_tokens: PositiveInt = 16384,
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    if torch.cuda.is_available()
    else "32-true",
    devices: PositiveInt | None = None,
) -> None:
    """Sample, grade and tabulate, with 95% bootstrap intervals over problems.

    Args:
        sampling: parameters in place of the benchmark's.
        samples: responses per problem.
        verifier: policy that weighs the votes of weighted@k.
        critiques: of the verifier, per response.
        out: folder to write.
        seed: of sampling and of the intervals.
        rows: responses generated side by side; by default as many as fit, at most 512.
        microbatch_tokens: tokens of one scoring forward.
        precision: of sampling and scoring; by default bf16-mixed on a GPU.
        devices: processes that share the problems; by default all GPUs, or one CPU process.
    """
    if max(k) > samples:
        raise InputError(
            f"--k {max(k)} is more than the --samples {samples} of each problem; raise --samples"
        )
    check_folder("--out", out)
    jobs = {}
    for one, argument in product(policy, benchmark):
        name, _, file = argument.partition("=")
        task, default, judge = find_benchmark(name)
        if not (source := file or default):
            raise InputError(
                f"--benchmark {name} has no problems of its own; give a file of them: {name}=FILE"
            )
        if verifier and judge is None:
            raise InputError(f"--benchmark {name} has no verifier; leave --verifier out")
        if (one, name) in jobs:
            raise InputError(
                f"the policy {one} on the benchmark {name} is asked for twice; give each name once"
            )
        problems, parameters = task.problems(source), replace(task.sampling, **sampling)
        check_prompts(one, task, problems, parameters)
        jobs[one, name] = SamplingJob(one, task, problems, samples, parameters, seed, precision)
    if verifier:
        load_tokenizer(verifier)
    count = devices or max(1, torch.cuda.device_count())
    if count > 1 or int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1))) > 1:
        from lightning.fabric import Fabric

        nodes = int(
            os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_NNODES", 1))
        )  # the former is torchrun's
        # starts a process for each device, or joins those that torchrun or SLURM started
        Fabric(devices=count, num_nodes=nodes, strategy="ddp").launch()

    def responses(name: str, job: SamplingJob) -> list[Trajectory]:
        """Those that lie under --out/responses; what is missing there is sampled, the files shared among ranks."""
        digest = hashlib.sha256(json.dumps(job.metadata, sort_keys=True).encode()).hexdigest()[:12]
        folder = out / "responses" / f"{name}-{digest}"
        missing = gather(
            job.missing_parts(folder)
        )  # rank 0's: another rank may have looked later, and found more
        if mine := missing[0][rank() :: len(missing)]:
            gc.collect()  # the policy before may be held by reference cycles
            with own_device():
                model = load_policy(job.policy)
        if mine and rank() == 0:
            print(f"{job.policy} on {name}:", flush=True)
        sampler = LocalSampler(rows)
        with Progress(
            "sampling", job.samples * sum(len(problems) for _, problems in mine)
        ) as sampler.progress:
            for path, problems in mine:
                activity = f"{job.samples} responses to each of {len(problems)} problems"
                remedy = f"--rows, now {rows or 'automatic'}, or --microbatch-tokens, now {microbatch_tokens}"
                bfloat16 = torch.autocast(
                    model.device.type, torch.bfloat16, precision == "bf16-mixed"
                )
                with bfloat16, explain_out_of_memory(activity, remedy):
                    job.sample_part(path, problems, sampler, model, microbatch_tokens)
        gather(None)  # until every rank has written its files
        return read_parts(folder)

    def weights(name: str, verifier: str, candidates: list[Trajectory]) -> list[float]:
        task: Any = find_benchmark(name)[2]
        longest = sampling.get("max_new_tokens", task.sampling.max_new_tokens)
        problems, parameters = (
            task.candidates(candidates),
            replace(task.sampling, max_new_tokens=longest),
        )
        check_prompts(verifier, task, problems, parameters)
        job = SamplingJob(verifier, task, problems, critiques, parameters, seed, precision)
        found = responses(f"{name}-verifier", job)
        return [
            task.weight(found[start : start + critiques])
            for start in range(0, len(found), critiques)
        ]

    sampled = {key: responses(key[1], job) for key, job in jobs.items()}
    weighed = {key: weights(key[1], verifier, found) for key, found in sampled.items() if verifier}
    if rank():
        return
    values = {key: per_problem(found, k, weighed.get(key, ())) for key, found in sampled.items()}
    results: dict[str, dict[str, Any]] = {one: {} for one in policy}
    for (one, name), columns in values.items():
        results[one][name] = {
            "problems": len(columns["pass@1"]),
            "samples": samples,
            **summarise(columns, seed),
        }
        if one != policy[0]:  # the problems are the same: differences are paired
            paired = {
                metric: columns[metric] - values[policy[0], name][metric] for metric in columns
            }
            results[one][name]["difference"] = summarise(paired, seed)
        for trajectory in sampled[one, name]:
            trajectory.group = f"{one}/{name}/{trajectory.prompt_id}"
    metadata = agreed([job.metadata for job in jobs.values()])
    write_trajectories(out / "responses.parquet", chain(*sampled.values()), metadata)
    text = write_report(out, results, results)
    print(f"{text}\nwrote results.json, results.md, results.png and responses.parquet under {out}")


def main() -> None:
    end_with_parent()
    Progress.enabled = True
    parser = ArgumentParser(description="Sample, grade and tabulate, with 95% bootstrap intervals.")
    parser.add_argument("--config", action="config", help="YAML file of the same keys")
    parser.add_argument("--policy", nargs="+", required=True, help="folders or hub names")
    about = f"{', '.join(BENCHMARKS)}, or a task's class path; FILE, or a hub data set, replaces its problems"
    parser.add_argument("--benchmark", nargs="+", required=True, metavar="NAME[=FILE]", help=about)
    parser.add_argument(
        "--k", nargs="+", type=PositiveInt, help="of pass@k and maj@k (default: the samples)"
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="the likeliest token each time, one response a problem",
    )
    parser.add_argument("--stop", nargs="*", type=Stop, help="texts that end a response")
    names = [*parser.add_class_arguments(Sampling, as_group=False, skip={"stop"}), "stop"]
    parser.set_defaults(dict.fromkeys(names))  # the benchmark's
    parser.add_function_arguments(
        evaluate, as_group=False, skip={"policy", "benchmark", "k", "sampling"}
    )
    with command():
        args = vars(parser.parse_args())
        del args["config"]
        args |= {
            key: [args[key]] for key in ("policy", "benchmark") if isinstance(args[key], str)
        }  # in YAML
        if args.pop("greedy"):
            args |= {"temperature": 0.0, "samples": 1}
        sampling = {name: value for name in names if (value := args.pop(name)) is not None}
        evaluate(**args | {"sampling": sampling, "k": sorted(set(args["k"] or [args["samples"]]))})


if __name__ == "__main__":
    main()
