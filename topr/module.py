"""The LightningModule: log-probs, loss, and the one place that reduces. Callbacks log, sample, grade and export.

Shapes: B trajectories of a micro-batch, N response tokens of all B, D hidden.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from topr.batching import MicroBatch
from topr.callbacks import Evaluate, Monitor
from topr.io import InputError, explained
from topr.losses import Loss, LossOutput, check_output
from topr.policy.model import LoRA, Policy, compile_layers, load_policy
from topr.policy.sharding import load_sharded
from topr.sampling import LocalSampler, Sampler
from topr.tasks import Task

MATRIX_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class StepOutput(NamedTuple):
    """What a callback may read of a micro-batch after its backward."""

    batch: MicroBatch
    loss: LossOutput
    log_probs_N: Tensor  # keeps its gradient


class PolicyModule(LightningModule):
    """A policy trained on stored trajectories; no reference model, critic or KL term.

    Args:
        policy: Hugging Face model, a folder or a hub name.
        task: grades responses.
        loss: see `topr.losses`.
        optimizer: any torch optimiser.
        sampler: generates responses for validation, test and predict; in process by default. A `ServerSampler` is
            for predict only: its server does not hold the weights that are being trained.
        lora: adapters to train instead of the weights; `policy/` holds the merged weights, `adapter/` the adapters.
        activation_checkpointing: recompute activations in the backward instead of keeping them: less memory, a third
            more time. `selective` keeps the results of matrix products and recomputes the cheap rest.
        reshard_after_forward: of a sharded policy (FSDP2), drop a layer's gathered weights after its forward and gather
            them again for its backward: less memory, half as much traffic again.
        compile: compile the parts of decoder layers for training with `torch.compile`: half a minute at first, then
            less time. `selective` checkpointing then recomputes their matrix products, too.
        threads: CPU threads of torch; a tiny model is fastest with 1. None leaves torch's choice.
        lr_scheduler: a torch scheduler that needs no metric, or `topr.optim.Schedule`, stepped after each update.
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
        activation_checkpointing: bool | Literal["selective"] = False,
        reshard_after_forward: bool = True,
        compile: bool = False,
        threads: PositiveInt | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ):
        super().__init__()
        check_output(loss)
        self.policy_name, self.task, self.loss, self.optimizer = policy, task, loss, optimizer
        self.lr_scheduler, self.sampler = lr_scheduler, sampler or LocalSampler()
        self.lora, self.activation_checkpointing = lora, activation_checkpointing
        self.reshard_after_forward, self.compiled = reshard_after_forward, compile
        self.strict_loading = lora is None  # a checkpoint of adapters holds them alone
        if threads is not None:
            torch.set_num_threads(threads)
        self.step_output: StepOutput | None = (
            None  # of the last micro-batch, until a callback takes it
        )

    def configure_callbacks(self) -> list[Callback]:
        """Monitoring and evaluation; what else train.py adds can be passed to any Trainer."""
        return [Evaluate(), Monitor()]

    def configure_model(self) -> None:
        """Load the weights; Lightning calls this once the strategy has set the device up."""
        if hasattr(self, "policy"):
            return
        kind = self.trainer.strategy.root_device.type  # the module itself is not on its device yet
        if kind not in ("cpu", "cuda"):  # mps, for example, has no float64
            raise InputError(
                f"trainer.accelerator chose {kind}, which is not supported; set --trainer.accelerator cpu"
            )
        rank_zero_info(f"loading the policy {self.policy_name}")
        bfloat16 = self.trainer.precision == "bf16-mixed"
        if self.device_mesh is None:
            self.policy = load_policy(self.policy_name)
            self.prepare(self.policy)
        else:
            mesh, reshard = self.device_mesh["data_parallel"], self.reshard_after_forward
            self.policy = load_sharded(self.policy_name, self.prepare, mesh, bfloat16, reshard)
        self.policy.train()
        if self.compiled and self.trainer.state.fn == "fit":
            compile_layers(self.policy)
        if kind == "cuda" and bfloat16:
            # the head's float32 products in TF32: 8 times as precise as bfloat16, several times as fast as float32
            torch.set_float32_matmul_precision("high")

    def prepare(self, policy: Policy) -> None:
        """Add adapters and activation checkpointing."""
        if self.lora is not None:
            self.lora.add_to(policy)
        if self.activation_checkpointing:
            settings: dict[str, Any] = {"use_reentrant": False}
            if self.activation_checkpointing == "selective":
                settings["context_fn"] = partial(
                    create_selective_checkpoint_contexts, MATRIX_PRODUCTS
                )
            policy.model.activation_checkpointing_enable(settings)

    def configure_optimizers(self) -> Any:
        with explained("model.optimizer does not take its arguments", (TypeError, ValueError)):
            optimizer = self.optimizer(
                [parameter for parameter in self.parameters() if parameter.requires_grad]
            )
        with explained("model.lr_scheduler does not take its arguments", (TypeError, ValueError)):
            scheduler = self.lr_scheduler and self.lr_scheduler(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}] if scheduler else []

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        # The one place that reduces. The sum over trajectories is divided by their number in the GLOBAL batch, so that
        # micro-batches and ranks do not change the update. Lightning divides by the micro-batches of an update, the
        # strategy averages over ranks; both are cancelled here.
        scale_B = batch.real_B / batch.divisor * (batch.microbatches * self.trainer.world_size)
        log_probs_N = self.policy.log_probs(batch.tokens)
        output = self.loss(
            log_probs_N, batch.ref_log_probs_N, batch.tokens.length_B, batch.advantage_B
        )
        total = (output.loss_B * scale_B).sum()
        log_probs_N.retain_grad()
        self.step_output = StepOutput(batch, output, log_probs_N)
        return total

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        self.trainer.accumulate_grad_batches = batch.microbatches

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, *closure)
        optimizer.zero_grad()  # Lightning would keep the gradients through the next forward

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Required by Lightning; `topr.callbacks.Evaluate` samples and grades."""

    test_step = predict_step = validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (
            self.lora is not None and self.device_mesh is None
        ):  # a sharded checkpoint is read back by the whole model
            trained = {
                name for name, parameter in self.named_parameters() if parameter.requires_grad
            }
            checkpoint["state_dict"] = {
                k: v for k, v in checkpoint["state_dict"].items() if k in trained
            }
