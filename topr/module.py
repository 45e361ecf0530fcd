"""The LightningModule: log-probs, loss, and the one place that reduces; validation and prediction sample and grade.

Shapes: B trajectories of a micro-batch, N response tokens of all B, D hidden.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from topr.evaluation import derived_seed, describe, per_problem, sample_and_grade, sample_part, summarise
from topr.io import InputError, atomic, check_counts
from topr.loaders import MicroBatch
from topr.lora import LoRA, merge
from topr.losses import Loss
from topr.monitor import Monitor
from topr.packing import Tokens
from topr.policy import compile_layers, export_policy, load_policy
from topr.ranks import gather
from topr.sampling import LocalSampler, Sampler, ServerSampler
from topr.sharding import full_state_dict, gathered, load_sharded
from topr.tasks.task import Problem, Task
from topr.tokenizer import load_tokenizer
from topr.trainer import Preempted
from topr.trajectories import Trajectory

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # of the linear layers


class PolicyModule(LightningModule):
    """A policy trained on stored trajectories; no reference model, critic or KL term.

    Args:
        policy: Hugging Face model, a folder or a hub name.
        task: grades responses.
        loss: see `topr.losses`.
        optimizer: any torch optimiser.
        sampler: generates responses for validation, test and predict; in process by default. A `ServerSampler` is
            for predict only: what it serves is not what is being trained, and all else is sampled in process.
        lora: adapters to train in place of the weights; `policy/` holds the merged weights, `adapter/` the adapters.
        activation_checkpointing: compute activations again in the backward instead of keeping them: less memory, a
            third more time. `selective` keeps what matrix products gave and computes the cheap rest again.
        reshard_after_forward: of a sharded policy (FSDP2), drop a layer's gathered weights after its forward and gather
            them again for its backward: less memory, half as much traffic again.
        compile: the parts of decoder layers by `torch.compile`, for training: half a minute at first, then less time.
            `selective` checkpointing computes their matrix products again, too.
        threads: CPU threads of torch; a tiny model is fastest with 1. None leaves torch's choice.
    """

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
        threads: int | None = None,
    ):
        super().__init__()
        self.policy_path, self.task, self.loss, self.optimizer = policy, task, loss, optimizer
        self.sampler = sampler or LocalSampler()
        self.evaluator = LocalSampler(rows=64) if isinstance(self.sampler, ServerSampler) else self.sampler
        self.lora, self.activation_checkpointing = lora, activation_checkpointing
        self.reshard_after_forward, self.compiled = reshard_after_forward, compile
        self.strict_loading = lora is None  # a checkpoint of adapters holds them alone
        check_counts("model.", most=1024, threads=threads)
        if threads is not None:
            torch.set_num_threads(threads)
        self.policy: torch.nn.Module | None = None
        self.doing, self.remedy = "setting up", "the size of the policy, or shard it (configs/fsdp.yaml)"
        self.interrupted = False  # by a signal; see `topr.trainer.Survival`
        self.evaluator.interrupted = lambda: self.interrupted
        # kept in checkpoints: figures of the run so far; tokens and seconds of training; the last validation,
        # after how many updates
        self.summary: dict[str, Any] = {}
        self.clock = (0, 0.0)
        self.figures: tuple[int, dict[str, float]] = (-1, {})

    def configure_model(self) -> None:
        """Load weights and tokenizer; called once the strategy has set the device up."""
        if self.policy is not None:
            return
        self.tokenizer = load_tokenizer(self.policy_path)
        if self.device_mesh is None:
            self.policy = load_policy(self.policy_path)
            self._prepare(self.policy)
        else:
            mesh, bfloat16 = self.device_mesh["data_parallel"], self.trainer.precision == "bf16-mixed"
            self.policy = load_sharded(self.policy_path, self._prepare, mesh, bfloat16, self.reshard_after_forward)
        self.policy.train()
        # the module itself is not on its device yet
        if self.trainer.strategy.root_device.type == "cuda" and self.trainer.precision == "bf16-mixed":
            # the head's float32 products in TF32, 8 times as precise as bfloat16 and several times as fast as float32
            torch.set_float32_matmul_precision("high")

    def _prepare(self, policy: torch.nn.Module) -> None:
        """What is asked for beyond the files: adapters, activation checkpointing."""
        if self.lora is not None:
            self.lora.add_to(policy)
        if self.activation_checkpointing:
            enable = getattr(policy, "activation_checkpointing_enable", None)  # its later name
            how: dict[str, Any] = {"use_reentrant": False}
            if self.activation_checkpointing == "selective":
                how["context_fn"] = partial(create_selective_checkpoint_contexts, PRODUCTS)
            (enable or policy.gradient_checkpointing_enable)(how)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        try:
            return self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        except (TypeError, ValueError) as error:
            raise InputError(f"model.optimizer refuses its arguments: {error}") from error

    def forward(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """log pi of each response token [N] and the hidden states [N, D] that predict them."""
        return self.policy.response_log_probs(tokens)

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        tokens = batch.tokens
        row = f"{len(tokens.length_B)} trajectories, {len(tokens.input_ids_L)} tokens"
        self.doing = f"update {self.global_step + 1}, a forward or backward of {row}"
        self.remedy = f"data.microbatch_tokens, now {self.trainer.datamodule.microbatch_tokens}"
        # The one place that reduces: the sum over trajectories is divided by their number in the GLOBAL batch, so that
        # micro-batches and ranks cannot change the update. The trainer divides by its micro-batches per step, the
        # strategy averages over ranks; both are cancelled here.
        scale_B = batch.real_B / batch.divisor * (self.trainer.accumulate_grad_batches * self.trainer.world_size)
        if self.loss.grouping != "pair":  # each trajectory's loss depends on it alone
            given = self.loss, batch.ref_log_probs_N, batch.advantage_B, scale_B
            total, output, hidden_ND = self.policy.response_loss(tokens, *given)
        else:
            log_probs_N, hidden_ND = self(tokens)
            output = self.loss(log_probs_N, batch.ref_log_probs_N, tokens.length_B, batch.advantage_B)
            total = (output.loss_B * scale_B).sum()
        self.monitor.collect(output, hidden_ND, batch)
        return total

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer, *closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, *closure)
        optimizer.zero_grad()  # Lightning would keep the gradients through the next forward

    def on_after_backward(self) -> None:
        self.monitor.after_backward()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.monitor.before_step(self.global_step)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None, gradient_clip_algorithm: str | None
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):  # the norm is known already
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), gradient_clip_val, self.monitor.norm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_start(self) -> None:
        if self.compiled:
            compile_layers(self.policy)
        with self.trainer.precision_plugin.forward_context():  # what utilisation is a share of depends on it
            self.monitor = Monitor(self, self.clock)
        data = self.trainer.datamodule
        if self.global_step == 0 and data.val is not None and self.trainer.limit_val_batches:
            self._write_figures(self._figures("val", self._sample(data.share("val"), data.val_samples)))
        elif self.figures[0] == self.global_step:
            self._write_figures(self.figures[1])  # again: the logger of a resumed run forgets what is not behind it
        if data.test is not None and "before" not in self.summary:
            self.summary["before"] = self._brief(self._sample(data.share("test"), data.samples))
        self.monitor.speed.start()  # the clock counts training only

    def on_validation_end(self) -> None:
        if self.trainer.state.fn == "fit":
            self.monitor.speed.start()

    def on_train_end(self) -> None:
        """Export the policy, measure it on the test problems and write summary.json."""
        data = self.trainer.datamodule
        if data.test is not None:
            self.summary["after"] = self._brief(self._sample(data.share("test"), data.samples))
        speed = self.monitor.speed.rate(self.trainer.world_size)
        self.summary |= {"steps": self.global_step, "trajectories": len(data.reward), "tokens_per_s": speed}
        self.summary |= data.shares()
        if not self.trainer.fast_dev_run:
            folder = Path(self.trainer.log_dir)
            weights = full_state_dict(self.policy)
            if self.trainer.is_global_zero:
                policy = self.policy
                if self.lora is not None:
                    export_policy(policy, self.tokenizer, folder / "adapter", weights)
                    weights = None
                    policy = merge(self.policy_path, folder / "adapter")
                export_policy(policy, self.tokenizer, folder / "policy", weights)
                with atomic(folder / "summary.json") as path:
                    path.write_text(json.dumps(self.summary, indent=2) + "\n")
            self.print(f"Policy and summary.json are in {folder}.")
        if "after" in self.summary:
            names = [name for name in self.summary["after"] if name not in ("problems", "samples")]
            self.print("test      " + "".join(f"{name:>10}" for name in names))
            for when in ("before", "after"):
                self.print(f"{when:10}" + "".join(f"{self.summary[when][name]:>10.3f}" for name in names))

    def _sample(self, problems: list[Problem], n: int) -> list[Trajectory]:
        """n graded responses to each problem; every rank passes its own and gets all."""
        with self._sampling():
            local = self._responses(problems, n, self.global_step)
        parts = gather((local, self.interrupted))
        if any(interrupted for _, interrupted in parts):
            raise Preempted
        return [trajectory for part, _ in parts for trajectory in part]

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Whole weights, in the precision of training, which not all of Lightning's hooks have.

        With bf16-mixed each weight is cast once: Lightning's own autocast would cast it again for every token.
        """
        bfloat16 = self.trainer.precision == "bf16-mixed"
        autocast = torch.autocast(self.device.type, torch.bfloat16, bfloat16, cache_enabled=True)
        eager = torch.compiler.set_stance("force_eager")  # where layers are compiled: lengths grow by the token
        with eager, torch.inference_mode(False), torch.no_grad(), gathered(self.policy), autocast:
            frozen = [parameter for parameter in self.policy.parameters() if not parameter.requires_grad]
            for parameter in frozen:  # under adapters; autocast keeps copies of weights that can have gradients alone
                parameter.requires_grad_(True)
            try:
                yield
            finally:
                for parameter in frozen:
                    parameter.requires_grad_(False)

    def _responses(self, problems: list[Problem], n: int, moment: int) -> list[Trajectory]:
        """n graded responses to each of this rank's problems; `moment` and rank vary the run's seed."""
        data = self.trainer.datamodule
        self._expect_sampling(problems, n)
        seed = derived_seed(data.seed, moment, self.global_rank)
        how = n, data.sampling, seed
        return sample_and_grade(self.evaluator, self.policy, self.tokenizer, self.task, problems, *how)

    def _expect_sampling(self, problems: list[Problem], n: int) -> None:
        """Say what runs, should memory run out."""
        self.doing = f"sampling {n} responses to each of {len(problems)} problems"
        where = "model.sampler.init_args.rows" if self.evaluator is self.sampler else "rows of a LocalSampler"
        self.remedy = f"{where}, now {getattr(self.evaluator, 'rows', None)}"

    def validation_step(self, batch: list[Problem], batch_idx: int) -> None:
        self._log_figures("val", self._sample(batch, self.trainer.datamodule.val_samples))

    def test_step(self, batch: list[Problem], batch_idx: int) -> None:
        self._log_figures("test", self._sample(batch, self.trainer.datamodule.samples))

    def _log_figures(self, split: str, trajectories: list[Trajectory]) -> None:
        figures, fitting = self._figures(split, trajectories), self.trainer.state.fn == "fit"
        for name, figure in figures.items():  # for callbacks and what is printed
            shown = {"prog_bar": name == "val/pass@1", "logger": not fitting}
            self.log(name, figure, batch_size=1, rank_zero_only=True, **shown)
        if fitting:
            self._write_figures(figures)

    def _write_figures(self, figures: dict[str, float]) -> None:
        """Log figures at the number of updates made; Lightning would log them at that of the last."""
        self.figures = self.global_step, figures
        for logger in self.loggers:
            logger.log_metrics(figures, self.global_step)

    def _figures(self, split: str, trajectories: list[Trajectory]) -> dict[str, float]:
        """Metrics with their intervals; a few of the responses go to TensorBoard as text."""
        if self.trainer.is_global_zero and hasattr(getattr(self.logger, "experiment", None), "add_text"):
            some = trajectories[:: max(1, len(trajectories) // 8)]
            text = "\n\n".join(f"{t.prompt}\n{t.response}\nreward {t.reward:+g}" for t in some)
            # indented, it is a code block: Markdown would take a product for emphasis
            text = "".join(f"    {line}\n" for line in text.splitlines())
            self.logger.experiment.add_text(f"{split}/samples", text, self.global_step)
        figures = {}
        for metric, value in summarise(per_problem(trajectories)).items():
            figures[f"{split}/{metric}"] = value["mean"]
            for end, bound in zip(("low", "high"), value["interval"], strict=True):
                figures[f"{split}_interval/{metric}_{end}"] = bound
        return figures

    def _brief(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """The figures of summary.json."""
        values = per_problem(trajectories)
        problems = len(values["invalid"])
        means = {name: float(column.mean()) for name, column in values.items()}
        return means | {"problems": problems, "samples": len(trajectories) // problems}

    def describe(self, problems: list[Problem]) -> dict[str, Any]:
        """What predict writes about its trajectories."""
        data, precision = self.trainer.datamodule, str(self.trainer.precision)
        tokenizer = load_tokenizer(self.policy_path)
        return describe(
            self.policy_path, tokenizer, precision, self.task, problems, data.samples, data.sampling, data.seed
        )

    def on_predict_start(self) -> None:
        self._about = self.describe(self.trainer.datamodule.read_problems("problems"))

    def predict_step(self, batch: tuple[Path, list[Problem]], batch_idx: int) -> int:
        """Sample, grade and score a batch of problems, and write them as one file of data.out."""
        data, (path, problems) = self.trainer.datamodule, batch
        with self._sampling():  # on every rank, also on those that have nothing left to do
            if not problems:
                return 0
            self._expect_sampling(problems, data.samples)
            how = data.samples, data.sampling, data.seed, data.microbatch_tokens
            return sample_part(path, self._about, self.sampler, self.policy, self.tokenizer, self.task, problems, *how)

    def on_predict_end(self) -> None:
        folder = Path(self.trainer.datamodule.out)
        gather(None)  # the others have written theirs
        rows = sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))
        self.print(f"{rows} trajectories are under {folder}.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["summary"], checkpoint["clock"] = self.summary, self.monitor.speed.total
        checkpoint["figures"] = self.figures
        if self.lora is not None and self.device_mesh is None:  # a sharded checkpoint is read back by the whole model
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.summary, self.clock, self.figures = (checkpoint[name] for name in ("summary", "clock", "figures"))
