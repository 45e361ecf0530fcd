"""What training logs: loss, log-ratios, gradient, speed. And the checks of log mu and of non-finite numbers."""

import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from topr.batching import Tokens
from topr.distributed import Progress, gather, same_error_on_all_ranks
from topr.io import DivergedError, InputError, first_line
from topr.losses import advantage_share, positives, silent_groups, sum_tokens
from topr.policy import Policy, policy_fingerprint
from topr.policy.memory import estimate

MAX_LOG_RATIO = (
    1e-2  # of any sequence before the first update, when mu is this policy scored in float32
)
MEDIAN_TOKEN_LOG_RATIO = 2e-2  # likewise per token, when either precision is bfloat16
# FLOP/s in bfloat16 by the data sheets, without sparsity; the first name that the device's contains
BFLOAT16_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
}
BFLOAT16_PEAKS |= {"A100": 312e12, "L40S": 362e12}
LAYOUT = Path(__file__).with_name("board.yaml")
COLUMNS = [
    "real",
    "trajectory",
    "reward",
    "advantage",
    "length",
]  # per trajectory; then those of `LossOutput`
COLUMNS += ["loss", "objective", "log_ratio", "weight", "truncated", "gradient"]
FIGURES: dict[str, Any] = {
    "train/loss": "loss {:.3f}".format,
    "val/pass@1": "pass@1 {:.3f}".format,
}  # of the bar
FIGURES |= (
    ON_GPU := {"speed/utilisation": "MFU {:.0%}".format, "speed/peak_memory_gb": "{:.0f} GB".format}
)
FIGURES["speed/tokens_per_s"] = lambda value: Progress.format_sizeof(value, " tok/s")


