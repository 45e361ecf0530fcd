"""Check `topr.policy.memory` against what torch allocates: `python tests/memory.py` prints estimate and measurement.

`python tests/memory.py fake` does so for 1B and 8B, on tensors without data; `table` prints the table of the README.
"""

import gc
import os
import sys
import tempfile
import weakref
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

from topr.batching import MicroBatch, pack
from topr.datamodule import TrajectoryDataModule
from topr.losses import TOPR
from topr.module import PolicyModule
from topr.optim import Adafactor
from topr.policy import LoRA, Policy, export_policy, memory, one_pass, shared_prompts
from topr.reproduce.making import make_tokenizer
from topr.tasks import Arithmetic
from topr.trajectories import Trajectory, write_trajectories

SIZES = {  # of validation: hidden, layers, vocabulary
    "10M": (256, 8, 8000), "30M": (512, 6, 12000), "100M": (768, 12, 16000), "220M": (1024, 14, 24000),
}  # fmt: skip
SHAPES = {  # of the table: hidden, layers, vocabulary, intermediate, heads, key and value heads, tied embeddings
    "1B": (2048, 16, 128256, 8192, 32, 8, True),  # Llama 3.2 1B
    "8B": (4096, 32, 128256, 14336, 32, 8, False),  # Llama 3 8B
    "70B": (8192, 80, 128256, 28672, 64, 8, False),  # Llama 3 70B
}
DEVICES = [(1, 80), (1, 141), (8, 80), (16, 80)]
CASES = [
    {}, {"checkpointing": True}, {"checkpointing": "selective"}, {"lora": True}, {"adafactor": True},
    {"lora": True, "checkpointing": True}, {"bfloat16": True}, {"bfloat16": True, "checkpointing": True},
]  # fmt: skip

FAKE = [
    ("8B", 8192, {"checkpointing": True, "adafactor": True}), ("8B", 16384, {"checkpointing": True, "adafactor": True}),
    ("8B", 16384, {"checkpointing": True, "lora": True}), ("8B", 4096, {"lora": True}), ("1B", 16384, {}),
    ("1B", 16384, {"checkpointing": True}), ("1B", 2048, {"checkpointing": True, "adafactor": True}),
]  # fmt: skip


