"""Speed of training, and on a GPU its memory."""

import time

import torch
from lightning.pytorch import Callback

from topr.batching import Update


class Speed(Callback):
    """Logs `speed/…`. The clock runs from update to update, the wait for data included, but not
    during validation."""

    def __init__(self):
        self.tokens = 0  # of all ranks, estimated from this one
        self.seconds = 1e-9

    @property
    def tokens_per_second(self) -> float:
        """Since the run was started or resumed, of all ranks."""
        return self.tokens / self.seconds

    def start(self, trainer, pl_module):
        self.began = time.perf_counter()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    on_train_start = start
    on_validation_end = start

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: Update, *_):
        now = time.perf_counter()
        seconds = now - self.began
        self.began = now
        nominal = sum(part.tokens.nominal for part in batch.micro_batches)
        computed = sum(len(part.tokens.input_ids_L) for part in batch.micro_batches)
        tokens = trainer.world_size * nominal
        self.tokens += tokens
        self.seconds += seconds
        figures = {
            "speed/tokens_per_s": tokens / seconds,
            "speed/computed_share": computed / max(nominal, 1),
        }
        if pl_module.device.type == "cuda":
            figures["speed/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        pl_module.log_at_update(figures)
