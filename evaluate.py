"""Evaluate policies on benchmarks: `python evaluate.py --policy runs/x/version_0/policy --benchmark arithmetic`."""

import argparse
import gc
import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from topr.evaluation import check_prompts, describe, figure, missing_parts, per_problem, sample_part, summarise, table
from topr.io import (
    ArgumentParser,
    InputError,
    atomic,
    check_counts,
    check_folder,
    command,
    first_line,
    is_out_of_memory,
)
from topr.policy import load_policy, own_device
from topr.ranks import end_with_parent, gather, rank
from topr.sampling import LocalSampler, Sampling
from topr.tasks import GSM8K, MATH, Arithmetic, ArithmeticVerifier, Verifier
from topr.tasks.demonstrations import Filler
from topr.tasks.task import Problem, Task
from topr.tokenizer import load_tokenizer, provenance
from topr.trajectories import Trajectory, read_trajectories, write_trajectories

STRONG = Arithmetic(operations=(2, 5), filler=Filler())  # as far as grades and the length of responses go
# name: task, its problems, the verifier of its solutions
BENCHMARKS = {
    "arithmetic": (Arithmetic(), "data/arithmetic/test.jsonl", ArithmeticVerifier(balance=False)),
    "arithmetic_strong": (STRONG, "data/arithmetic/strong/test.jsonl", ArithmeticVerifier(balance=False)),
    "gsm8k": (GSM8K(), "openai/gsm8k/main:test", Verifier(GSM8K(), balance=False)),
    "math500": (MATH(), "HuggingFaceH4/MATH-500:test", Verifier(MATH(), balance=False)),
}
LOADED: dict[str, torch.nn.Module] = {}  # by its name


def parse() -> argparse.Namespace:
    parser = ArgumentParser(description="Sample, grade and tabulate, with 95% bootstrap intervals.")
    parser.add_argument("--policy", nargs="+", required=True, help="folders or hub names")
    parser.add_argument(
        "--benchmark",
        nargs="+",
        required=True,
        metavar="NAME[=FILE]",
        help=f"{', '.join(BENCHMARKS)}; FILE, or a hub data set, replaces the benchmark's own problems",
    )
    parser.add_argument("--samples", type=int, default=16, help="responses per problem (default 16)")
    parser.add_argument("--k", type=int, nargs="+", help="for pass@k and maj@k (default: the samples)")
    parser.add_argument("--verifier", help="policy that weighs the votes of weighted@k")
    parser.add_argument("--critiques", type=int, default=4, help="of the verifier, per response (default 4)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder to write (default results)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the intervals (default 0)")
    parser.add_argument("--greedy", action="store_true", help="the likeliest token each time, one response a problem")
    for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("max_new_tokens", int)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="of sampling, in place of the benchmark's")
    parser.add_argument("--stop", nargs="*", help="texts that end a response, in place of the benchmark's")
    parser.add_argument("--rows", type=int, default=512, help="responses generated side by side (default 512)")
    parser.add_argument("--microbatch-tokens", type=int, default=16384, help="tokens of one scoring forward")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--devices", type=int, help="that share the problems (default: all GPUs, or one CPU process)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; 1 is fastest for a tiny model")
    args = parser.parse_args()
    if args.greedy:
        args.temperature, args.samples = 0.0, 1
    args.k = sorted(set(args.k or [args.samples]))
    return args


def benchmark(argument: str, args: argparse.Namespace) -> tuple[str, Task, list[Problem], Sampling]:
    """Name, task, problems and sampling of a NAME[=FILE]."""
    name, _, file = argument.partition("=")
    if name not in BENCHMARKS:
        raise InputError(f"--benchmark {name!r} is unknown; choose from {', '.join(BENCHMARKS)}, optionally =FILE")
    task, default, _ = BENCHMARKS[name]
    given = {key: value for key in vars(task.sampling) if (value := getattr(args, key)) is not None}
    return name, task, task.problems(file or default), replace(task.sampling, **given)


def start_ranks(devices: int | None) -> None:
    """Start a process for each device, or join those that torchrun or SLURM started."""
    count = devices or max(1, torch.cuda.device_count())
    if count > 1 or int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1))) > 1:
        from lightning.fabric import Fabric

        nodes = int(os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_NNODES", 1)))  # the former is torchrun's
        Fabric(devices=count, num_nodes=nodes, strategy="ddp").launch()


def loaded(policy: str):
    """The policy on the device, where one at a time is kept."""
    if policy not in LOADED:
        LOADED.clear()
        gc.collect()  # the model refers to itself; it goes before the next one takes memory
        with own_device():
            LOADED[policy] = load_policy(policy)
    return LOADED[policy]


def responses(
    policy: str, name: str, task: Task, problems: list[Problem], n: int, sampling: Sampling, args: argparse.Namespace
) -> list[Trajectory]:
    """n responses to each problem: those that lie under --out/responses, and newly sampled ones where they do not."""
    tokenizer = load_tokenizer(policy)
    about = describe(policy, tokenizer, args.precision, task, problems, n, sampling, args.seed)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    folder = args.out / "responses" / f"{name}-{digest}"
    missing = gather(missing_parts(folder, problems, about))  # rank 0's: another's may be later, and shorter
    for path, part in tqdm(missing[0][rank() :: len(missing)], desc=f"{policy} on {name}", disable=rank() > 0):
        model = loaded(policy)
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, args.precision == "bf16-mixed"):
            how = n, sampling, args.seed, args.microbatch_tokens
            try:
                sample_part(path, about, LocalSampler(args.rows), model, tokenizer, task, part, *how)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise InputError(
                    f"out of memory in {n} responses to each of {len(part)} problems ({first_line(error)}); lower "
                    f"--rows, now {args.rows}, or --microbatch-tokens, now {args.microbatch_tokens}"
                ) from error
    gather(None)  # until every rank has written its files
    return [row for path in sorted(folder.glob("part-*.parquet")) for row in read_trajectories(path)]


