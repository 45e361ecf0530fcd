"""Speed and memory of training."""

import resource
import sys
import time
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, Trainer

from topr.batching import Update


class Speed(Callback):
    """Logs `speed/…`. The clock runs from update to update, the wait for data included, but not
    during validation."""

    def __init__(self) -> None:
        self.tokens = 0.0  # of all trajectories of this rank, before this process too
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]
        self.seconds = state_dict["seconds"]

    def tokens_per_second(self, ranks: int) -> float:
        """Over the whole run and all ranks."""
        return ranks * self.tokens / max(self.seconds, 1e-9)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        model = pl_module.policy.model
        head = model.get_output_embeddings().weight
        tables = {model.get_input_embeddings().weight, head}
        self.head = head.numel()
        self.body = sum(p.numel() for p in model.parameters()) - sum(t.numel() for t in tables)
        bfloat16 = trainer.precision == "bf16-mixed"
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.peak = get_available_flops(pl_module.device, dtype)  # None of a CPU
        self.start(pl_module.device)

    def start(self, device: torch.device) -> None:
        self.began = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.start(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Update, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        seconds = now - self.began
        self.began = now
        nominal = sum(part.tokens.nominal for part in batch.micro_batches)
        computed = sum(len(part.tokens.input_ids_L) for part in batch.micro_batches)
        targets = sum(len(part.tokens.target_N) for part in batch.micro_batches)
        self.tokens += nominal
        self.seconds += seconds
        figures = {
            "speed/tokens_per_s": trainer.world_size * nominal / seconds,
            "speed/computed_share": computed / max(nominal, 1),
            "speed/peak_memory_gb": peak_memory(pl_module.device) / 1e9,
        }
        if self.peak:
            # 6 for each parameter and token: forward and backward, without attention
            flops = 6 * (self.body * computed + self.head * targets)
            figures["speed/utilisation"] = flops / seconds / self.peak
        pl_module.write_update(figures)


def peak_memory(device: torch.device) -> int:
    """Bytes: of a GPU since the last validation, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
