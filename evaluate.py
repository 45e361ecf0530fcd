"""Evaluate policies on benchmarks:

python evaluate.py --policy runs/x/version_0/policy --benchmark arithmetic
"""

import gc
import os
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from tqdm import tqdm

from topr.commands import ArgumentParser, command
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
from topr.io import InputError, check_folder
from topr.policy import load_policy, load_tokenizer, own_device
from topr.sampling import LocalSampler, Sampling
from topr.tasks import Problem, Task
from topr.trajectories import Trajectory, agreed, write_trajectories

PRECISION = "bf16-mixed" if torch.cuda.is_available() else "32-true"


@dataclass
class Evaluation:
    """Sample, grade and tabulate, with 95% bootstrap intervals over problems.

    Args:
        policy: folders or hub names; all others are compared with the first.
        benchmark: names, or NAME=FILE.
        k: of pass@k and maj@k.
        samples: responses per problem.
        max_new_tokens: longest response; by default the benchmark's.
        greedy: take the likeliest tokens.
        verifier: policy that weighs the votes of weighted@k.
        critiques: of the verifier, per response.
        out: folder to write.
        seed: of sampling and of the intervals.
        rows: responses generated side by side; by default as many as fit, at most 512.
        devices: processes that share the problems; by default all GPUs, or one CPU process.
    """

    policy: list[str]
    benchmark: list[str]
    k: list[int]
    samples: PositiveInt = 16
    max_new_tokens: PositiveInt | None = None
    greedy: bool = False
    verifier: str | None = None
    critiques: PositiveInt = 4
    out: Path = Path("results")
    seed: NonNegativeInt = 0
    rows: PositiveInt | None = None
    devices: PositiveInt | None = None

    def run(self) -> None:
        """Sample what is missing, then write responses, table and figure."""
        jobs = self.find_jobs()
        launch(self.devices or max(1, torch.cuda.device_count()))
        results: dict[str, dict] = {policy: {} for policy in self.policy}
        rows = {}
        of_first: dict[str, Any] = {}  # by benchmark, what the first policy reached
        trajectories = []
        for (policy, name), job in jobs.items():
            responses = self.responses(name, job)
            weights = self.weights(name, job.task, responses)
            values = per_problem(responses, self.k, weights) | lenient(job, responses)
            row: dict[str, Any] = {"problems": len(job.problems), "samples": job.samples}
            row |= summarise(values, self.seed)
            first = of_first.setdefault(name, values)
            if policy != self.policy[0]:
                paired = {metric: values[metric] - first[metric] for metric in values}
                row["difference_to_first"] = summarise(paired, self.seed)
            results[policy][name] = rows[f"{policy}, {name}"] = row
            for trajectory in responses:
                trajectory.group = f"{policy}/{name}/{trajectory.prompt_id}"
            trajectories += responses
        if rank() == 0:
            metadata = agreed([job.metadata for job in jobs.values()])
            write_trajectories(self.out / "responses.parquet", trajectories, metadata)
            print(write_report(self.out, results, rows))
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
            task, source = find_benchmark(name)
            if not (file or source):
                message = f"--benchmark {name} has no problems of its own"
                raise InputError(f"{message}; give a file of them: {name}=FILE")
            problems = task.problems(file or source)
            sampling = replace(
                task.sampling,
                max_new_tokens=self.max_new_tokens or task.sampling.max_new_tokens,
                temperature=0.0 if self.greedy else task.sampling.temperature,
            )
            jobs[policy, name] = self.job(policy, task, problems, self.samples, sampling)
        return jobs

    def job(
        self, policy: str, task: Task, problems: list[Problem], n: int, sampling: Sampling
    ) -> SamplingJob:
        """A job whose prompts the policy can read."""
        check_prompts(policy, task, problems, sampling)
        return SamplingJob(policy, task, problems, n, sampling, self.seed, PRECISION)

    def responses(self, name: str, job: SamplingJob) -> list[Trajectory]:
        """All responses of a job. All ranks sample those that `out` does not hold yet."""
        folder = self.out / "responses" / f"{name}-{content_hash(job.metadata)}"
        # what rank 0 found: another rank may look later, when some files are there
        missing = gather(job.missing_parts(folder))
        parts = missing[0][rank() :: len(missing)]
        if parts:
            self.sample(job, parts)
        gather(None)  # wait for the files of all ranks
        return read_parts(folder)

    def sample(self, job: SamplingJob, parts: list[tuple[Any, list[Problem]]]) -> None:
        """Sample and write parts of a job."""
        gc.collect()  # reference cycles may hold the policy before
        with own_device():
            policy = load_policy(job.policy)
        sampler = LocalSampler(self.rows)
        bfloat16 = torch.autocast(policy.device.type, torch.bfloat16, PRECISION == "bf16-mixed")
        for path, problems in tqdm(parts, job.policy, file=sys.stderr, disable=rank() > 0):
            with bfloat16, explain_out_of_memory("sampling", "--rows"):
                trajectories = job.sample(problems, sampler, policy)
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
    correct = []
    for row in responses:
        text = graded_text(row.response, job.sampling)
        grade = job.task.grade_leniently(text, row.gold or "")
        if grade is None:
            return {}
        correct.append(grade.reward > 0)
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
    parser.add_argument("--k", nargs="+", type=PositiveInt, help="of pass@k; default: the samples")
    parser.add_argument("--greedy", action="store_true", help="one response of likeliest tokens")
    skipped = {"policy", "benchmark", "k", "greedy"}
    parser.add_class_arguments(Evaluation, as_group=False, skip=skipped)
    with command():
        args = parser.parse_args().as_dict()
        if args["greedy"]:
            args["samples"] = 1
        args["k"] = sorted(set(args["k"] or [args["samples"]]))
        Evaluation(**args).run()


if __name__ == "__main__":
    main()
