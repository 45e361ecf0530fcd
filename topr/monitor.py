"""What training logs: statistics of the loss, gradient, speed; and the check of log mu before the first update."""

import resource
import time
import warnings

import numpy as np
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from topr.io import DivergedError, InputError
from topr.loaders import MicroBatch
from topr.losses import LossOutput, positives, silent_groups, sum_tokens
from topr.metrics import training_statistics
from topr.packing import Tokens
from topr.policy_files import policy_fingerprint
from topr.ranks import gather, refuse, total_norm

MAX_LOG_RATIO = 1e-2  # of any sequence before the first update, when mu is this policy scored in float32
MEDIAN_TOKEN_LOG_RATIO = 2e-2  # likewise per token, when either precision is bfloat16
COLUMNS = ["real", "reward", "advantage", "length", "loss", "objective", "log_ratio", "weight"]
COLUMNS += ["truncated", "gradient"]


class Monitor:
    """Collects what the micro-batches of one optimiser step say of each trajectory, and logs it for the global batch.

    Args:
        module: the `PolicyModule` that is trained.
        clock: tokens and seconds of training before, from a checkpoint.
    """

    def __init__(self, module: LightningModule, clock: tuple[int, float]):
        self.module, self.speed = module, Throughput(module.policy, clock)
        self.rows: list[Tensor] = []
        self.numbers: list[Tensor] = []  # whole ones, which float32 would round
        self.untrained: Tensor | None = None

    def collect(self, output: LossOutput, hidden_ND: Tensor, batch: MicroBatch) -> None:
        """Keep a micro-batch's values until its backward has run."""
        given = batch.real_B, batch.reward_B, batch.advantage_B, batch.tokens.length_B
        self.rows.append(torch.stack([column.detach().float() for column in (*given, *output)]))
        self.numbers.append(batch.trajectory_B)
        hidden_ND.retain_grad()
        self.pending = hidden_ND, batch.tokens

    def after_backward(self) -> None:
        """Split the squared gradient by trajectory, exactly: each hidden state belongs to one."""
        hidden_ND, tokens = self.pending
        gradient_B = sum_tokens(hidden_ND.grad.float().square().sum(dim=1), tokens.length_B)
        self.rows[-1] = torch.cat((self.rows[-1], gradient_B[None]))
        self.speed.count(tokens)
        del self.pending

    def before_step(self, step: int) -> None:
        """Check every update and the first two batches; log every `log_every_n_steps`.

        Raises:
            InputError: the data claims to come from this policy and its log mu does not fit.
            DivergedError: a number is not finite.
        """
        local = torch.cat(self.rows, dim=1).cpu().numpy(), torch.cat(self.numbers).cpu().numpy()
        self.rows, self.numbers, trainer = [], [], self.module.trainer
        values, numbers = (np.concatenate(parts, axis=-1) for parts in zip(*gather(local), strict=True))
        real = values[0] > 0  # no filler
        rows = dict(zip(COLUMNS, values[:, real], strict=True)) | {"trajectory": numbers[real]}
        self.norm = total_norm(p.grad for p in self.module.parameters() if p.grad is not None)
        self._check_finite(rows, float(self.norm), step)
        last = [parameter for parameter in self.module.parameters() if parameter.requires_grad][-1]
        if step == 0:
            self._check_start(rows)
            self.untrained = last.detach().clone()
        elif self.untrained is not None and self._still(rows, last):
            warnings.warn(
                "the policy has not moved: its ratios pi/mu or its weights are the same after the first update; the "
                "learning rate is 0 or the update vanishes in the precision of the weights",
                stacklevel=1,
            )
        if step:
            self.untrained = None
        if not trainer.log_every_n_steps or (step + 1) % trainer.log_every_n_steps:
            return
        of_group = self.module.loss.grouping == "group"
        statistics = training_statistics(rows, of_group) | {"gradient/norm": float(self.norm)}
        statistics |= self.speed.read(trainer.world_size)
        if of_group:
            silent = silent_groups(rows["advantage"], trainer.datamodule.group[rows["trajectory"]])
            statistics["train/groups_without_signal"] = silent
        # Lightning's own way takes a fifth of a tiny model's time, and repeats an earlier figure where one is absent
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in statistics.items()})
        for logger in self.module.loggers:
            logger.log_metrics(statistics | {"epoch": trainer.current_epoch}, step)
        self.module.log("loss", statistics["train/loss"], prog_bar=True, logger=False, rank_zero_only=True)
        if trainer.is_global_zero and hasattr(getattr(trainer.logger, "experiment", None), "add_histogram"):
            positive = positives(rows["advantage"], of_group)
            for sign, chosen in (("positives", positive), ("negatives", rows["advantage"] < 0)):
                if chosen.any():
                    trainer.logger.experiment.add_histogram(f"log_ratio/{sign}", rows["log_ratio"][chosen], step)

    def _check_finite(self, rows: dict[str, np.ndarray], norm: float, step: int) -> None:
        """End the run before an update of NaN or infinite numbers: weights and checkpoints stay as they were."""
        names = {"log_ratio": "log-probs", "loss": "loss", "gradient": "gradient"}
        bad = {name: rows["trajectory"][~np.isfinite(rows[column])] for column, name in names.items()}
        found = next((name for name, trajectories in bad.items() if len(trajectories)), None)
        if found is None and np.isfinite(norm):
            return
        # where no trajectory's own numbers show it, it arose on the way down through the layers
        chosen = np.sort(bad[found] if found else rows["trajectory"])
        data = self.module.trainer.datamodule
        places = zip(*data.place(chosen[:3]), strict=True)
        named = ", ".join(f"row {row} of {data.files[file]}" for file, row in places)
        refuse(
            DivergedError(
                f"update {step + 1}: the {found or 'gradient of the weights'} is NaN or infinite for {len(chosen)} of "
                f"its {len(rows['trajectory'])} trajectories ({named}{', …' if len(chosen) > 3 else ''}); nothing was "
                "updated, and earlier checkpoints are kept: look at these rows, lower the learning rate or take "
                "trainer.precision 32-true, then go on with --ckpt_path last"
            )
        )

    def _still(self, rows: dict[str, np.ndarray], last: Tensor) -> bool:
        """Whether the first update moved nothing; in bfloat16 the ratios are too noisy to tell, the weights are not."""
        return np.abs(rows["log_ratio"]).max() < 1e-5 or torch.equal(last, self.untrained)

    def _check_start(self, rows: dict[str, np.ndarray]) -> None:
        """Before the first update log pi must equal log mu where a file says that this very policy sampled it."""
        size, data, policy = np.abs(rows["log_ratio"]), self.module.trainer.datamodule, self.module.policy_path
        self.module.summary["max_abs_log_ratio_at_start"] = float(size.max())
        own = policy_fingerprint(policy)
        files = [data.metadata[i] for i in data.place(rows["trajectory"])[0]]
        claimed = np.array([file["policy"] == own for file in files])
        if not claimed.all():
            low, middle, high = np.quantile(rows["log_ratio"][~claimed], [0, 0.5, 1])
            rank_zero_info(
                f"{(~claimed).mean():.0%} of the first batch name another policy, or none, as the one that sampled "
                f"them; their log-ratios: min {low:.3g}, median {middle:.3g}, max {high:.3g}. "
                "If they are far from 0, model.policy is not the policy that sampled them."
            )
        if not claimed.any():
            return
        scored = {file["precision"] or "32-true" for file, ours in zip(files, claimed, strict=True) if ours}
        exact = scored | {str(self.module.trainer.precision)} == {"32-true"}
        drift = size if exact else size / rows["length"]
        found = (np.max if exact else np.median)(drift[claimed])
        bound = MAX_LOG_RATIO if exact else MEDIAN_TOKEN_LOG_RATIO
        if not found <= bound:
            worst = rows["trajectory"][np.where(claimed, drift, -1).argmax()]
            refuse(
                InputError(
                    f"data.train says that policy {policy!r} sampled it, but before the first update "
                    f"{'the largest |log pi - log mu|' if exact else 'the median |log pi - log mu| per token'} is "
                    f"{found:.3g}, expected at most {bound} (worst: row {worst}); score the responses again with "
                    "this policy"
                )
            )


