"""Check `topr.policy.memory` against what torch allocates in two updates of two micro-batches.

python tests/memory.py          # Llamas of 10M to 220M on this CPU
python tests/memory.py fake     # the shapes of 1B and 8B, on tensors without data
python tests/memory.py table    # the table of the README
"""

import gc
import os
import sys
import tempfile
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from topr.reproduce.making import make_tokenizer
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

from topr.batching import Tokens, pack
from topr.losses import TOPR
from topr.optim import Adafactor
from topr.policy import LoRA, Policy, memory, shared_prompts

SIZES = {  # hidden, layers, vocabulary
    "10M": (256, 8, 8000),
    "30M": (512, 6, 12000),
    "100M": (768, 12, 16000),
    "220M": (1024, 14, 24000),
}
SHAPES = {  # hidden, layers, vocabulary, intermediate, heads, key and value heads, tied embeddings
    "1B": (2048, 16, 128256, 8192, 32, 8, True),  # Llama 3.2 1B
    "8B": (4096, 32, 128256, 14336, 32, 8, False),  # Llama 3 8B
    "70B": (8192, 80, 128256, 28672, 64, 8, False),  # Llama 3 70B
}
DEVICES = [(1, 80), (1, 141), (8, 80), (16, 80)]  # of the table: number, GB
CASES: list[dict[str, Any]] = [
    {},
    {"checkpointing": True},
    {"checkpointing": "selective"},
    {"lora": True},
    {"adafactor": True},
    {"lora": True, "checkpointing": True},
    {"bfloat16": True},
    {"bfloat16": True, "checkpointing": True},
]
FAKE: list[tuple[str, int, dict[str, Any]]] = [  # policy, tokens of a micro-batch
    ("8B", 8192, {"checkpointing": True, "adafactor": True}),
    ("8B", 16384, {"checkpointing": True, "adafactor": True}),
    ("8B", 16384, {"checkpointing": True, "lora": True}),
    ("8B", 4096, {"lora": True}),
    ("1B", 16384, {}),
    ("1B", 16384, {"checkpointing": True}),
    ("1B", 2048, {"checkpointing": True, "adafactor": True}),
]


