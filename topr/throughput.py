"""Tokens per second, utilisation, padding and memory of training, from the batches that pass."""

import resource
import time

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import nn

from topr.logprobs import Tokens


class Throughput:
    """Counts the training batches of this rank; `read` reports those since the last reading.

    FLOPs of a trajectory: 6 x (parameters without embeddings) x tokens, 6 x vocabulary x hidden x response tokens, and
    6 x layers x hidden x tokens^2 of causal attention.

    Args:
        model: the policy.
    """

    def __init__(self, model: nn.Module):
        config = model.config.get_text_config()
        tables = {id(m.weight): m.weight.numel() for m in (model.get_input_embeddings(), model.get_output_embeddings())}
        self.body = sum(p.numel() for p in model.parameters()) - sum(tables.values())
        self.projection = model.get_output_embeddings().weight.numel()
        self.attention = config.num_hidden_layers * config.hidden_size
        self.device = next(model.parameters()).device
        self.peak = _peak_flops(self.device)
        self.all_tokens, self.all_seconds = 0, 0.0
        self.reset()
        self.start()

    def reset(self) -> None:
        """Start a new reading."""
        self.tokens = self.slots = self.flops = 0
        self.seconds = 0.0

    def start(self) -> None:
        """Start the clock; it runs from batch to batch, the wait for data included."""
        self.began = time.perf_counter()

    def count(self, tokens: Tokens) -> None:
        """A training batch has ended."""
        seconds = time.perf_counter() - self.began
        rows, columns = tokens.input_ids_BL.shape
        self.tokens, self.slots = self.tokens + tokens.real, self.slots + rows * columns
        # length buckets: every trajectory is about as long as its batch is wide
        per_token = self.body + self.attention * columns
        self.flops += 6 * (per_token * tokens.real + self.projection * len(tokens.target_N))
        self.seconds += seconds
        self.all_tokens, self.all_seconds = self.all_tokens + tokens.real, self.all_seconds + seconds
        self.start()

    def rate(self, ranks: int) -> float:
        """Tokens per second of the whole run."""
        return ranks * self.all_tokens / max(self.all_seconds, 1e-9)

    def read(self, ranks: int) -> dict[str, float]:
        """The metrics since the last reading."""
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = max(self.seconds, 1e-9)
        metrics = {
            "speed/tokens_per_s": ranks * self.tokens / seconds,
            "speed/utilisation": self.flops / seconds / self.peak,
            "speed/padding_share": 1 - self.tokens / max(self.slots, 1),
            "speed/peak_memory_gb": memory / 1e9,
        }
        self.reset()
        return metrics


def _peak_flops(device: torch.device) -> float:
    """FLOP/s of the device: its data sheet's in the current precision, or a measured matrix product's."""
    if device.type == "cuda":
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
        if known := get_available_flops(device, dtype):
            return float(known)
    matrix, best = torch.ones(1024, 1024, device=device), float("inf")
    for _ in range(5):
        began = time.perf_counter()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * 1024**3 / best
