"""Evaluate policies on benchmarks: `python evaluate.py --policy runs/x/version_0/policy --benchmark arithmetic`."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from topr import tasks
from topr.evaluation import per_problem, sample_and_grade, summarise, table
from topr.io import InputError, atomic, check_counts, check_folder, command
from topr.policy import load_policy, load_tokenizer, provenance, resolve_policy
from topr.sampling import LocalSampler, Sampling
from topr.tasks.task import Problem, Task
from topr.trajectories import Trajectory, add_log_probs, write_trajectories

BENCHMARKS = {"arithmetic": ("Arithmetic", "data/arithmetic/test.jsonl")}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sample, grade and tabulate, with 95% bootstrap intervals.")
    parser.add_argument("--policy", nargs="+", required=True, help="folders or hub names")
    parser.add_argument(
        "--benchmark",
        nargs="+",
        required=True,
        metavar="NAME[=FILE]",
        help=f"{', '.join(BENCHMARKS)}; FILE replaces the benchmark's own problems",
    )
    parser.add_argument("--samples", type=int, default=16, help="responses per problem (default 16)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder to write (default results)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the intervals (default 0)")
    for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("max_new_tokens", int)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="of sampling, in place of the benchmark's")
    parser.add_argument("--rows", type=int, default=512, help="responses generated side by side (default 512)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; 1 is fastest for a tiny model")
    return parser.parse_args()


def benchmark(argument: str, args: argparse.Namespace) -> tuple[str, Task, list[Problem], Sampling]:
    """Name, task, problems and sampling of a NAME[=FILE]."""
    name, _, file = argument.partition("=")
    if name not in BENCHMARKS:
        raise InputError(f"--benchmark {name!r} is unknown; choose from {', '.join(BENCHMARKS)}, optionally =FILE")
    task, default = BENCHMARKS[name]
    task = getattr(tasks, task)()
    given = {key: value for key in vars(task.sampling) if (value := getattr(args, key, None)) is not None}
    return name, task, task.problems(file or default), replace(task.sampling, **given)


def run(args: argparse.Namespace) -> None:
    check_counts("--", samples=args.samples, rows=args.rows, threads=args.threads)
    check_folder("--out", args.out)
    if args.threads:
        torch.set_num_threads(args.threads)
    for name, given in (("policy", args.policy), ("benchmark", [item.partition("=")[0] for item in args.benchmark])):
        if len(set(given)) < len(given):
            raise InputError(f"--{name} names {max(given, key=given.count)!r} twice; give each once")
    for policy in args.policy:  # everything is found before the first response is sampled
        resolve_policy(policy)
    benchmarks = [benchmark(argument, args) for argument in args.benchmark]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, dict] = {}
    responses: list[Trajectory] = []
    first: dict[str, dict] = {}  # the first policy's values of each problem, by benchmark
    for policy in args.policy:
        model, tokenizer = load_policy(policy).to(device), load_tokenizer(policy)
        for name, task, problems, sampling in benchmarks:
            rows = sample_and_grade(
                LocalSampler(args.rows), model, tokenizer, task, problems, args.samples, sampling, args.seed
            )
            add_log_probs(model, rows, microbatch_tokens=16384)
            values = per_problem(rows)
            summary = summarise(values, args.seed)
            result = {"problems": len(problems), "samples": args.samples, **summary}
            results.setdefault(policy, {})[name] = result
            if name in first:  # the same problems: differences are paired
                paired = {metric: values[metric] - first[name][metric] for metric in values}
                result["difference"] = summarise(paired, args.seed)
            first.setdefault(name, values)
            for row in rows:
                row.group = f"{policy}/{name}/{row.prompt_id}"
            responses += rows
            print(f"{policy} on {name}: pass@1 {summary['pass@1']['mean']:.3f}", flush=True)
    write(args, results, responses, tokenizer)


def write(args: argparse.Namespace, results: dict[str, dict], responses: list[Trajectory], tokenizer) -> None:
    """results.json, results.md and responses.parquet."""
    rows = {f"{policy}, {name}": row for policy, named in results.items() for name, row in named.items()}
    markdown = table(rows) + (
        f"\n\nPer cent (length: tokens) with 95% bootstrap intervals over problems, {args.samples} samples each.\n"
    )
    if differences := {label: row["difference"] for label, row in rows.items() if "difference" in row}:
        markdown += f"\nDifference to {args.policy[0]}, problem by problem:\n\n{table(differences)}\n"
    with atomic(args.out / "results.json") as path:
        path.write_text(json.dumps(results, indent=2) + "\n")
    with atomic(args.out / "results.md") as path:
        path.write_text(markdown)
    metadata = {"task": ", ".join(args.benchmark), "sampling": {"samples": args.samples, "seed": args.seed}}
    if len(args.policy) == 1:
        metadata = provenance(args.policy[0], tokenizer, "32-true", **metadata)
    write_trajectories(args.out / "responses.parquet", responses, metadata)
    print(f"\n{markdown}\nwrote results.json, results.md and responses.parquet under {args.out}")


def main() -> None:
    with command():
        run(parse())


if __name__ == "__main__":
    main()
