"""Evaluate policies on benchmarks:

python evaluate.py --policy runs/x/version_0/policy --benchmark arithmetic
"""

import gc
import os
import sys
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from tqdm import tqdm

from topr.distributed import end_with_parent, gather, rank
from topr.evaluation.benchmarks import BENCHMARKS, find_benchmark, find_verifier
from topr.evaluation.metrics import per_problem, summarise
from topr.evaluation.pipeline import (
    SamplingJob,
    check_prompts,
    explain_out_of_memory,
    graded_text,
    read_parts,
)
from topr.evaluation.report import write_report
from topr.identity import content_hash
from topr.io import ArgumentParser, InputError, check_folder, command
from topr.policy import load_policy, load_tokenizer, own_device
from topr.sampling import LocalSampler, Sampling, Stop
from topr.tasks import Problem, Task
from topr.trajectories import Trajectory, agreed, write_trajectories

Problems = list[Problem]


@dataclass
class Evaluation:
    """Sample, grade and tabulate, with 95% bootstrap intervals over problems.

    Args:
        policy: folders or hub names; all others are compared with the first.
        benchmark: names, or NAME=FILE.
        sampling: parameters in place of the benchmark's.
        k: of pass@k and maj@k.
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

    policy: list[str]
    benchmark: list[str]
    sampling: dict[str, Any]
    k: list[PositiveInt]
    samples: PositiveInt = 16
    verifier: str | None = None
    critiques: PositiveInt = 4
    out: Path = Path("results")
    seed: NonNegativeInt = 0
    rows: PositiveInt | None = None
    microbatch_tokens: PositiveInt = 16384
    precision: Literal["32-true", "bf16-mixed"] = (
        "bf16-mixed" if torch.cuda.is_available() else "32-true"
    )
    devices: PositiveInt | None = None

    def run(self) -> None:
        """Sample what is missing, then write responses, table and figure."""
        jobs = self.find_jobs()
        launch(self.devices or max(1, torch.cuda.device_count()))
        results: dict[str, dict] = {policy: {} for policy in self.policy}
        of_first = {}  # by benchmark, what the first policy reached
        trajectories = []
        for (policy, name), job in jobs.items():
            responses = self.responses(name, job)
            weights = self.weights(name, job.task, responses)
            values = per_problem(responses, self.k, weights) | lenient(job, responses)
            row = {"problems": len(job.problems), "samples": job.samples}
            row |= summarise(values, self.seed)
            first = of_first.setdefault(name, values)
            if policy != self.policy[0]:
                paired = {metric: values[metric] - first[metric] for metric in values}
                row["difference"] = summarise(paired, self.seed)
            results[policy][name] = row
            for trajectory in responses:
                trajectory.group = f"{policy}/{name}/{trajectory.prompt_id}"
            trajectories += responses
        if rank() == 0:
            metadata = agreed([job.metadata for job in jobs.values()])
            write_trajectories(self.out / "responses.parquet", trajectories, metadata)
            print(write_report(self.out, results, results))
            print(f"wrote results.json, .md, .png and responses.parquet under {self.out}")

    def find_jobs(self) -> dict[tuple[str, str], SamplingJob]:
        """What to sample, by policy and benchmark.

        Raises:
            InputError: for what cannot be sampled or written.
        """
        if max(self.k) > self.samples:
            message = f"--k {max(self.k)} is more than the --samples {self.samples} of each problem"
            raise InputError(f"{message}; raise --samples")
        check_folder("--out", self.out)
        if self.verifier:
            load_tokenizer(self.verifier)
        jobs = {}
        for policy, argument in product(self.policy, self.benchmark):
            name, _, file = argument.partition("=")
            if (policy, name) in jobs:
                raise InputError(f"{policy} on {name} is asked for twice; give each name once")
            task, source = find_benchmark(name)
            if not (file or source):
                message = f"--benchmark {name} has no problems of its own"
                raise InputError(f"{message}; give a file of them: {name}=FILE")
            problems = task.problems(file or source)
            sampling = replace(task.sampling, **self.sampling)
            jobs[policy, name] = self.job(policy, task, problems, self.samples, sampling)
        return jobs

    def job(
        self, policy: str, task: Task, problems: Problems, n: int, sampling: Sampling
    ) -> SamplingJob:
        """A job whose prompts the policy can read."""
        check_prompts(policy, task, problems, sampling)
        return SamplingJob(policy, task, problems, n, sampling, self.seed, self.precision)

    def responses(self, name: str, job: SamplingJob) -> list[Trajectory]:
        """All responses of a job. All ranks sample those that `out` does not hold yet."""
        folder = self.out / "responses" / f"{name}-{content_hash(job.metadata)}"
        # what rank 0 found: another rank may look later, when some files are there
        missing = gather(job.missing_parts(folder))
        self.sample(job, missing[0][rank() :: len(missing)])
        gather(None)  # wait for the files of all ranks
        return read_parts(folder)

    def sample(self, job: SamplingJob, parts: list[tuple[Path, Problems]]) -> None:
        """Sample and write parts of a job."""
        if not parts:
            return
        gc.collect()  # reference cycles may hold the policy before
        with own_device():
            policy = load_policy(job.policy)
        sampler = LocalSampler(self.rows)
        bf16 = torch.autocast(policy.device.type, torch.bfloat16, self.precision == "bf16-mixed")
        remedy = f"--rows, now {self.rows or 'automatic'}, or --microbatch-tokens"
        for path, problems in tqdm(parts, job.policy, file=sys.stderr, disable=rank() > 0):
            with bf16, explain_out_of_memory(f"{job.samples} responses to a problem", remedy):
                trajectories = job.sample(problems, sampler, policy, self.microbatch_tokens)
            write_trajectories(path, trajectories, job.metadata)

    def weights(self, name: str, task: Task, solutions: list[Trajectory]) -> list[float]:
        """The verifier's weight of each solution in a vote; empty without a verifier."""
        if self.verifier is None:
            return []
        judge = find_verifier(task)
        problems = judge.candidates(solutions)
        job = self.job(self.verifier, judge, problems, self.critiques, judge.sampling)
        critiques = self.responses(f"{name}-verifier", job)
        starts = range(0, len(critiques), self.critiques)
        return [judge.weight(critiques[start : start + self.critiques]) for start in starts]


