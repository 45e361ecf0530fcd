"""What only a GPU can show, in about 8 minutes and without network.

python tests/gpu.py [PART ...]      # one line of JSON for each figure
python tests/gpu.py --small         # every part with tiny models, without a GPU too

Each part is a process of its own, so that one which fails leaves the others their memory.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {  # hidden, layers, vocabulary, intermediate, heads, key and value heads, tied embeddings
    "1B": (2048, 16, 128256, 8192, 32, 8, True),  # Llama 3.2 1B
    "8B": (4096, 32, 128256, 14336, 32, 8, False),  # Llama 3 8B
    "small": (64, 2, 512, 128, 4, 2, True),
}
SECONDS = 150  # of a part


def record(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def make_policy(folder: Path, name: str) -> str:
    """A random Llama in bfloat16, made on the device; returns its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from data.arithmetic.imitation import make_tokenizer
    from topr.policy import Policy, export_policy

    path = folder / name
    if path.exists():
        return str(path)
    hidden, layers, vocabulary, intermediate, heads, groups, tied = SHAPES[name]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
    )
    with DEVICE:
        model = LlamaForCausalLM(config).bfloat16()
    export_policy(Policy(model, make_tokenizer(), name), path)
    return str(path)


def tests(folder: Path, small: bool) -> None:
    """The tests that are marked `gpu`; without one they are skipped."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "--timeout", "120"]
    raise SystemExit(subprocess.call(command, cwd=ROOT))


def attention(folder: Path, small: bool) -> None:
    """Attention over a row in which responses share prompts, against float64 with a mask over all
    pairs of tokens. Errors are relative to the largest value; `torch` is its own attention in the
    same precision, with that mask."""
    from torch.nn.functional import scaled_dot_product_attention

    from topr.batching import pack
    from topr.policy.shared_prompts import attend

    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    scale, width = (1, 16) if small else (20, 128)
    prompts = [np.arange(10 * scale)] * 4 + [np.arange(7 * scale)] + [np.arange(3 * scale)] * 3
    responses = [np.arange(n * scale) for n in (2, 19, 7, 11, 5, 13, 3, 17)]
    tokens = pack(prompts, responses)
    length = len(tokens.input_ids_L)
    causal = torch.ones(length, length).tril().bool()
    seen = torch.zeros_like(causal)
    for start, end, first, last in tokens.spans:
        seen[start:end, first:last] = True
        seen[start:end, start:end] = causal[start:end, start:end]
    position = tokens.position_ids_L
    distance = position[:, None] - position
    for heads, groups, window in ((32, 8, None), (8, 1, 8 * scale)):
        mask = (seen if window is None else seen & (distance < window)).to(DEVICE)
        torch.manual_seed(0)
        query = torch.randn(1, heads, length, width, device=DEVICE)
        key_value = torch.randn(2, 1, groups, length, width, device=DEVICE)
        upward = torch.randn(1, heads, length, width, device=DEVICE)

        def run(kind: torch.dtype, ours: bool) -> list[torch.Tensor]:
            """The result and the gradients of queries, keys and values."""
            given = [x.to(kind).requires_grad_() for x in (query, *key_value)]  # noqa: B023
            if ours:
                spans = tokens.spans
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=kind == torch.bfloat16):
                    out, _ = attend(None, *given, None, width**-0.5, spans, window)  # noqa: B023
                out = out.transpose(1, 2)
            else:
                out = scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True)  # noqa: B023
            return [out.detach(), *torch.autograd.grad(out, given, upward.to(out.dtype))]  # noqa: B023

        exact = run(torch.float64, False)
        ours = [relative_error(*pair) for pair in zip(run(dtype, True), exact, strict=True)]
        torchs = [relative_error(*pair) for pair in zip(run(dtype, False), exact, strict=True)]
        record(heads=heads, groups=groups, window=window, errors=ours, torch=torchs)
        if any(mine > 2 * other + 1e-5 for mine, other in zip(ours, torchs, strict=True)):
            raise SystemExit("an error is more than twice that of torch")


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).abs().max() / exact.abs().max()).item()


def make_trajectories(path: Path, count: int, length: int, vocabulary: int) -> None:
    """Random trajectories, 8 to a prompt."""
    from topr.trajectories import Trajectory, write_trajectories

    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        if i % 8 == 0:
            prompt = rng.integers(0, vocabulary, rng.integers(length // 2, 2 * length)).tolist()
        response = rng.integers(0, vocabulary, rng.integers(length // 2, 3 * length)).tolist()
        row = Trajectory(
            prompt_id=str(i // 8),
            group=str(i // 8),
            prompt="prompt",
            prompt_ids=prompt,
            response="response",
            response_ids=response,
            ref_logprobs=[-np.log(vocabulary)] * len(response),
            reward=(-1.0) ** i,
            finished=True,
        )
        rows.append(row)
    write_trajectories(path, rows, {})


def train(folder: Path, small: bool, name: str, sharded=False) -> None:
    """Training in bf16-mixed: the median of all updates but the first two."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import ModelParallelStrategy

    from topr.callbacks.speed import Speed
    from topr.datamodule import TrajectoryDataModule
    from topr.losses import TOPR
    from topr.module import PolicyModule
    from topr.optim import Adafactor
    from topr.policy import LoRA
    from topr.tasks import Arithmetic

    large = name == "8B"
    policy = make_policy(folder, "small" if small else name)
    data = folder / f"{os.getpid()}.parquet"
    make_trajectories(data, 16 * 6, 4 if small else 200, 500 if small else 128000)
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1}
    trainer = Trainer(
        devices=1,
        strategy=ModelParallelStrategy(**sizes) if sharded else "auto",
        precision="bf16-mixed",
        max_epochs=1,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Speed()],
    )
    optimizer: Any = Adafactor if large else torch.optim.AdamW
    scarce = DEVICE.type == "cuda" and torch.cuda.get_device_properties(0).total_memory < 130e9
    module = PolicyModule(
        policy,
        Arithmetic(),
        TOPR(),
        partial(optimizer, lr=1e-6),
        lora=LoRA() if large and scarce else None,
        activation_checkpointing=large,
    )
    tokens = 500 if small else 8192
    settings = {"batch_size": 16, "whole_groups": True, "microbatch_tokens": tokens}
    task = Arithmetic()
    trainer.fit(module, TrajectoryDataModule(policy, task, train=str(data), **settings))
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:
        measured = [row for row in csv.DictReader(file) if row["speed/tokens_per_s"]]
    figures = {}
    for key in ("tokens_per_s", "peak_memory_gb"):
        values = [float(row.get(f"speed/{key}", "nan")) for row in measured[2:]]
        figures[key] = float(np.median(values))
    record(model=name, updates=len(measured), **figures)