def weights(name: str, candidates: list[Trajectory], args: argparse.Namespace) -> list[float]:
    """The verifier's weight of each response."""
    task = BENCHMARKS[name][2]
    problems = task.candidates(candidates)
    sampling = replace(task.sampling, max_new_tokens=args.max_new_tokens or task.sampling.max_new_tokens)
    check_prompts(args.verifier, load_tokenizer(args.verifier), task, problems, sampling)
    critiques = responses(args.verifier, f"{name}-verifier", task, problems, args.critiques, sampling, args)
    return [
        task.weight(critiques[start : start + args.critiques]) for start in range(0, len(critiques), args.critiques)
    ]


def run(args: argparse.Namespace) -> None:
    counts = {name: getattr(args, name) for name in ("samples", "rows", "devices", "critiques", "microbatch_tokens")}
    check_counts("--", **counts, k=args.k[0])
    check_counts("--", least=0, seed=args.seed)
    check_counts("--", most=1024, threads=args.threads)
    if args.k[-1] > args.samples:
        raise InputError(f"--k {args.k[-1]} is more than the --samples {args.samples} of each problem; raise --samples")
    check_folder("--out", args.out)
    if args.threads:
        torch.set_num_threads(args.threads)
    for name, given in (("policy", args.policy), ("benchmark", [item.partition("=")[0] for item in args.benchmark])):
        if len(set(given)) < len(given):
            raise InputError(f"--{name} names {max(given, key=given.count)!r} twice; give each once")
    # everything is found before the first response is sampled
    named = args.policy + [args.verifier] * (args.verifier is not None)
    tokenizers = {policy: load_tokenizer(policy) for policy in named}
    benchmarks = [benchmark(argument, args) for argument in args.benchmark]
    for policy in args.policy:
        for _, task, problems, sampling in benchmarks:
            check_prompts(policy, tokenizers[policy], task, problems, sampling)
    start_ranks(args.devices)
    sampled = {
        (policy, name): responses(policy, name, task, problems, args.samples, sampling, args)
        for policy in args.policy
        for name, task, problems, sampling in benchmarks
    }
    # every rank takes its part in the critiques, too
    weighed = {key: weights(key[1], rows, args) for key, rows in sampled.items()} if args.verifier else {}
    if rank():
        return
    results: dict[str, dict] = {}
    first: dict[str, dict] = {}  # the first policy's values of each problem, by benchmark
    for (policy, name), rows in sampled.items():
        values = per_problem(rows, args.k, weighed.get((policy, name)))
        result = {"problems": len(values["pass@1"]), "samples": args.samples, **summarise(values, args.seed)}
        results.setdefault(policy, {})[name] = result
        if name in first:  # the same problems: differences are paired
            paired = {metric: values[metric] - first[name][metric] for metric in values if metric in first[name]}
            result["difference"] = summarise(paired, args.seed)
        first.setdefault(name, values)
        for row in rows:
            row.group = f"{policy}/{name}/{row.prompt_id}"
    write(args, results, [row for rows in sampled.values() for row in rows])


def write(args: argparse.Namespace, results: dict[str, dict], rows: list[Trajectory]) -> None:
    """results.json, results.md, results.png and responses.parquet."""
    labelled = {f"{policy}, {name}": row for policy, named in results.items() for name, row in named.items()}
    markdown = table(labelled) + (
        f"\n\nPer cent (length: tokens) with 95% bootstrap intervals over problems, {args.samples} samples each.\n"
    )
    if differences := {label: row["difference"] for label, row in labelled.items() if "difference" in row}:
        markdown += f"\nDifference to {args.policy[0]}, problem by problem:\n\n{table(differences)}\n"
    metadata = {"task": ", ".join(args.benchmark), "sampling": {"samples": args.samples, "seed": args.seed}}
    if len(args.policy) == 1:
        metadata = provenance(args.policy[0], load_tokenizer(args.policy[0]), args.precision, **metadata)
    write_trajectories(args.out / "responses.parquet", rows, metadata)
    for name, text in (("results.json", json.dumps(results, indent=2) + "\n"), ("results.md", markdown)):
        with atomic(args.out / name) as path:
            path.write_text(text)
    figure(args.out / "results.png", results)
    print(f"{markdown}\nwrote results.json, results.md, results.png and responses.parquet under {args.out}")


def main() -> None:
    end_with_parent()
    with command():
        run(parse())


if __name__ == "__main__":
    sys.exit(main())
