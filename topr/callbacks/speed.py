"""Speed of training, and on a GPU its memory."""

import time

import torch
from lightning.pytorch import Callback

from topr.batching import Update


class Speed(Callback):
    """Logs `speed/…`. The clock runs from update to update, the wait for data included, but not
    during validation."""

    def start(self, trainer, pl_module):
        self.began = time.perf_counter()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    on_train_start = start
    on_validation_end = start

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: Update, *_):
        now = time.perf_counter()
        nominal = sum(part.tokens.nominal for part in batch.micro_batches)
        computed = sum(len(part.tokens.input_ids_L) for part in batch.micro_batches)
        figures = {
            "speed/tokens_per_s": trainer.world_size * nominal / (now - self.began),
            "speed/computed_share": computed / max(nominal, 1),
        }
        self.began = now
        if pl_module.device.type == "cuda":
            figures["speed/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        pl_module.log_at_update(figures)