class Allocated(TorchDispatchMode):
    """Bytes of all storages that torch holds, and their peak."""

    def __init__(self):
        super().__init__()
        self.known = WeakIdKeyDictionary()
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage) -> None:
        if storage not in self.known:
            self.known[storage] = None
            self.add(storage.nbytes())
            weakref.finalize(storage, self.add, -storage.nbytes())

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def config(
    hidden: int, layers: int, vocabulary: int, intermediate=0, heads=0, groups=0, tied=False
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate or hidden * 8 // 3 // 64 * 64,
        num_attention_heads=heads or hidden // 64,
        num_key_value_heads=groups or hidden // 128,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )


def compare(
    name: str,
    rows: list[Tokens],
    *,
    checkpointing: bool | str = False,
    lora: bool = False,
    adafactor: bool = False,
    bfloat16: bool = False,
    fake: bool = False,
) -> float:
    """Estimated over allocated bytes for micro-batches `rows`."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config(*(SIZES | SHAPES)[name]))
    policy = Policy(model, make_tokenizer(), name)
    shared_prompts.register(shared_prompts.attend)
    model.set_attn_implementation(shared_prompts.NAME)
    if lora:
        LoRA().add_to(policy)
    if checkpointing == "selective":
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        context = partial(create_selective_checkpoint_contexts, products)
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    elif checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    # fused: the others read the number of the step, which has no data
    optimizer = partial(torch.optim.AdamW, lr=1e-6, fused=True)
    if adafactor:
        optimizer = partial(Adafactor, lr=1e-6)
    state = memory.state_size(optimizer)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        model.to_empty(device="cpu")
        model.tie_weights()  # `to_empty` unties them
        model.train()
        estimated = memory.peak_memory(
            policy,
            state,
            tokens=max(len(row.input_ids_L) for row in rows),
            response_tokens=max(len(row.target_N) for row in rows),
            microbatches=len(rows),
            bfloat16=bfloat16,
            checkpointing=checkpointing,
        ).peak
        allocated = two_updates(policy, optimizer, rows, bfloat16)
    ratio = estimated / allocated
    settings = f"checkpointing {checkpointing}, {lora=}, {adafactor=}, {bfloat16=}"
    sizes = f"allocated {allocated / 1e9:6.2f} GB, estimated {estimated / 1e9:6.2f} GB"
    print(f"{name:5} {settings}: {sizes}, ratio {ratio:.3f}", flush=True)
    return ratio


def two_updates(policy: Policy, optimizer: Any, rows: list[Tokens], bfloat16: bool) -> int:
    """The most bytes allocated."""
    loss = TOPR()
    with Allocated() as allocated:
        for parameter in policy.parameters():
            parameter.sum()  # seen by now
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        stepped = optimizer(trained)
        for _ in range(2):
            for tokens in rows:
                with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16, cache_enabled=True):
                    log_probs_N = policy.log_probs(tokens)
                advantage_B = torch.ones(len(tokens.length_B))
                ref_N = torch.zeros(len(tokens.target_N))
                loss(log_probs_N, ref_N, tokens.length_B, advantage_B).loss_B.sum().backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            stepped.step()
            stepped.zero_grad()
    return allocated.peak


def validate(name: str, **settings: Any) -> float:
    """Estimated over allocated bytes on this CPU, for six prompts with one response each."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(2):
        ids = [rng.integers(0, 10, rng.integers(100, 300)) for _ in range(6)]
        rows.append(pack(ids[:3], ids[3:]))
    return compare(name, rows, **settings)


def without_data(name: str, tokens: int, **settings: Any) -> float:
    """Estimated over allocated bytes in bf16-mixed, for a prompt with eight responses."""
    ids = np.zeros(tokens // 9, dtype=int)
    row = pack([ids] * 8, [ids] * 8)
    return compare(name, [row, row], bfloat16=True, fake=True, **settings)


def estimate(folder: Path, name: str, devices: int, lora: bool) -> memory.Memory:
    """For the settings of configs/gsm8k.yaml, with one_gpu.yaml or fsdp.yaml."""
    if not folder.exists():
        config(*SHAPES[name]).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        (folder / "model.safetensors").touch()  # not read
    prepare = LoRA().add_to if lora else lambda policy: None
    optimizer = partial(torch.optim.AdamW, lr=1e-5) if lora else partial(Adafactor, lr=1e-6)
    tokens = 8192 if devices == 1 else 16384
    shared_prompts.register(shared_prompts.attend)
    return memory.estimate(
        str(folder),
        prepare,
        optimizer,
        torch.device("cpu"),
        padded=False,
        tokens=tokens,
        response_tokens=tokens,
        microbatches=2,
        bfloat16=True,
        checkpointing=True,
        devices=devices,
        sharded=devices > 1,
    )


def table(folder: Path) -> None:
    """GB of each policy and number of GPUs: all weights, then LoRA; * above 92% of the GPU."""
    print("| | " + " | ".join(f"{count} × {size} GB" for count, size in DEVICES) + " |")
    print("|---" * (1 + len(DEVICES)) + "|")
    for name in SHAPES:
        cells = []
        for count, size in DEVICES:
            figures = []
            for lora in (False, True):
                peak = estimate(folder / name, name, count, lora).peak / 1e9
                figures.append(f"{peak:.0f}*" if peak > 0.92 * size else f"{peak:.0f}")
            cells.append(", ".join(figures))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    if sys.argv[1:] == ["table"]:
        with tempfile.TemporaryDirectory() as folder:
            table(Path(folder))
    elif sys.argv[1:] == ["fake"]:
        for name, tokens, settings in FAKE:
            without_data(name, tokens, **settings)
    else:
        for name in SIZES:
            for settings in CASES:
                gc.collect()
                validate(name, **settings)


if __name__ == "__main__":
    main()
