"""Memory of one rank while a sharded policy is loaded, as a multiple of what it keeps.

python tests/benchmark_loading.py

A random Llama of 220 million parameters, bfloat16 on disk and float32 in memory, on two CPU
processes. Counted is private memory above that after the imports. Pages of the mapped files are the
kernel's to drop and do not count.
"""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from topr.policy import sharding

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
}


def private_memory() -> int:
    """Bytes of resident memory that belong to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def measure(name: str) -> None:
    """Load on this rank and print what it took."""
    mesh = init_device_mesh("cpu", (2,))
    torch.distributed.barrier()
    start = private_memory()
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, private_memory())
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()
    policy = sharding.load_sharded(name, lambda policy: None, mesh, bfloat16=False)
    done.set()
    whole = sum(parameter.numel() for parameter in policy.parameters()) * 4
    shard = sum(parameter.to_local().numel() for parameter in policy.parameters()) * 4
    layer = (
        sum(parameter.numel() for parameter in policy.model.get_decoder().layers[0].parameters())
        * 4
    )
    if mesh.get_rank() == 0:
        print(f"weights {whole / 1e6:.0f} MB, a shard {shard / 1e6:.0f}, a layer {layer / 1e6:.0f}")
        used = peak - start
        share = (used - layer) / shard
        print(f"loading took {used / 1e6:.0f} MB = {share:.2f} shards + one layer")
    torch.distributed.destroy_process_group()


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        model.to(torch.bfloat16).save_pretrained(folder)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([sys.executable, *launch, __file__, folder], check=True)


if __name__ == "__main__":
    main()
