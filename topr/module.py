"""The LightningModule: one batch is one update. Log-probs, loss, and the one place that reduces.

Shapes: B trajectories of a micro-batch, N sampled tokens of all B.
"""

from contextlib import nullcontext
from inspect import signature
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from topr.batching import MicroBatch, Update
from topr.datamodule import ProblemBatch
from topr.io import InputError, explained
from topr.io.distributed import end_all_ranks_on_error, gather
from topr.io.settings import save_hyperparameters
from topr.losses.base import Loss, check_output
from topr.losses.statistics import (
    Columns,
    check_finite,
    check_start,
    columns_of,
    gather_columns,
    statistics,
)
from topr.policy.model import LoRA, Policy, load_policy
from topr.run.identity import check_fit, check_unchanged, decisive, policy_hash, weights_hash
from topr.sampling.base import Sampler
from topr.tasks.task import Task
from topr.trajectories.file import Trajectory


class PolicyModule(LightningModule):
    """A policy trained on stored trajectories; no reference model, critic or KL term.

    Args:
        policy: Hugging Face model, a folder or a hub name.
        task: grades responses.
        loss: see `topr.losses`.
        optimizer: any torch optimiser that needs no closure.
        sampler: generates responses for validation, test and predict; in process by default. A
            `ServerSampler` is for predict only: its server does not hold the trained weights.
        lora: adapters to train instead of the weights; `policy/` then holds the merged weights,
            `adapter/` the adapters.
        gradient_clip_val: largest norm of the gradient of an update; None, not 0: no clipping.
        activation_checkpointing: recompute activations in the backward instead of keeping them:
            less memory, a third more time.
        weights: a checkpoint, one file, whose weights replace the policy's own before training.
        threads: CPU threads of torch; a tiny model is fastest with 1. None: torch's choice.
        lr_scheduler: a torch scheduler that needs no metric, stepped after each update.
    """

    policy: Policy  # from configure_model on

    def __init__(
        self,
        policy: str,
        task: Task,
        loss: Loss,
        optimizer: OptimizerCallable,
        sampler: Sampler | None = None,
        lora: LoRA | None = None,
        gradient_clip_val: PositiveFloat | None = 1.0,
        activation_checkpointing: bool = False,
        weights: str | None = None,
        threads: PositiveInt | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ):
        super().__init__()
        save_hyperparameters(self)
        check_output(loss)
        self.policy_name = policy
        self.task = task
        self.loss = loss
        self.optimizer = optimizer
        self.sampler = sampler
        self.lora = lora
        self.gradient_clip_val = gradient_clip_val
        self.activation_checkpointing = activation_checkpointing
        self.weights = weights
        self.lr_scheduler = lr_scheduler
        self.automatic_optimization = False
        self.strict_loading = not lora  # a checkpoint of adapters holds them alone
        self.max_abs_log_ratio: float | None = None  # of the first batch; None: no update yet
        self.validated: tuple = (-1, {})  # number of updates, figures
        self.validation_due = False  # whether the checkpoint was written just before a validation
        self.decisive: dict = {}  # of the fit that began
        if threads:
            torch.set_num_threads(threads)

    def configure_callbacks(self) -> list[Callback]:
        """Check the trainer, here because Lightning asks for callbacks before its own, less clear
        checks."""
        check_trainer(self.trainer)
        return []

    def configure_model(self):
        """Load the weights; Lightning calls this once the strategy has set the device up, and
        before it loads a checkpoint."""
        if hasattr(self, "policy"):
            return
        rank_zero_info(f"loading the policy {self.policy_name}")
        bfloat16 = False
        mesh = None
        if self._trainer:  # not by load_from_checkpoint
            bfloat16 = self.trainer.precision == "bf16-mixed"
            mesh = self.device_mesh
        if mesh is None:
            self.policy = load_policy(self.policy_name)
            self.prepare(self.policy)
        else:
            from topr.policy.sharding import load_sharded

            mesh = mesh["data_parallel"]
            self.policy = load_sharded(self.policy_name, self.prepare, mesh, bfloat16)
        if self.weights:
            with explained(f"model.weights: {self.weights} is not a checkpoint in one file"):
                checkpoint = torch.load(self.weights, map_location="cpu", weights_only=True)
                check_fit(self, checkpoint, self.weights)
                self.load_state_dict(checkpoint["state_dict"], strict=self.strict_loading)
        self.policy.train()
        if bfloat16 and torch.cuda.is_available():
            # the head's float32 products in TF32: 8 times as precise as bfloat16, and fast
            torch.set_float32_matmul_precision("high")

    def prepare(self, policy: Policy):
        """Add adapters and activation checkpointing, before sharding wraps the layers."""
        if self.lora:
            from topr.policy.lora import add_adapters

            add_adapters(policy, self.lora)
        if self.activation_checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})

    def kept_weights(self):
        """The weights that a checkpoint holds: all, or the adapters alone."""
        weights = self.state_dict()
        if not self.lora:
            return weights
        trained = [name for name, weight in self.named_parameters() if weight.requires_grad]
        return {name: weights[name] for name in trained}

    def policy_hash(self) -> str:
        """Identity of the weights that this module holds now. All ranks must call."""
        if self.weights is None and self.max_abs_log_ratio is None:  # no update yet
            return policy_hash(self.policy_name)
        from topr.policy.sharding import full_state_dict

        weights = full_state_dict(self.policy)  # on rank 0 alone
        return gather(weights_hash(self.policy_name, weights))[0]

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizers(self):
        with explained(
            "model.optimizer or model.lr_scheduler does not take its arguments",
            (TypeError, ValueError),
        ):
            optimizer = self.optimizer(self.trained_parameters())
            signature(optimizer.step).bind()  # a TypeError if it needs a closure
            if not self.lr_scheduler:
                return optimizer
            return [optimizer], [self.lr_scheduler(optimizer)]

    def training_step(self, update: Update, batch_idx) -> dict[str, Columns]:
        """One update. Returns the columns of `topr.losses.statistics`, for callbacks."""
        optimizer: Any = self.optimizers()
        parts = []
        for number, part in enumerate(update.micro_batches):  # equally many on every rank
            last = number + 1 == len(update.micro_batches)
            with nullcontext() if last else self.no_reduction():
                parts.append(self.add_gradient(part, update.trajectories))
        columns = gather_columns(parts)
        largest = torch.inf if self.gradient_clip_val is None else self.gradient_clip_val
        total = torch.nn.utils.clip_grad_norm_(self.trained_parameters(), largest)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)  # unclipped
        self.check_update(columns, norm)
        rate = optimizer.param_groups[0]["lr"]  # of this update
        optimizer.step()
        optimizer.zero_grad()
        if self.lr_scheduler:
            with explained("model.lr_scheduler does not go on", ValueError):
                self.lr_schedulers().step()  # type: ignore[union-attr]
        figures = statistics(columns) | {"gradient/norm": norm, "train/lr": rate}
        for name, value in figures.items():  # for callbacks; the same on all ranks
            self.log(name, value, logger=False, prog_bar=name == "train/loss")
        self.log_at_update(figures)
        return {"columns": columns}

    def add_gradient(self, part: MicroBatch, trajectories):
        """Add the gradient of a micro-batch to that of its update, which has so many trajectories
        over all ranks. Returns its columns; nothing else outlives the call."""
        log_probs_N: Any = self.policy.log_probs(part.tokens)
        log_probs_N.retain_grad()  # statistics: the positives' share of the gradient
        output = self.loss(
            log_probs_N, part.ref_log_probs_N, part.tokens.length_B, part.advantage_B
        )
        # The one place that reduces: the sum over trajectories is divided by their number in the
        # whole update. The strategy averages over ranks, which is cancelled here.
        scale_B = part.real_B * (self.trainer.world_size / trajectories)
        self.manual_backward((output.loss_B * scale_B).sum())
        return columns_of(part, output, log_probs_N.grad)

    def no_reduction(self):
        """Add up the gradients of micro-batches on each rank. DDP reduces in the last backward,
        what the earlier ones left in `grad` included. FSDP2 reduces each time, because whole
        gradients would take the memory that it saves."""
        model = self.trainer.strategy.model
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def check_update(self, columns: Columns, norm: float):
        """End the run before an update that would do harm; before the first one, compare log pi
        with log mu. See `topr.losses.statistics`."""
        data = getattr(self.trainer.train_dataloader, "data", None)
        check_finite(columns, norm, self.global_step + 1, data)
        if self.max_abs_log_ratio is None:
            policy = self.policy_hash()
            self.max_abs_log_ratio = float(np.abs(columns["log_ratio"]).max())
            check_start(columns, self.trainer.precision, data, policy)

    def log_at_update(self, figures: dict[str, float]):
        """Write figures of the last update at its number, from 0. At once: Lightning would write
        them after a checkpoint of this update, and a run killed in between would lack them."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and self.global_step % every == 0:
            for logger in self.loggers:
                logger.log_metrics(figures, self.global_step - 1)

    def validation_step(self, batch: ProblemBatch, batch_idx):
        """Sample and grade responses to this rank's problems; log the metrics of all ranks.
        Returns the trajectories, for callbacks."""
        return {"trajectories": self.evaluate("val", batch)}

    def test_step(self, batch: ProblemBatch, batch_idx):
        """As `validation_step`."""
        return {"trajectories": self.evaluate("test", batch)}

    def predict_step(self, batch: ProblemBatch, batch_idx) -> list[Trajectory]:
        """Graded responses with log mu, also in the file that the batch names, if any."""
        from topr.evaluation.live import predict

        return predict(self, batch)

    def evaluate(self, split: str, batch: ProblemBatch) -> list[Trajectory]:
        """Sample and grade responses, and log the metrics over the problems of all ranks at the
        number of updates made. Lightning's own logging would take that of the last update, and
        leave out the policy before training (sanity checking)."""
        from topr.evaluation.live import metrics_of_all_ranks, sample_and_grade

        trajectories = sample_and_grade(self, batch)
        figures = {}
        for name, value in metrics_of_all_ranks(batch, trajectories).items():
            low, high = value["interval"]
            figures[f"{split}/{name}"] = value["mean"]
            figures[f"{split}_interval/{name}_low"] = low
            figures[f"{split}_interval/{name}_high"] = high
        fitting = self.trainer.state.fn == "fit"
        if self.trainer.validating or self.trainer.testing:
            # equal on all ranks; logger=True makes Lightning print the table
            self.log_dict(figures, logger=not fitting, batch_size=1)
        # Lightning checks the sanity of some resumed runs, too
        if fitting and (self.global_step == 0 or not self.trainer.sanity_checking):
            self.log_validation(figures)
        return trajectories

    def log_validation(self, figures: dict[str, float]):
        self.validated = (self.global_step, figures)
        for logger in self.loggers:
            logger.log_metrics(figures, self.global_step)

    def on_fit_start(self):
        """Lift the limits of a resumed run until Lightning has started it: it would skip one that
        has made its last update, but may still have to be validated and exported."""
        self.decisive = decisive(self)
        loop = self.trainer.fit_loop
        self.limits = (loop.max_epochs, loop.max_steps)
        if self.trainer.ckpt_path:
            loop.max_epochs = -1
            loop.epoch_loop.max_steps = -1

    def on_train_start(self):
        loop = self.trainer.fit_loop
        loop.max_epochs, loop.epoch_loop.max_steps = self.limits
        # loggers drop what was logged at the checkpoint's number of updates, or after it
        if self.validated[0] == self.global_step > 0:
            self.log_validation(self.validated[1])
        if self.validation_due:  # Lightning would not make up for it
            self.validation_due = False
            validation = loop.epoch_loop.val_loop
            validation.restarting = False
            self.trainer.validating = True
            validation.run()
            validation._has_run = False  # or the loop of the epoch would not be entered
            self.trainer.training = True

    def on_save_checkpoint(self, checkpoint):
        for logger in self.loggers:  # or a run killed after this would lack earlier figures
            logger.save()
        loop: Any = self.trainer.fit_loop
        due = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        checkpoint["topr"] = {
            "validated": self.validated,
            "validation_due": bool(due and self.validated[0] < self.global_step),
            "max_abs_log_ratio": self.max_abs_log_ratio,
            "decisive": self.decisive,
        }
        # reading a sharded checkpoint needs every weight of the model
        if self.lora and self.device_mesh is None:
            checkpoint["state_dict"] = self.kept_weights()

    def on_load_checkpoint(self, checkpoint):
        if self._trainer:
            with end_all_ranks_on_error():
                check_fit(self, checkpoint, self.trainer.ckpt_path)
                if self.trainer.state.fn == "fit":
                    check_unchanged(self, checkpoint)
        state = checkpoint["topr"]
        self.validated = tuple(state["validated"])
        self.validation_due = state["validation_due"]
        self.max_abs_log_ratio = state["max_abs_log_ratio"]
        # Lightning counts a batch as completed after its checkpoint, and loses count of epochs when
        # it resumes a checkpoint of an epoch's last batch
        for counts in checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"].values():
            if isinstance(counts, dict):
                counts["completed"] = counts["processed"]


def check_trainer(trainer):
    """Raise an InputError for settings of the trainer that would not do what they say."""
    precision = trainer.precision
    message = None
    if trainer.accumulate_grad_batches != 1:
        message = "accumulate_grad_batches must stay 1: a batch is an update; set data.batch_size"
    elif trainer.gradient_clip_val is not None:
        message = "gradient_clip_val must stay unset: set model.gradient_clip_val"
    elif type(trainer.strategy).__name__ == "FSDPStrategy":
        message = "strategy is FSDP1; use FSDP2, with --config configs/fsdp.yaml"
    elif isinstance(trainer.accelerator, MPSAccelerator):
        message = "accelerator chose mps, which is not supported; set --trainer.accelerator cpu"
    elif torch.cuda.is_available() and torch.get_deterministic_debug_mode() == 2:  # an error
        message = "deterministic is true, which a GPU's sampling cannot be; set it to warn"
    elif precision not in ("32-true", "bf16-mixed"):
        message = f"precision is {precision}; weights stay in float32: 32-true or bf16-mixed"
    if message:
        raise InputError(f"trainer.{message}")
