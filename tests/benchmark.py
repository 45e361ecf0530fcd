"""Speed and memory of training against TRL's KTO, DPO, GRPO and SFT trainers on the same stored trajectories.

python3.11 -m venv peers && peers/bin/pip install -r tests/requirements-peers.txt
python tests/benchmark.py --python peers/bin/python         # training and sampling, an hour; --quick for a minute
python tests/benchmark.py data --sizes 1000,1000000         # the data path: planning, loading, memory

Every arm is a process of its own with one thread, all on one core. All train an epoch to warm up, then take turns, an
epoch each, round by round (A B C A B C). Tokens are nominal: prompt + response of every trajectory, no pads, a prompt
counted once for each of its responses, as the peers process it. Utilisation is the FLOPs of these tokens over what a
float32 matrix product reaches right before and after the turn. Prints tables and, as the last line, JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
from arms import lengths
from peers import text

HERE = Path(__file__).parent
MODELS = {  # Llama shapes: 2.0, 35.2 and 35.9 million parameters
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
    },
    "v32k": {
        "vocab_size": 32000,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    },
    "v128k": {
        "vocab_size": 128000,
        "hidden_size": 256,
        "intermediate_size": 683,
        "num_hidden_layers": 4,
    }
    | {"tie_word_embeddings": True},
}
DATA = {"gsm": (100, 150), "short": (100, 30)}  # mean tokens of a prompt, of a response
CASES = {  # trajectories of an epoch, of an update; tokens of a row of ours
    ("tiny", "gsm"): (128, 32, 1536),
    ("tiny", "short"): (256, 16, 1024),
    ("v32k", "gsm"): (32, 16, 1536),
    ("v128k", "gsm"): (16, 16, 1024),
}


def make_policy(folder: Path, name: str) -> dict:
    """A random Llama with a tokenizer of one word a token (0 ends a text, 1 pads); returns its sizes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from topr.policy import Policy, export_policy

    shape = MODELS[name]
    words = Tokenizer(
        models.WordLevel(
            {text([i]).strip(): i for i in range(shape["vocab_size"])}, unk_token="<pad>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"
    )
    heads = {"num_attention_heads": shape["hidden_size"] // 64, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=0, pad_token_id=1)
    )
    export_policy(Policy(model, tokenizer, str(folder)), folder)
    head, total = model.lm_head.weight.numel(), sum(p.numel() for p in model.parameters())
    return {
        "parameters": total,
        "head": head,
        "body": total - head * (1 + (not model.config.tie_word_embeddings)),
    }


def make_trajectories(folder: Path, model: str, data: str, count: int) -> dict:
    """Policy and trajectories, four to a prompt and two of them positive; returns tokens and FLOPs of an epoch."""
    from topr.policy import load_policy, provenance
    from topr.trajectories import Trajectory, add_log_probs, write_trajectories

    about, shape, rng = (
        make_policy(folder / "policy", model),
        MODELS[model],
        np.random.default_rng(0),
    )
    prompt, response = (
        lengths(rng, DATA[data][0], count // 4, 200),
        lengths(rng, DATA[data][1], count, 512),
    )
    prompts = [rng.integers(2, shape["vocab_size"], length).tolist() for length in prompt]
    rows = []
    for i, length in enumerate(response):
        ids, group = [*rng.integers(2, shape["vocab_size"], length - 1).tolist(), 0], i // 4
        given = {
            "prompt_id": str(group),
            "prompt": text(prompts[group]),
            "prompt_ids": prompts[group],
        }
        given |= {"response": text(ids[:-1]), "response_ids": ids, "ref_logprobs": []}
        rows.append(
            Trajectory(**given, group=str(group), reward=1.0 if i % 4 < 2 else -1.0, finished=True)
        )
    add_log_probs(load_policy(str(folder / "policy")), rows, 2048)
    known = provenance(str(folder / "policy"), "32-true")
    write_trajectories(folder / "train.parquet", rows, known)
    tokens = np.repeat(prompt, 4) + response
    attention = shape["num_hidden_layers"] * shape["hidden_size"] * (tokens**2).sum()
    flops = 6 * (about["body"] * tokens.sum() + about["head"] * response.sum() + attention)
    return about | {"tokens": int(tokens.sum()), "flops_per_token": float(flops / tokens.sum())}


def make_shards(folder: Path, count: int) -> None:
    """`count` trajectories of about 30 + 30 tokens, 100,000 to a file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from topr.trajectories.file import METADATA_KEYS, SCHEMA, SCHEMA_VERSION

    known = json.dumps(dict.fromkeys(METADATA_KEYS) | {"schema": SCHEMA_VERSION})
    rng = np.random.default_rng(0)
    for start in range(0, count, 100_000):
        row = np.arange(start, min(start + 100_000, count))
        ends = {
            name: np.append(0, lengths(rng, 30, len(row), 200).cumsum())
            for name in ("prompt", "response")
        }
        made = {name: np.full(len(row), "") for name in ends} | {
            "finished": np.full(len(row), True)
        }
        made |= {
            "prompt_id": (row // 4).astype(str),
            "group": (row // 4).astype(str),
            "reward": 1.0 - 2 * (row % 2),
        }
        for name, end in (
            ("prompt_ids", "prompt"),
            ("response_ids", "response"),
            ("ref_logprobs", "response"),
        ):
            values = (
                -rng.random(ends[end][-1])
                if name == "ref_logprobs"
                else rng.integers(2, 512, ends[end][-1])
            )
            made[name] = pa.ListArray.from_arrays(pa.array(ends[end], pa.int32()), values)
        schema = pa.schema([field for field in SCHEMA if field.name != "sampled"], {"topr": known})
        columns = [
            pa.array(made.get(field.name, [None] * len(row))).cast(field.type) for field in schema
        ]
        table = pa.Table.from_arrays(columns, schema=schema)
        pq.write_table(table, folder / f"{start}.parquet", compression="zstd")


class Arm:
    """A process that takes turns, see `arms.Turns`."""

    def __init__(self, name: str, command: list, folder: Path):
        self.name, self.told, self.turns, self.peaks = name, folder / f"{name}.log", [], []
        with self.told.open("w") as log:
            pipes = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": log,
                "text": True,
            }
            self.process = subprocess.Popen(list(map(str, command)), **pipes)
        self.read()  # the epoch to warm up

    def read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("took "):
                return json.loads(line.removeprefix("took "))
        raise SystemExit(f"{self.name} ended:\n{self.told.read_text()[-3000:]}")

    def turn(self) -> None:
        before = (
            peak_flops()
        )  # the core of a machine that is shared differs by half from one minute to the next
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.turns.append(self.read())
        self.peaks.append((before + peak_flops()) / 2)


def peak_flops() -> float:
    """FLOP/s of a float32 matrix product on this thread, by its CPU time."""
    import torch

    torch.set_num_threads(1)
    matrix, best = torch.ones(1024, 1024), float("inf")
    for _ in range(10):
        began = time.process_time()
        matrix @ matrix
        best = min(best, time.process_time() - began)
    return 2 * 1024**3 / best


def alternate(
    case: str, commands: dict[str, list], rounds: int, folder: Path, about: dict
) -> list[dict]:
    """Let the arms take turns; the first is compared with the others, round by round."""
    arms = []
    try:
        for name, command in commands.items():
            arms.append(Arm(name, command, folder))
        for _ in range(rounds):
            for arm in arms:
                arm.turn()
    finally:
        for arm in arms:
            arm.process.kill()
            arm.process.wait()
    peak = statistics.median(peak for arm in arms for peak in arm.peaks)
    print(
        f"\n{case}, {about['parameters'] / 1e6:.1f}M parameters, peak {peak / 1e9:.0f} GFLOP/s, {rounds} rounds"
    )
    print(
        f"{'':10}{'tokens/CPU s':>13}{'tokens/wall s':>14}{'utilisation':>12}{'MB':>7}   {arms[0].name} over it (range)"
    )
    results: list[dict] = []
    for arm in arms:
        if wrong := [
            turn["tokens"]
            for turn in arm.turns
            if turn["tokens"] != about.get("tokens", turn["tokens"])
        ]:
            raise SystemExit(f"{arm.name} took {wrong[0]} tokens in an epoch of {about['tokens']}")
        cpu, wall = (
            [turn["tokens"] / turn[clock] for turn in arm.turns] for clock in ("cpu", "wall")
        )
        ratio = [
            first / its
            for first, its in zip(
                results[0]["tokens_per_cpu_s"] if results else cpu, cpu, strict=True
            )
        ]
        row = {
            "case": case,
            "arm": arm.name,
            "tokens_per_cpu_s": cpu,
            "tokens_per_wall_s": wall,
            "ratio": ratio,
        }
        flops = [speed * about["flops_per_token"] for speed in cpu]
        row["utilisation"] = [its / peak for its, peak in zip(flops, arm.peaks, strict=True)]
        row |= {
            "updates": arm.turns[0]["steps"],
            "memory_mb": arm.turns[-1]["memory"] / 1e6,
            "peak_flops": arm.peaks,
        }
        results.append(row)
        speed, clock, share, times = (
            statistics.median(x) for x in (cpu, wall, row["utilisation"], ratio)
        )
        shown = f"{arm.name:10}{speed:13.0f}{clock:14.0f}{share:12.2f}{row['memory_mb']:7.0f}"
        print(f"{shown}   {times:.2f} ({min(ratio):.2f}-{max(ratio):.2f})", flush=True)
    return results


def train(args: argparse.Namespace, root: Path) -> list[dict]:
    """Ours against the peers for each model and data."""
    results = []
    for (model, data), sizes in CASES.items():
        if model in args.models.split(",") and data in args.data.split(","):
            folder = root / f"{model}-{data}"
            count, batch_size, row = (8, 8, 1024) if args.quick else sizes
            about = make_trajectories(folder, model, data, count)
            how = [folder, "--batch-size", batch_size, "--epochs", args.rounds + 1]
            arms = ["ours", "compiled"] if args.compile else ["ours"]
            more = ["--microbatch-tokens", row]
            commands = {arm: [sys.executable, HERE / "arms.py", arm, *how, *more] for arm in arms}
            for peer in filter(None, args.peers.split(",")):
                name, _, per_device = peer.partition("@")
                command = [args.python, HERE / "peers.py", name, *how]
                commands[peer] = command + (["--per-device", per_device] if per_device else [])
            results += alternate(f"{model} {data}", commands, args.rounds, folder, about)
    return results


def sample(args: argparse.Namespace, root: Path) -> list[dict]:
    """Our sampler against `generate`; tokens are those of responses, utilisation that of a forward of each alone."""
    about = make_policy(root / "sample" / "policy", "tiny")
    about["flops_per_token"] = 2 * (about["body"] + about["head"])
    how = [root / "sample", "--batch-size", args.rows, "--epochs", args.rounds + 1]
    commands = {
        arm: [sys.executable, HERE / "arms.py", arm, *how] for arm in ("sampler", "generate")
    }
    return alternate(f"sampling, {args.rows} rows", commands, args.rounds, root / "sample", about)


def data(args: argparse.Namespace, root: Path) -> list[dict]:
    """CPU time and memory of our data path by the number of trajectories."""
    names = f"{'check s':>9}{'setup s':>9}{'plan s':>8}{'ms/micro-batch':>16}{'us/trajectory':>15}{'MB':>7}"
    print(f"\n{'trajectories':>12}{names}")
    results = []
    for count in map(int, args.sizes.split(",")):
        folder = root / str(count)
        make_policy(folder / "policy", "tiny")
        make_shards(folder, count)
        command = [sys.executable, HERE / "arms.py", "load", folder]
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode:
            raise SystemExit(told.stderr)
        row = json.loads(told.stdout.splitlines()[-1])
        results.append(row | {"case": "data"})
        each, one = 1e3 * row["load_s"] / row["microbatches"], 1e6 * row["load_s"] / row["loaded"]
        times = (
            f"{row['check_s']:9.2f}{row['setup_s']:9.2f}{row['plan_s']:8.2f}{each:16.2f}{one:15.0f}"
        )
        print(f"{count:12}{times}{row['memory'] / 1e6:7.0f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {"train": train, "sample": sample, "data": data}
    parser.add_argument("what", nargs="*", help="train, sample (both by default), data")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--data", default=",".join(DATA))
    peers = "name@8: 8 trajectories a forward, TRL's default, not the fastest; kto+ref, dpo+ref: reference scored before"
    parser.add_argument("--peers", default="kto,kto@8,dpo,dpo@8,grpo,sft", help=peers)
    parser.add_argument("--compile", action="store_true", help="and ours with model.compile")
    parser.add_argument(
        "--python", default=sys.executable, help="that of the environment that holds the peers"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rows", type=int, default=32, help="responses that are sampled side by side"
    )
    parser.add_argument(
        "--sizes", default="1000,10000,100000,1000000", help="trajectories of the data path"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the tiny model, 8 trajectories, 4 rows, one round"
    )
    args = parser.parse_args()
    if args.quick:
        args.models, args.data, args.rounds, args.rows = "tiny", "gsm", 1, 4
    missing = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
    args.what = args.what or ["train", "sample"]
    if (
        "train" in args.what
        and args.peers
        and subprocess.run([args.python, "-c", missing]).returncode
    ):
        print(
            f"without the peers, which are not installed: {args.python} -m pip install -r tests/requirements-peers.txt"
        )
        args.peers = ""
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # the arms inherit it
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = str(Path(folder) / "hf")
        results = [row for what in args.what for row in known[what](args, Path(folder))]
    commit = subprocess.run(
        ["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    print(json.dumps({"commit": commit.stdout.strip(), "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
