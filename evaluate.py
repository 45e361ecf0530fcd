"""Evaluate policies on benchmarks:

python evaluate.py --policy runs/x/version_0/policy --benchmark arithmetic
"""

import gc
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.fabric import Fabric

from topr.evaluation.benchmarks import find_benchmark
from topr.evaluation.metrics import per_problem, summarise
from topr.evaluation.pipeline import SamplingJob, read_parts
from topr.evaluation.report import write_report
from topr.io import InputError, claim
from topr.io.commands import ArgumentParser, command
from topr.io.distributed import (
    end_all_ranks_on_error,
    end_rank_with_launcher,
    gather,
    rank,
    world_size,
)
from topr.policy import Policy, load_policy, own_device
from topr.policy.model import empty_policy
from topr.run.identity import policy_hash
from topr.sampling import LocalSampler, ServerSampler
from topr.tasks import Arithmetic, ArithmeticVerifier, Task, Verifier
from topr.tasks.task import before
from topr.trajectories import Trajectory, add_log_probs, read_trajectories, write_trajectories
from topr.trajectories.curate import agreed
from topr.trajectories.scoring import score

SMALL = 20_000_000  # weights; beside other work, two threads are up to 5 times as slow as one
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
        greedy: one response of the likeliest tokens; `samples` is ignored.
        verifier: policy that weighs the votes of weighted@k; by default none does.
        critiques: of the verifier, per response.
        log_probs: score the responses, so that they can be trained on; a third more time.
        server: addresses of servers that sample, up to and including /v1, in place of this process.
            With log_probs, theirs are compared with the policy's.
        threads: CPU threads of torch; by default 1 for a policy of less than 20 million weights.
        out: folder to write.
        overwrite: replace the results of another evaluation in this folder.
        seed: of sampling and of the intervals.
        seeds: sample with this many, from `seed` on; figures are then means over all of them, and
            the rows `over seeds` have intervals over the seeds instead of the problems.
        devices: processes that share the problems; by default all GPUs, or one CPU process.
    """

    policy: list[str]
    benchmark: list[str]
    k: list[int]
    server: list[str]
    samples: PositiveInt = 16
    max_new_tokens: PositiveInt | None = None
    greedy: bool = False
    verifier: str = ""
    critiques: PositiveInt = 4
    log_probs: bool = False
    threads: PositiveInt | None = None
    out: Path = Path("results")
    overwrite: bool = False
    seed: NonNegativeInt = 0
    seeds: PositiveInt = 1
    devices: PositiveInt | None = None
    loaded: Policy | None = field(default=None, init=False)  # the policy that sampled last

    def run(self):
        """Sample what is missing, then write responses, table and figure."""
        jobs = self.find_jobs()
        devices = self.devices or torch.cuda.device_count()
        if devices > 1:  # start a process for each, or join those of torchrun or SLURM
            Fabric(devices=devices, strategy="ddp").launch()
        with end_all_ranks_on_error():
            if rank() == 0:
                self.claim(jobs)
        results: dict = {}  # by policy and benchmark
        first = {}  # metrics of the first policy, by benchmark
        trajectories = []
        metadata = []
        for (policy, name), jobs_of_seeds in jobs.items():
            by_seed = []  # metrics of each problem
            for job in jobs_of_seeds:
                responses = self.responses(name, job)
                by_seed.append(self.metrics(name, job, responses))
                for trajectory in responses:
                    trajectory.group = f"{policy}, {name}, {trajectory.prompt_id}"
                trajectories += responses
                metadata.append(job.metadata)
            values = sum(by_seed) / self.seeds
            rows = results.setdefault(policy, {})
            rows[name] = {"problems": len(job.problems), "samples": job.samples}
            rows[name] |= summarise(values, self.seed)
            if self.seeds > 1:
                rows[f"{name}, over seeds"] = summarise(
                    pd.DataFrame([metrics.mean() for metrics in by_seed]), self.seed
                )
            if name not in first:
                first[name] = values
            else:  # paired by problem
                rows[f"{name}, difference to first"] = summarise(values - first[name], self.seed)
        if rank() == 0:
            write_trajectories(
                self.out / "responses.parquet",
                trajectories,
                {"tokenizer": "several"} | agreed(metadata),  # `fit` refuses several
            )
            print(write_report(self.out, results))
            print(f"results and responses are under {self.out}")

    def claim(self, jobs):
        """Make `out` hold the results of these jobs; an InputError if it holds others."""
        verifier = self.verifier and policy_hash(self.verifier)
        sampled = []
        for key, jobs_of_seeds in jobs.items():
            sampled.append([*key, *[job.responses_hash for job in jobs_of_seeds]])
        claim(self.out, [self.k, verifier, self.critiques, sampled], self.overwrite)

    def find_jobs(self) -> dict:
        """What to sample with each seed, by policy and benchmark. An InputError for what cannot be
        sampled.

        A name's second file stands under NAME=FILE."""
        k = max(self.k, default=1)
        if self.server and (len(self.policy) > 1 or self.verifier):
            raise InputError(
                "--server serves one policy; evaluate one at a time, without --verifier"
            )
        if k > self.samples:
            raise InputError(
                f"--k {k} exceeds --samples {self.samples} (1 with --greedy); lower "
                "--k or raise --samples"
            )
        jobs = {}
        for policy in self.policy:
            for argument in self.benchmark:
                name, _, file = argument.partition("=")
                task, source = find_benchmark(name, file)
                sampling = replace(
                    task.sampling,
                    max_new_tokens=self.max_new_tokens or task.sampling.max_new_tokens,
                    temperature=0.0 if self.greedy else task.sampling.temperature,
                )
                problems = task.problems(source)
                jobs[policy, argument if (policy, name) in jobs else name] = [
                    SamplingJob(policy, task, problems, self.samples, sampling, seed, PRECISION)
                    for seed in range(self.seed, self.seed + self.seeds)
                ]
        return jobs

    def responses(self, name: str, job: SamplingJob) -> list[Trajectory]:
        """All responses of a job. All ranks sample those that `out` does not hold yet."""
        folder = self.out / "responses" / f"{Path(name).name}-{job.responses_hash}"
        sampler = ServerSampler(self.server) if self.server else LocalSampler()
        with torch.autocast(own_device().type, torch.bfloat16, PRECISION == "bf16-mixed"):
            missing = {path: numbers for path, numbers in job.parts_to_write(folder) if numbers}
            if missing:
                sampled = job.sample_parts([*missing.values()], sampler, self.load(job.policy))
            for path in missing:
                trajectories = next(sampled)
                if self.log_probs:
                    score(self.load(job.policy), trajectories, job.sampling)
                else:
                    for row in trajectories:
                        row.ref_logprobs = []  # of a server, not of this process
                write_trajectories(path, trajectories, job.metadata)
                print(f"wrote {path}")
            gather(None)  # wait for the files of all ranks
            if self.log_probs:
                for path in sorted(folder.glob("*.parquet"))[rank() :: world_size()]:
                    trajectories = read_trajectories(path)
                    if not trajectories[0].ref_logprobs:
                        add_log_probs(self.load(job.policy), trajectories)
                        write_trajectories(path, trajectories, job.metadata)
        gather(None)
        return read_parts(folder)

    def load(self, name: str) -> Policy:
        """A policy on this process's device, loaded unless it sampled last; sets the number of
        threads."""
        if self.loaded and self.loaded.name == name:
            return self.loaded
        self.loaded = None
        gc.collect()  # reference cycles may hold the policy before
        if self.server and not self.log_probs:
            self.loaded = empty_policy(name)  # its weights are not needed
        else:
            with own_device():
                self.loaded = load_policy(name)
        if self.threads or self.loaded.model.num_parameters() < SMALL:
            torch.set_num_threads(self.threads or 1)
        return self.loaded

    def metrics(self, name: str, job: SamplingJob, responses: list[Trajectory]) -> pd.DataFrame:
        """The metrics of each problem."""
        weights = self.weights(name, job.task, responses) if self.verifier else []
        values = per_problem(responses, self.k, weights)
        # grades by the task's lenient rule, if it has one
        lenient = [
            job.task.grade_leniently(before(row.response, job.sampling.stop), row.gold)
            for row in responses
        ]
        correct = [grade.reward > 0 for grade in lenient if grade]
        if correct:
            values["lenient"] = np.reshape(correct, (-1, job.samples)).mean(axis=1)
        return values

    def weights(self, name: str, task: Task, solutions: list[Trajectory]) -> list[float]:
        """The verifier's weight of each solution in a vote."""
        judge = ArithmeticVerifier() if isinstance(task, Arithmetic) else Verifier(task)
        job = SamplingJob(
            self.verifier,
            judge,
            judge.candidates(solutions),
            self.critiques,
            judge.sampling,
            self.seed,
            PRECISION,
        )
        approved = [
            critique.answer == judge.verdicts[0]
            for critique in self.responses(f"{name}-verifier", job)
        ]
        return np.reshape(approved, (-1, self.critiques)).mean(axis=1).tolist()


def main():
    end_rank_with_launcher()
    parser = ArgumentParser(description=Evaluation.__doc__)
    parser.add_argument("--policy", nargs="+", required=True, help="folders or hub names")
    parser.add_argument(
        "--benchmark",
        nargs="+",
        required=True,
        metavar="NAME[=FILE]",
        help="a benchmark or a task's class path; FILE: its problems",
    )
    parser.add_argument(
        "--k", nargs="+", type=PositiveInt, default=[], help="of pass@k; default: the samples"
    )
    parser.add_argument(
        "--server", nargs="+", default=[], help="addresses, up to and including /v1, that sample"
    )
    parser.add_argument("--greedy", action="store_true", help="one response of likeliest tokens")
    parser.add_class_arguments(
        Evaluation, as_group=False, skip={"policy", "benchmark", "k", "server", "greedy"}
    )
    with command():
        args = parser.parse_args()
        if args.greedy:
            args.samples = 1
        Evaluation(**vars(args)).run()


if __name__ == "__main__":
    main()