class Monitor(Callback):
    """Collects statistics of each trajectory from the micro-batches of an update and logs them for the global batch."""

    def __init__(self):
        self.bar = Progress()
        self.rows: list[
            Tensor
        ] = []  # [columns, B] of each micro-batch; float64: float32 would round row numbers
        self.clock = np.zeros(2)  # tokens and seconds of training, before this process too
        self.max_abs_log_ratio: float | None = None  # before the first update
        self.watched: tuple[Tensor, Tensor] | None = (
            None  # a parameter and its value before the first update
        )

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock.tolist(), "max_abs_log_ratio": self.max_abs_log_ratio}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock, self.max_abs_log_ratio = np.array(state["clock"]), state["max_abs_log_ratio"]

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Print the estimated memory of training, and warn if the GPU has less."""
        trainer.datamodule.padded = module.policy.padded
        try:
            found = {name: size / 1e9 for name, size in estimate_training(trainer, module)._asdict().items()}
        except Exception as error:  # whatever a model raises, see `estimate`
            rank_zero_info(f"the memory of training cannot be estimated: {first_line(error)}")
            return
        peak, device = (sum(found.values()) - found["sampling"]), trainer.strategy.root_device
        parts = ", ".join(
            f"{name} {found[name]:.2g}"
            for name in ("weights", "gradients", "optimizer", "activations")
        )
        rank_zero_info(
            f"estimated memory: {peak:.2g} GB a device ({parts}), without the rows of sampling"
        )
        if device.type == "cuda" and peak > (
            there := torch.cuda.get_device_properties(device).total_memory / 1e9
        ):
            remedy = "lower data.microbatch_tokens, add configs/lora.yaml, or shard it with configs/fsdp.yaml"
            rank_zero_warn(
                f"training takes about {peak:.0f} GB, and this GPU has {there:.0f}: {remedy}"
            )

    def on_train_start(self, trainer: Any, module: Any) -> None:
        with trainer.precision_plugin.forward_context():  # the precision decides the device's peak
            self.speed = Throughput(module.policy)
        if trainer.is_global_zero and hasattr(
            getattr(trainer.logger, "experiment", None), "add_custom_scalars"
        ):
            trainer.logger.experiment.add_custom_scalars(yaml.safe_load(LAYOUT.read_text()))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.speed.start()  # the clock counts training only
            self.on_train_batch_end(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Show the progress, but not before the end of the first update, which may print messages."""
        step, found = trainer.global_step, trainer.callback_metrics
        if step and self.bar.disable:
            self.bar = Progress(total=None, unit="", first=step)
        self.bar.desc = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}".removesuffix(
            "/-1"
        )
        hidden = () if self.speed.device.type == "cuda" else ON_GPU
        names = [name for name in FIGURES if name in found and name not in hidden]
        self.bar.postfix = ", ".join(FIGURES[name](float(found[name])) for name in names)
        self.bar.total = max(
            trainer.estimated_stepping_batches, step
        )  # epochs of whole groups can differ in size
        self.bar.update(step - self.bar.n)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Split the squared gradient by trajectory, exactly: each hidden state belongs to one."""
        (batch, output, log_probs_N), module.step_output = module.step_output, None
        length_B = batch.tokens.length_B
        gradient_B = sum_tokens(log_probs_N.grad.float().square(), length_B)
        columns = (
            batch.real_B,
            batch.trajectory_B,
            batch.reward_B,
            batch.advantage_B,
            length_B,
            *output,
            gradient_B,
        )
        self.rows.append(torch.stack([column.detach().double() for column in columns]))
        self.clock += self.speed.count(batch.tokens)

    def on_before_optimizer_step(
        self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check every update and the first two batches; log every `log_every_n_steps`."""
        values = np.concatenate(gather(torch.cat(self.rows, dim=1).cpu().numpy()), axis=1)
        self.rows = []
        values = values[:, values[0] > 0]  # no filler
        rows = dict(zip(COLUMNS, values.astype(np.float32), strict=True)) | {
            "trajectory": values[1].astype(int)
        }
        step = trainer.global_step
        total = torch.nn.utils.get_total_norm(
            p.grad for p in module.parameters() if p.grad is not None
        )
        norm = float(
            total.full_tensor() if isinstance(total, DTensor) else total
        )  # over all shards, before clipping
        check_finite(trainer, rows, norm)
        if step == 0:
            trained = [
                p
                for name, p in module.named_parameters()
                if p.requires_grad and "lora_A" not in name
            ]
            last = min(
                trained[-2:], key=torch.numel
            )  # not the output projection; lora_A has no gradient at first
            self.max_abs_log_ratio = float(np.abs(rows["log_ratio"]).max())
            if not trainer.lr_scheduler_configs:  # a warm-up starts at 0
                self.watched = last, last.detach().clone()
            check_reference(trainer, module.policy.name, rows)
        elif self.watched is not None:
            if torch.equal(*self.watched):
                warnings.warn(
                    "the policy has not moved in the first update: raise the learning rate",
                    stacklevel=1,
                )
            self.watched = None
        if not trainer.log_every_n_steps or (step + 1) % trainer.log_every_n_steps:
            return
        of_group = module.loss.grouping == "group"
        statistics = training_statistics(rows, of_group) | {"gradient/norm": norm}
        statistics["train/lr"] = optimizer.param_groups[0]["lr"]
        statistics |= self.speed.read(trainer.world_size)
        if of_group:
            silent = silent_groups(rows["advantage"], trainer.datamodule.group[rows["trajectory"]])
            statistics["train/groups_without_signal"] = silent
        # Lightning's own logging takes a fifth of a tiny model's time, and repeats an earlier value of an absent metric
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in statistics.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(statistics, step)
        module.log(
            "loss", statistics["train/loss"], prog_bar=True, logger=False, rank_zero_only=True
        )
        if trainer.is_global_zero and hasattr(
            getattr(trainer.logger, "experiment", None), "add_histogram"
        ):
            signs = {
                "positives": positives(rows["advantage"], of_group),
                "negatives": rows["advantage"] < 0,
            }
            for sign, chosen in signs.items():
                if chosen.any():
                    trainer.logger.experiment.add_histogram(
                        f"log_ratio/{sign}", rows["log_ratio"][chosen], step
                    )