class Allocated(TorchDispatchMode):
    """Bytes of all storages that torch holds, and their peak."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = WeakIdKeyDictionary(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves((args, kwargs, result)):
            if (
                isinstance(tensor, torch.Tensor)
                and (storage := tensor.untyped_storage()) not in self.known
            ):
                self.known[storage] = None
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def config(
    hidden: int, layers: int, vocabulary: int, intermediate=0, heads=0, groups=0, tied=False
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, tie_word_embeddings=tied,
        intermediate_size=intermediate or hidden * 8 // 3 // 64 * 64, num_attention_heads=heads or hidden // 64,
        num_key_value_heads=groups or hidden // 128, max_position_embeddings=8192,
    )  # fmt: skip


def validate(
    folder: Path, name: str, *, checkpointing=False, lora=False, adafactor=False, bfloat16=False
) -> float:
    """Two updates of two micro-batches each; estimated over allocated bytes."""
    policy, file = folder / name, folder / "train.parquet"
    rng, trajectories = np.random.default_rng(0), []
    if not policy.exists():
        export_policy(
            Policy(LlamaForCausalLM(config(*SIZES[name])), make_tokenizer(), name), policy
        )
    for i in range(12):
        prompt, response = (
            rng.integers(0, 10, int(rng.integers(100, 300))).tolist() for _ in range(2)
        )
        sampled = ("prompt", prompt, "response", response, [-5.0] * len(response))
        trajectories.append(Trajectory(str(i), str(i), *sampled, reward=(-1.0) ** i, finished=True))
    write_trajectories(file, trajectories, {})
    optimizer = partial(Adafactor if adafactor else torch.optim.AdamW, lr=1e-5)
    module = PolicyModule(
        str(policy), Arithmetic(), TOPR(), optimizer, lora=LoRA() if lora else None,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    data = TrajectoryDataModule(
        str(policy), TOPR(), Arithmetic(), str(file), batch_size=6, microbatch_tokens=2048
    )
    allocated, found = Allocated(), {}

    class Measure(Callback):
        def on_train_start(self, trainer, module):
            largest = max(
                (b.tokens for b in data.train_dataloader().batches),
                key=lambda tokens: len(tokens.input_ids_L),
            )
            settings = {"checkpointing": checkpointing, "bfloat16": bfloat16}
            settings |= {
                "tokens": len(largest.input_ids_L),
                "response_tokens": len(largest.target_N),
            }
            found.update(
                memory.peak_memory(
                    module.policy,
                    memory.state_size(optimizer),
                    microbatches=data.microbatches(0),
                    **settings,
                )
            )
            allocated.__enter__()
            sum(parameter.sum() for parameter in module.parameters())  # seen by now

        def on_train_end(self, trainer, module):
            allocated.__exit__(None, None, None)

    Trainer(
        accelerator="cpu", max_epochs=1, precision="bf16-mixed" if bfloat16 else "32-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        callbacks=[Measure()],
    ).fit(module, data)  # fmt: skip
    settings = {
        "checkpointing": checkpointing,
        "lora": lora,
        "adafactor": adafactor,
        "bfloat16": bfloat16,
    }
    return compare(name, settings, found["fit"], allocated.peak)


def fake(name: str, tokens: int, *, checkpointing=False, lora=False, adafactor=False) -> float:
    """Two updates of two micro-batches in bf16-mixed, on tensors without data; estimated over allocated bytes."""
    with torch.device("meta"):
        policy = Policy(LlamaForCausalLM(config(*SHAPES[name])), make_tokenizer(), name)
    shared_prompts.register(shared_prompts.attend)
    policy.model.set_attn_implementation(shared_prompts.NAME)
    if lora:
        LoRA().add_to(policy)
    if checkpointing:
        policy.model.activation_checkpointing_enable({"use_reentrant": False})
    policy.train()
    # fused: the others read the number of the step, which has no data
    make = (
        partial(Adafactor, lr=1e-6)
        if adafactor
        else partial(torch.optim.AdamW, lr=1e-6, fused=True)
    )
    state, allocated = memory.state_size(make), Allocated()
    part = tokens // 9  # a prompt and eight responses
    row = pack([np.zeros(part, dtype=int)] * 8, [np.zeros(part, dtype=int)] * 8)
    settings = {
        "tokens": 9 * part,
        "response_tokens": 8 * part,
        "microbatches": 2,
        "bfloat16": True,
    }
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ):
        policy.model.to_empty(device="cpu")
        policy.model.tie_weights()  # `to_empty` unties them
        found = memory.peak_memory(policy, state, checkpointing=checkpointing, **settings)
        with allocated:
            trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
            sum(parameter.sum() for parameter in policy.parameters())  # seen by now
            optimizer, ones_B, zeros_N = make(trained), torch.ones(8), torch.zeros(8 * part)
            tensors = {
                key: value
                for key, value in row._asdict().items()
                if isinstance(value, torch.Tensor)
            }
            fakes = row._replace(**{key: mode.from_tensor(value) for key, value in tensors.items()})
            batch = MicroBatch(fakes, zeros_N, ones_B, ones_B, ones_B, ones_B[0], 2, ones_B)
            for i in range(4):
                policy(fakes, one_pass.OnePass(TOPR(), batch, ones_B))[0].backward()
                if i % 2:
                    torch.nn.utils.clip_grad_norm_(trained, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    settings = {"checkpointing": checkpointing, "lora": lora, "adafactor": adafactor}
    return compare(f"{name} {tokens}", settings, found["fit"], allocated.peak)


def compare(name: str, settings: dict[str, bool | str], estimated: float, measured: float) -> float:
    about = ", ".join(f"{key} {value}" for key, value in settings.items() if value) or "plain"
    ratio, sizes = (
        estimated / measured,
        f"measured {measured / 1e9:6.2f} GB, estimated {estimated / 1e9:6.2f} GB",
    )
    print(f"{name:8} {about:40} {sizes}, ratio {ratio:.3f}", flush=True)
    return ratio


def estimate(folder: Path, name: str, devices: int, lora: bool) -> dict[str, float]:
    """For the settings of configs/gsm8k.yaml, with one_gpu.yaml or fsdp.yaml."""
    if not folder.exists():
        config(*SHAPES[name]).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        (folder / "model.safetensors").touch()  # not read
    optimizer = partial(torch.optim.AdamW, lr=1e-5) if lora else partial(Adafactor, lr=1e-6)
    tokens = 8192 if devices == 1 else 16384
    shared_prompts.register(shared_prompts.attend)
    return memory.estimate(
        str(folder), LoRA().add_to if lora else lambda policy: None, optimizer, torch.device("cpu"), padded=False,
        tokens=tokens, response_tokens=tokens, microbatches=2, bfloat16=True, checkpointing=True, devices=devices,
        sharded=devices > 1,
    )  # fmt: skip


def table(folder: Path) -> None:
    print("| | " + " | ".join(f"{count} × {size} GB" for count, size in DEVICES) + " |")
    print("|---" * (1 + len(DEVICES)) + "|")
    for name in SHAPES:
        cells = []
        for count, size in DEVICES:
            peaks = [
                max(map(estimate(folder / name, name, count, lora).get, ("fit", "sample")))
                for lora in (False, True)
            ]
            cells.append(
                ", ".join(f"{peak / 1e9:.0f}" + "*" * (peak > 0.92e9 * size) for peak in peaks)
            )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:] == ["table"]:
            return table(Path(folder))
        if sys.argv[1:] == ["fake"]:
            for name, tokens, case in FAKE:
                fake(name, tokens, **case)
            return
        for name, case in product(sys.argv[1:] or SIZES, CASES):
            gc.collect()
            validate(Path(folder), name, **case)


if __name__ == "__main__":
    main()
