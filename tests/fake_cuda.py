"""The CUDA branch at the shapes of Llama 3 8B, without a GPU: forward, one-pass loss, prefill and decode on tensors
without data. Errors of device or dtype show, and every place where the host waits for the device is listed.

It needs a CUDA build of torch, in an environment of its own (several gigabytes): `pip install "torch===2.13.0"`, then
the other requirements, then `python tests/fake_cuda.py`.
"""

import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from topr.batching import MicroBatch, pack
from topr.callbacks import Monitor
from topr.distributed import Progress
from topr.losses import TOPR, LossOutput
from topr.module import StepOutput
from topr.policy import Policy, one_pass, shared_prompts
from topr.reproduce.making import make_tokenizer
from topr.sampling import Sampling, local

torch.cuda.amp.common.amp_definitely_not_available = lambda: False
torch.cuda.is_bf16_supported = lambda *_, **__: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
local.free_memory = lambda device: 40e9
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "unique_dim",
    "is_nonzero",
    "equal",
}


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for what the device computes, by the line that asks for it."""

    def __init__(self):
        super().__init__()
        self.places: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function._schema.name.removeprefix("aten::"), kwargs or {}
        on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
        if name in WAITS and on_gpu:
            self.add(name)
            if name == "_local_scalar_dense":
                return (
                    args[0].dtype.is_floating_point + 0
                )  # 0, or 1 where it is a truth or a number
        if name == "_to_copy" and on_gpu and str(kwargs.get("device", "cuda")) == "cpu":
            self.add("copy to the host")
        return function(*args, **kwargs)

    def add(self, what: str) -> None:
        frames = [
            f
            for f in traceback.extract_stack()
            if "topr/" in f.filename or "transformers/" in f.filename
        ]
        frame = frames[-1] if frames else traceback.extract_stack()[-4]
        self.places[
            f"{what}: {'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.line}"
        ] += 1


def main() -> None:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    sizes |= {"num_hidden_layers": int(sys.argv[1]) if sys.argv[1:] else 2, "vocab_size": 128256}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=8192))
    policy = Policy(model, make_tokenizer(), "8B")
    shared_prompts.register(shared_prompts.attend)
    model.set_attn_implementation(shared_prompts.NAME)
    waits = Waits()

    def to_list(tensor: torch.Tensor) -> list:
        waits.add("tolist")
        return np.zeros(tensor.shape, dtype=int).tolist()

    FakeTensor.tolist = to_list
    torch.autograd.grad = lambda outputs, inputs: (
        torch.zeros_like(inputs),
    )  # the engine wants a device
    grad_to = torch.Tensor.to
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False),
    ):
        model.to_empty(device="cuda")

        def to_gpu(tensor: torch.Tensor, *arguments, **keywords) -> torch.Tensor:
            if arguments and str(arguments[0]).startswith("cuda") and not tensor.is_cuda:
                if not keywords.get("non_blocking"):
                    waits.add("copy to the GPU")
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
            return grad_to(tensor, *arguments, **keywords)

        torch.Tensor.to = to_gpu
        made = torch.tensor
        torch.tensor = lambda data, dtype=None, device=None: to_gpu(
            made(data, dtype=dtype), device or "cpu"
        )
        prompts = [np.arange(1, 301)] * 8 + [np.arange(1, 201)]
        responses = [np.arange(1, 400 + 10 * i) for i in range(9)]
        tokens = pack(prompts, responses).to(torch.device("cuda"))
        n, ones = len(tokens.target_N), torch.ones(9, device="cuda")
        batch = MicroBatch(
            tokens, torch.zeros(n, device="cuda"), ones, ones, ones, ones[0], 1, ones
        )
        with waits:
            total, output, hidden = policy(tokens, one_pass.OnePass(TOPR(), batch, ones))
        print(
            f"training forward: loss {total.dtype} on {total.device}, hidden {hidden.dtype} {tuple(hidden.shape)}"
        )
        report("training forward", waits)
        output = LossOutput(*(torch.ones(9, device="cuda") for _ in output))
        last, monitor = torch.empty(hidden.shape, device="cuda"), Monitor()
        last.grad, monitor.speed = last.clone(), SimpleNamespace(count=lambda tokens: (0, 0.0))
        with waits:
            monitor.on_after_backward(
                None, SimpleNamespace(step_output=StepOutput(batch, output, last))
            )
        report("statistics of a micro-batch", waits)
        with torch.no_grad():
            rows = local.Rows(policy, Sampling(max_new_tokens=512), None, 16, Progress())
            drafts = [[local.Draft([], np.full(512, 0.5)) for _ in range(16)] for _ in range(4)]
            jobs = iter(
                [(prompt.tolist(), some) for prompt, some in zip(prompts[:4], drafts, strict=True)]
            )
            with waits:
                ready = rows.prefill(jobs)
                rows.append(rows.start(dict(enumerate(ready))), list(range(16)))
            report("prefill", waits)
            with waits:
                for _ in range(10):
                    rows.append(rows.step(), list(range(len(rows.drafts))))
            report("10 decode steps", waits)
        keys = rows.cache.layers[0].keys
        print(f"cache: keys {keys.dtype} {tuple(keys.shape)} on {keys.device}")


def report(name: str, waits: Waits) -> None:
    print(f"{name}: {sum(waits.places.values())} waits")
    for place, count in waits.places.most_common():
        print(f"  {count:4} x {place}")
    waits.places.clear()


if __name__ == "__main__":
    main()