def estimate_training(trainer: Any, module: Any) -> dict[str, float]:
    """`estimate` for the policy, data and settings that are about to train."""
    data, device = trainer.datamodule, trainer.strategy.root_device
    settings = {
        "checkpointing": module.activation_checkpointing,
        "reshard": module.reshard_after_forward,
    }
    settings |= {
        "devices": trainer.world_size,
        "sharded": module.device_mesh is not None,
        "padded": data.padded,
    }
    settings |= data.largest_microbatch() | {"bfloat16": trainer.precision == "bf16-mixed"}
    return estimate(module.policy_name, module.prepare, module.optimizer, device, **settings)


def check_finite(trainer: Any, rows: dict[str, np.ndarray], norm: float) -> None:
    """End the run before an update of NaN or infinite numbers: weights and checkpoints stay as they were."""
    names = {"log_ratio": "log-probs", "loss": "loss", "gradient": "gradient"}
    bad = {name: rows["trajectory"][~np.isfinite(rows[column])] for column, name in names.items()}
    # if no trajectory's own numbers are at fault, the error arose on the way down through the layers
    bad["gradient of the weights"] = rows["trajectory"][: 0 if np.isfinite(norm) else None]
    found = next((name for name, trajectories in bad.items() if len(trajectories)), None)
    if found is None:
        return
    places = ", ".join(trainer.datamodule.place(np.sort(bad[found])[:3]))
    share = f"{len(bad[found])} of its {len(rows['trajectory'])} trajectories (first {places})"
    message = f"update {trainer.global_step + 1}: the {found} is NaN or infinite for {share}, so nothing was updated"
    remedy = "lower the learning rate or set trainer.precision 32-true, then resume with --ckpt_path last"
    with same_error_on_all_ranks():
        raise DivergedError(f"{message}: {remedy}")


def check_reference(trainer: Any, policy: str, rows: dict[str, np.ndarray]) -> None:
    """Before the first update log pi must equal log mu where a file says that this very policy sampled it."""
    size, data = np.abs(rows["log_ratio"]), trainer.datamodule
    files = [data.metadata[file] for file, _ in data.locate(rows["trajectory"])]
    claimed = np.array([file["policy"] == policy_fingerprint(policy) for file in files])
    if not claimed.all():
        low, middle, high = np.quantile(rows["log_ratio"][~claimed], [0, 0.5, 1])
        figures = f"log-ratios: min {low:.3g}, median {middle:.3g}, max {high:.3g}"
        rank_zero_info(
            f"another or an unknown policy sampled {(~claimed).mean():.0%} of the first batch; {figures}"
        )
    if not claimed.any():
        return
    precisions = {
        file["precision"] or "32-true" for file, own in zip(files, claimed, strict=True) if own
    }
    exact = precisions | {str(trainer.precision)} == {"32-true"}
    drift = size if exact else size / rows["length"]
    found = (np.max if exact else np.median)(drift[claimed])
    bound = MAX_LOG_RATIO if exact else MEDIAN_TOKEN_LOG_RATIO
    if not found <= bound:
        (worst,) = data.place(rows["trajectory"][np.where(claimed, drift, -1).argmax()][None])
        measure = (
            "the largest |log pi - log mu|" if exact else "the median |log pi - log mu| per token"
        )
        message = f"data.train says that policy {policy!r} sampled it, but before the first update {measure} is"
        expected = f"{found:.3g}, expected at most {bound} (worst: {worst}); score the responses again with this policy"
        with same_error_on_all_ranks():
            raise InputError(f"{message} {expected}")