def lenient(job: SamplingJob, responses: list[Trajectory]) -> dict[str, np.ndarray]:
    """The share of each problem's responses that the task's lenient rule calls right, as a metric;
    empty for a task without such a rule."""
    texts = [graded_text(row.response, job.sampling) for row in responses]
    golds = [row.gold for row in responses]
    grades = list(map(job.task.grade_leniently, texts, golds))
    if None in grades:
        return {}
    correct = [grade.reward > 0 for grade in grades]
    return {"lenient": np.reshape(correct, (-1, job.samples)).mean(axis=1)}


def launch(devices: int) -> None:
    """Start a process for each device, or join those that torchrun or SLURM started."""
    processes = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))
    nodes = os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_NNODES", "1"))
    if devices > 1 or int(processes) > 1:
        from lightning.fabric import Fabric

        Fabric(devices=devices, num_nodes=int(nodes), strategy="ddp").launch()


def main() -> None:
    end_with_parent()
    parser = ArgumentParser(description=Evaluation.__doc__)
    parser.add_argument("--policy", nargs="+", required=True, help="folders or hub names")
    known = f"{', '.join(BENCHMARKS)}, or a task's class path; FILE or a hub data set: its problems"
    parser.add_argument("--benchmark", nargs="+", required=True, metavar="NAME[=FILE]", help=known)
    k_help = "of pass@k and maj@k; by default the samples"
    parser.add_argument("--k", nargs="+", type=PositiveInt, help=k_help)
    parser.add_argument("--greedy", action="store_true", help="one response of likeliest tokens")
    parser.add_argument("--stop", nargs="*", type=Stop, help="texts that end a response")
    names = parser.add_class_arguments(Sampling, as_group=False, skip={"stop"}) + ["stop"]
    parser.set_defaults(dict.fromkeys(names))  # the benchmark's
    several = {"policy", "benchmark", "k", "sampling"}
    parser.add_class_arguments(Evaluation, as_group=False, skip=several)
    with command():
        args = vars(parser.parse_args())
        if args.pop("greedy"):
            args |= {"temperature": 0.0, "samples": 1}
        given = {name: args.pop(name) for name in names}
        sampling = {name: value for name, value in given.items() if value is not None}
        args["k"] = sorted(set(args["k"] or [args["samples"]]))
        Evaluation(sampling=sampling, **args).run()


if __name__ == "__main__":
    main()