def sample(folder: Path, small: bool) -> None:
    """Sampling with the 1B model in bf16-mixed. A token ends a response with probability 1/64; at
    most 256 tokens."""
    from topr.policy import load_policy
    from topr.sampling import LocalSampler, Sampling

    with DEVICE:
        policy = load_policy(make_policy(folder, "small" if small else "1B")).eval()
    ends = policy.model.config.vocab_size // 64
    policy.model.generation_config.eos_token_id = list(range(ends))
    how = Sampling(max_new_tokens=16 if small else 256)
    for rows in (4, 8) if small else (64, 512):
        prompts = np.random.default_rng(0).integers(ends, 64 * ends, (rows, 8 if small else 128))
        began = time.perf_counter()
        with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
            groups = LocalSampler(rows).sample(policy, prompts.tolist(), 4, how, 0)
        tokens = sum(len(response.ids) for group in groups for response in group)
        speed = tokens / (time.perf_counter() - began)
        record(rows=rows, responses=4 * len(groups), tokens=tokens, tokens_per_s=speed)


PARTS = {
    "tests": tests,
    "attention": attention,
    "1B": partial(train, name="1B"),
    "sharded": partial(train, name="1B", sharded=True),
    "8B": partial(train, name="8B"),
    "sample": sample,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="tiny models, without a GPU too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # in a part's process
    args = parser.parse_args()
    if args.folder:
        return PARTS[args.parts[0]](args.folder, args.small)
    if not args.small and DEVICE.type == "cpu":
        raise SystemExit("no GPU; --small tries every part without one")
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    record(device=name, torch=torch.__version__)
    failed = []
    options = ["--small"] if args.small else []
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts or PARTS:
            record(part=part)
            command = ["timeout", str(SECONDS), sys.executable, __file__, part, *options]
            if subprocess.run([*command, "--folder", folder]).returncode:
                failed.append(part)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