def training_statistics(rows: dict[str, np.ndarray], of_group: bool = False) -> dict[str, float]:
    """What is logged of one global batch; `callbacks/README.md` explains each name.

    Args:
        rows: the `COLUMNS`, arrays of [B]; gradient is the squared norm of the loss's gradient at the hidden states.
        of_group: whether advantages are those of a group, where 0 is neither sign.
    """
    advantage, weight = rows["advantage"], rows["weight"]
    positive, negative = positives(advantage, of_group), advantage < 0
    statistics = {
        "train/loss": rows["loss"].mean(),
        "train/objective": rows["objective"].mean(),
        "train/reward": rows["reward"].mean(),
        "train/positive_share": positive.mean(),
        "train/effective_positive_share": advantage_share(advantage),
        "weight/effective_sample_size": weight.sum() ** 2
        / max((weight**2).sum() * len(weight), 1e-12),
        "gradient/positive_share": rows["gradient"][positive].sum()
        / max(rows["gradient"].sum(), 1e-45),
    }
    for sign, chosen in (("positives", positive), ("negatives", negative)):
        if chosen.any():
            log_ratio = rows["log_ratio"][chosen]
            statistics |= {
                f"log_ratio/{sign}_mean": log_ratio.mean(),
                f"log_ratio/{sign}_min": log_ratio.min(),
                f"log_ratio/{sign}_max": log_ratio.max(),
                f"drift/{sign}": (log_ratio / rows["length"][chosen]).mean(),
                f"weight/{sign}_truncated": rows["truncated"][chosen].mean(),
            }
    if negative.any():
        statistics["weight/negatives_below_0.01"] = (weight[negative] < 0.01).mean()
    return {name: float(value) for name, value in statistics.items()}


class Throughput:
    """Counts the training batches of this rank; `read` reports those since the last reading. FLOPs: 6 x (parameters
    without embeddings) of each token, 6 x vocabulary x hidden of each response token, and 12 x layers x hidden of each
    pair of tokens of which one attends to the other; a shared prompt counts once."""

    def __init__(self, policy: Policy):
        model, config = policy.model, policy.model.config.get_text_config()
        tables = {
            id(m.weight): m.weight.numel()
            for m in (model.get_input_embeddings(), model.get_output_embeddings())
        }
        self.body = sum(p.numel() for p in model.parameters()) - sum(tables.values())
        self.projection = model.get_output_embeddings().weight.numel()
        self.attention = config.num_hidden_layers * config.hidden_size
        self.device = policy.device
        self.peak = peak_flops(self.device)
        self.since = np.zeros(
            4
        )  # nominal tokens, computed tokens, FLOPs, seconds since the last reading
        self.start()

    def start(self) -> None:
        """Start the clock, which runs from batch to batch, the wait for data included, and the count of memory."""
        self.began = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def count(self, tokens: Tokens) -> tuple[int, float]:
        """Count a training batch whose backward has run; its tokens, and seconds since the one before."""
        seconds, computed = time.perf_counter() - self.began, len(tokens.input_ids_L)
        pairs = sum(
            (end - start) * ((end - start) / 2 + last - first)
            for start, end, first, last in tokens.spans
        )
        flops = (
            6 * (self.body * computed + self.projection * len(tokens.target_N))
            + 12 * self.attention * pairs
        )
        self.since += tokens.nominal, computed, flops, seconds
        self.began += seconds
        return tokens.nominal, seconds

    def read(self, ranks: int) -> dict[str, float]:
        """The metrics since the last reading."""
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        (tokens, computed, flops, seconds), self.since = (
            np.maximum(self.since, 1e-9).tolist(),
            np.zeros(4),
        )
        return {
            "speed/tokens_per_s": ranks * tokens / seconds,
            "speed/utilisation": flops / seconds / self.peak,
            "speed/computed_share": computed / tokens,
            "speed/peak_memory_gb": memory / 1e9,
        }


def peak_flops(device: torch.device) -> float:
    """FLOP/s of the device in the current precision: those of its data sheet, or measured with a matrix product."""
    bfloat16, gpu = torch.is_autocast_enabled(device.type), device.type == "cuda"
    name = torch.cuda.get_device_name(device) if bfloat16 and gpu else ""
    if known := next((peak for model, peak in BFLOAT16_PEAKS.items() if model in name), None):
        return known
    size, best = 8192 if gpu else 1024, float("inf")
    matrix = torch.ones(
        size, size, device=device, dtype=torch.bfloat16 if bfloat16 else torch.float32
    )
    for _ in range(5):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # reading a value waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