class Throughput:
    """Counts the training batches of this rank; `read` reports those since the last reading.

    FLOPs: 6 x (parameters without embeddings) of each token, 6 x vocabulary x hidden of each response token, and
    12 x layers x hidden of each pair of tokens of which one attends to the other; of what is computed, a shared prompt
    once.

    Args:
        model: the policy.
        total: tokens and seconds counted before.
    """

    def __init__(self, model: nn.Module, total: tuple[int, float]):
        config = model.config.get_text_config()
        tables = {id(m.weight): m.weight.numel() for m in (model.get_input_embeddings(), model.get_output_embeddings())}
        self.body = sum(p.numel() for p in model.parameters()) - sum(tables.values())
        self.projection = model.get_output_embeddings().weight.numel()
        self.attention = config.num_hidden_layers * config.hidden_size
        self.device = next(model.parameters()).device
        self.peak = _peak_flops(self.device)
        self.total = tuple(total)
        self._reset()
        self.start()

    def _reset(self) -> None:
        self.tokens = self.computed = self.flops = 0
        self.seconds = 0.0

    def start(self) -> None:
        """Start the clock; it runs from batch to batch, the wait for data included."""
        self.began = time.perf_counter()

    def count(self, tokens: Tokens) -> None:
        """A training batch has gone through."""
        seconds = time.perf_counter() - self.began
        pairs = sum((end - start) * ((end - start) / 2 + last - first) for start, end, first, last in tokens.spans)
        self.tokens, self.computed = self.tokens + tokens.count, self.computed + len(tokens.input_ids_L)
        self.flops += 6 * (self.body * len(tokens.input_ids_L) + self.projection * len(tokens.target_N))
        self.flops += 12 * self.attention * pairs
        self.seconds += seconds
        self.total = self.total[0] + tokens.count, self.total[1] + seconds
        self.start()

    def rate(self, ranks: int) -> float:
        """Tokens per second of the whole run."""
        return ranks * self.total[0] / max(self.total[1], 1e-9)

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
            "speed/computed_share": self.computed / max(self.tokens, 1),
            "speed/peak_memory_gb": memory / 1e9,
        }
        self._reset()
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
        (matrix @ matrix)[0, 0].item()  # reading a value waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * 1024**3 / best
