"""Speed and memory of training against TRL's KTO, DPO, GRPO and SFT on the same trajectories.

python3.11 -m venv peers && peers/bin/pip install -r tests/requirements-peers.txt
python tests/benchmark.py --python peers/bin/python     # training and sampling, an hour
python tests/benchmark.py train --peers "" --old DIR    # against another checkout
python tests/benchmark.py data --sizes 1000,1000000     # the data path: planning, loading, memory
python tests/benchmark.py --python peers/bin/python --vllm V/bin/python --policy DIR \
    --trajectories FILE --precision bf16-mixed          # a real policy and its trajectories

Every arm is a process of its own with one thread, all on one core. All train an epoch to warm up,
then take turns, an epoch each (A B C A B C). Tokens are nominal: prompt + response of every
trajectory, no pads, a prompt counted once for each of its responses, as the peers process it.
Utilisation is the FLOPs of these tokens over what a float32 matrix product reaches right before and
after the turn. Prints tables and, as the last line, JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
from arms import lengths
from peers import text
from vllm import Server

HERE = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = {  # Llama shapes: 2.0, 35.2 and 35.9 million parameters
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
        "tie_word_embeddings": True,
    },
}
DATA = {"gsm": (100, 150), "short": (100, 30)}  # mean tokens of a prompt, of a response
CASES = {  # trajectories of an epoch, of an update; tokens of a row of ours
    ("tiny", "gsm"): (128, 32, 1344),
    ("tiny", "short"): (256, 16, 1024),
    ("v32k", "gsm"): (32, 16, 1536),
    ("v128k", "gsm"): (16, 16, 1024),
}
REAL = (32, 32, 2048)


def make_policy(folder: Path, name: str) -> dict[str, int]:
    """A random Llama with a tokenizer of one word a token (0 ends a text, 1 pads).

    Returns:
        The parameters of the whole model, of its output projection and of its layers.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from topr.policy import Policy, export_policy

    shape = MODELS[name]
    vocabulary = {text([i]).strip(): i for i in range(shape["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"
    )
    config = LlamaConfig(
        **shape,
        num_attention_heads=shape["hidden_size"] // 64,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    export_policy(Policy(model, tokenizer, str(folder)), folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    head = model.lm_head.weight.numel()
    embeddings = 1 if config.tie_word_embeddings else 2
    return {"parameters": parameters, "head": head, "body": parameters - embeddings * head}


def make_trajectories(folder: Path, model: str, data: str, count: int) -> dict[str, float]:
    """Policy and trajectories, four to a prompt; returns tokens and FLOPs of an epoch."""
    from topr.policy import load_policy
    from topr.run.identity import provenance
    from topr.trajectories import Trajectory, add_log_probs, write_trajectories

    about = make_policy(folder / "policy", model)
    shape = MODELS[model]
    prompt_mean, response_mean = DATA[data]
    rng = np.random.default_rng(0)
    prompt_lengths = lengths(rng, prompt_mean, count // 4, 200)
    response_lengths = lengths(rng, response_mean, count, 512)
    prompts = [rng.integers(2, shape["vocab_size"], length).tolist() for length in prompt_lengths]
    trajectories = []
    for i, length in enumerate(response_lengths):
        group = i // 4
        ids = rng.integers(2, shape["vocab_size"], length - 1).tolist()
        trajectory = Trajectory(
            prompt_id=str(group),
            group=str(group),
            prompt=text(prompts[group]),
            prompt_ids=prompts[group],
            response=text(ids),
            response_ids=[*ids, 0],
            ref_logprobs=[],
            reward=1.0 if i % 4 < 2 else -1.0,
            finished=True,
        )
        trajectories.append(trajectory)
    name = str(folder / "policy")
    add_log_probs(load_policy(name), trajectories, 2048)
    write_trajectories(folder / "train.parquet", trajectories, provenance(name, "32-true"))
    tokens = np.repeat(prompt_lengths, 4) + response_lengths
    attention = shape["num_hidden_layers"] * shape["hidden_size"] * (tokens**2).sum()
    products = about["body"] * tokens.sum() + about["head"] * response_lengths.sum() + attention
    total = int(tokens.sum())
    return about | {"tokens": total, "flops_per_token": 6 * float(products) / total}


def copy_trajectories(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """As `make_trajectories`, of a real policy: an update of 32 trajectories, 8 to a prompt.

    Half of them are said to be right, so that all can be paired.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(args.trajectories).slice(0, REAL[0])
    field = table.schema.field("reward")
    rewards = pa.array([1.0 - 2 * (i % 2) for i in range(len(table))], field.type)
    table = table.set_column(table.schema.get_field_index("reward"), field, rewards)
    folder.mkdir()
    pq.write_table(table, folder / "train.parquet")
    about = of_policy(folder, args.policy)
    prompts = np.array([len(ids) for ids in table["prompt_ids"].to_pylist()])
    responses = np.array([len(ids) for ids in table["response_ids"].to_pylist()])
    tokens = prompts + responses
    attention = about["width"] * (tokens**2).sum()
    products = about["body"] * tokens.sum() + about["head"] * responses.sum() + attention
    total = int(tokens.sum())
    return about | {"tokens": total, "flops_per_token": 6 * float(products) / total}


def of_policy(folder: Path, policy: Path) -> dict[str, int]:
    """Put a policy into the folder; its parameters, as `make_policy` returns them."""
    from topr.policy import load_policy

    (folder / "policy").symlink_to(policy.absolute())
    model = load_policy(str(policy)).model
    config = model.config
    parameters = model.num_parameters()
    head = config.vocab_size * config.hidden_size
    embeddings = 1 if config.tie_word_embeddings else 2
    width = config.num_hidden_layers * config.hidden_size
    body = parameters - embeddings * head
    return {"parameters": parameters, "head": head, "body": body, "width": width}


def make_shards(folder: Path, count: int) -> None:
    """`count` trajectories of about 30 + 30 tokens, 100,000 to a file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from topr.trajectories.file import METADATA_KEYS, SCHEMA, SCHEMA_VERSION

    metadata = json.dumps(dict.fromkeys(METADATA_KEYS) | {"schema": SCHEMA_VERSION})
    names = [name for name in SCHEMA.names if name != "sampled"]
    rng = np.random.default_rng(0)
    for start in range(0, count, 100_000):
        row = np.arange(start, min(start + 100_000, count))
        group = (row // 4).astype(str)
        ends = pa.array(np.append(0, lengths(rng, 30, len(row), 200).cumsum()), pa.int32())
        size = ends[-1].as_py()
        ids = pa.ListArray.from_arrays(ends, rng.integers(2, 512, size))
        columns = dict.fromkeys(names, [None] * len(row)) | {
            "prompt_id": group,
            "group": group,
            "prompt": [""] * len(row),
            "response": [""] * len(row),
            "prompt_ids": ids,
            "response_ids": ids,
            "ref_logprobs": pa.ListArray.from_arrays(ends, -rng.random(size)),
            "reward": 1.0 - 2 * (row % 2),
            "finished": [True] * len(row),
        }
        arrays = [pa.array(columns[name]).cast(SCHEMA.field(name).type) for name in names]
        schema = pa.schema([SCHEMA.field(name) for name in names], {"topr": metadata})
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), folder / f"{start}.parquet")


class Arm:
    """A process that takes turns, see `arms.Turns`."""

    def __init__(self, name: str, command: list, folder: Path):
        self.name = name
        self.log = folder / f"{name}.log"
        self.turns: list[dict[str, float]] = []
        self.peaks: list[float] = []  # FLOP/s
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.read()  # the epoch to warm up

    def read(self) -> dict[str, float]:
        for line in self.process.stdout:
            if line.startswith("took "):
                return json.loads(line.removeprefix("took "))
        raise SystemExit(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")

    def turn(self) -> None:
        # a core that is shared differs by half from one minute to the next
        before = peak_flops()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.turns.append(self.read())
        self.peaks.append((before + peak_flops()) / 2)


def peak_flops() -> float:
    """FLOP/s of a float32 matrix product on this thread, by its CPU time."""
    torch.set_num_threads(1)
    matrix = torch.ones(1024, 1024)
    seconds = []
    for _ in range(10):
        began = time.process_time()
        matrix @ matrix
        seconds.append(time.process_time() - began)
    return 2 * 1024**3 / min(seconds)


def alternate(
    case: str, commands: dict[str, list], rounds: int, folder: Path, about: dict
) -> list[dict]:
    """Let the arms take turns; the first is compared with the others, round by round.

    By CPU time, since others' work costs wall time; beside a server, whose CPU time is not known
    here, by wall time.
    """
    unit = "tokens_per_wall_s" if "server" in commands else "tokens_per_cpu_s"
    arms: list[Arm] = []
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
    print(f"\n{case}, {about['parameters'] / 1e6:.1f}M parameters, {rounds} rounds")
    print("             tokens/CPU s  tokens/wall s  utilisation     MB   first over it (range)")
    results: list[dict] = []
    for arm in arms:
        row = measured(arm, about)
        first = results[0] if results else row
        pairs = zip(first[unit], row[unit], strict=True)
        row["ratio"] = [one / other for one, other in pairs]
        results.append(row | {"case": case})
        speed = statistics.median(row["tokens_per_cpu_s"])
        wall = statistics.median(row["tokens_per_wall_s"])
        share = statistics.median(row["utilisation"])
        ratio = statistics.median(row["ratio"])
        between = f"({min(row['ratio']):.2f}-{max(row['ratio']):.2f})"
        figures = f"{speed:13.0f}{wall:15.0f}{share:13.2f}{row['memory_mb']:7.0f}"
        print(f"{arm.name:12}{figures}   {ratio:.2f} {between}", flush=True)
    return results


def measured(arm: Arm, about: dict) -> dict[str, Any]:
    """Figures of an arm, a list over its turns."""
    tokens = [turn["tokens"] for turn in arm.turns]
    if "tokens" in about and set(tokens) != {about["tokens"]}:
        raise SystemExit(f"{arm.name} took {tokens} tokens in epochs of {about['tokens']}")
    speed = np.array([turn["tokens"] / turn["cpu"] for turn in arm.turns])
    return {
        "arm": arm.name,
        "tokens_per_cpu_s": speed.tolist(),
        "tokens_per_wall_s": [turn["tokens"] / turn["wall"] for turn in arm.turns],
        "utilisation": (speed * about["flops_per_token"] / arm.peaks).tolist(),
        "peak_flops": arm.peaks,
        "updates": arm.turns[0]["steps"],
        "memory_mb": arm.turns[-1]["memory"] / 1e6,
    }


def train(args: argparse.Namespace, root: Path) -> list[dict]:
    """Ours against the peers for each model and data."""
    results = []
    cases = {("real", args.precision): REAL} if args.policy else CASES
    for (model, data), (count, batch_size, row) in cases.items():
        folder = root / f"{model}-{data}"
        if args.policy:
            about = copy_trajectories(folder, args)
        elif model not in args.models.split(",") or data not in args.data.split(","):
            continue
        else:
            if args.quick:
                count, batch_size = 8, 8
            about = make_trajectories(folder, model, data, count)
        how = [folder, "--batch-size", batch_size, "--epochs", args.rounds + 1]
        how += ["--precision", args.precision]
        rows = ["--microbatch-tokens", row]
        commands = {"ours": [sys.executable, HERE / "arms.py", "ours", *how, *rows]}
        if args.old:
            commands["old"] = [sys.executable, args.old / "tests/arms.py", "ours", *how, *rows]
        for peer in filter(None, args.peers.split(",")):
            name, _, per_device = peer.partition("@")
            commands[peer] = [args.python, HERE / "peers.py", name, *how]
            if name == "by hand":
                commands[peer] = [sys.executable, HERE / "arms.py", name, *how, *rows]
            if per_device:
                commands[peer] += ["--per-device", per_device]
        results += alternate(f"{model} {data}", commands, args.rounds, folder, about)
    return results


def sample(args: argparse.Namespace, root: Path) -> list[dict]:
    """Our sampler against `generate`; utilisation is that of a forward of each response alone.

    On a real policy against vLLM, too.
    """
    folder = root / "sample"
    rows = 4 if args.quick else 32  # responses that are sampled side by side
    about: dict[str, float]
    if args.policy:
        rows = 128
        folder.mkdir()
        about = dict(of_policy(folder, args.policy))
        prompts = first_prompts(args.trajectories, 64)
        (folder / "prompts.json").write_text(json.dumps(prompts))
    else:
        about = dict(make_policy(folder / "policy", "tiny"))
    about["flops_per_token"] = 2 * (about["body"] + about["head"])
    how = [folder, "--batch-size", rows, "--epochs", args.rounds + 1]
    how += ["--precision", args.precision, "--max-new-tokens", args.max_new_tokens]
    commands = {}
    for arm in ("sampler", "generate"):
        commands[arm] = [sys.executable, HERE / "arms.py", arm, *how]
    with ExitStack() as stack:
        if args.vllm:
            dtype = "bfloat16" if args.precision == "bf16-mixed" else "float32"
            more = ["--max-model-len", "1024", "--dtype", dtype]
            server = stack.enter_context(Server(args.vllm, args.policy, 8151, *more))
            commands["server"] = [sys.executable, HERE / "arms.py", "server", *how]
            commands["server"] += ["--url", server.url]
        return alternate(f"sampling, {rows} rows", commands, args.rounds, folder, about)


def first_prompts(trajectories: Path, count: int) -> list[list[int]]:
    """Ids of prompts that differ."""
    import pyarrow.parquet as pq

    every = pq.read_table(trajectories, columns=["prompt_ids"])["prompt_ids"].to_pylist()
    return list(map(list, dict.fromkeys(map(tuple, every))))[:count]


def data(args: argparse.Namespace, root: Path) -> list[dict]:
    """CPU time and memory of our data path by the number of trajectories."""
    print("\ntrajectories  setup s  plan s  ms/micro-batch  us/trajectory     MB")
    results = []
    for count in map(int, args.sizes.split(",")):
        folder = root / str(count)
        make_policy(folder / "policy", "tiny")
        make_shards(folder, count)
        command = [sys.executable, HERE / "arms.py", "load", folder]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        row = json.loads(output.splitlines()[-1])
        results.append(row | {"case": "data"})
        each = 1e3 * row["load_s"] / row["microbatches"]
        one = 1e6 * row["load_s"] / row["loaded"]
        times = f"{row['setup_s']:9.2f}{row['plan_s']:8.2f}"
        print(f"{count:12}{times}{each:16.2f}{one:15.0f}{row['memory'] / 1e6:7.0f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"train": train, "sample": sample, "data": data}
    parser.add_argument("what", nargs="*", help="train, sample (both by default), data")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--data", default=",".join(DATA))
    peers = "name@8: 8 trajectories a forward, TRL's default; kto+ref: reference scored before; "
    peers += "by hand: a plain loop, for Llama"
    parser.add_argument("--peers", default="kto,kto@8,dpo,dpo@8,grpo,sft", help=peers)
    parser.add_argument("--old", type=Path, help="another checkout, which is trained as well")
    parser.add_argument("--python", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--vllm", help="Python that has vLLM, see vllm.py")
    parser.add_argument("--policy", type=Path, help="a real one; then --trajectories are its own")
    parser.add_argument(
        "--trajectories", type=Path, help="8 to a prompt, those of a prompt together"
    )
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    sizes = "trajectories of the data path"
    parser.add_argument("--sizes", default="1000,10000,100000,1000000", help=sizes)
    parser.add_argument("--quick", action="store_true", help="the tiny model, a round of 8 rows")
    args = parser.parse_args()
    if args.quick:
        args.models, args.data, args.rounds = "tiny", "gsm", 1
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # the arms inherit it
    results = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = str(Path(folder) / "hf")
        for part in args.what or ["train", "sample"]:
            results += parts[part](args, Path(folder))
    commit = subprocess.check_output(
        ["git", "-C", HERE, "describe", "--always", "--dirty"], text=True
    )
    print(json.dumps({"commit": commit.strip(), "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
