"""Runs that may end at any moment: SIGTERM, and on SLURM SIGUSR1."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.checkpoint.api import CheckpointException

from topr.checkpoints import updates
from topr.distributed import Preempted, stop_requested
from topr.io import atomic, remove

PREEMPTED = "preempted.ckpt"  # removed when training ends


class Preemption(Callback):
    """On a signal `fit` ends after the current update, or sampled token, and writes
    `preempted.ckpt`. Every other command ends at once: what it has written is complete, and the
    same command resumes."""

    def __init__(self) -> None:
        self.signals = [signal.SIGTERM]
        if "SLURM_JOB_ID" in os.environ:
            self.signals.append(signal.SIGUSR1)
        self.updated = False  # whether this process has made an update

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        stop_requested.clear()

    def listen(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the signals from now on; Lightning has set its own handlers by then."""

        def receive(number: int, frame: Any) -> None:
            stop_requested.set()
            launcher: Any = trainer.strategy.launcher
            if getattr(launcher, "procs", None):
                launcher.kill(signal.SIGTERM)  # the processes that this one started
            if trainer.state.fn != "fit":
                raise Preempted

        for number in self.signals:
            signal.signal(number, receive)

    on_sanity_check_start = on_validation_start = listen
    on_test_start = on_predict_start = listen

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.listen(trainer, pl_module)
        # ModelCheckpoint would keep the checkpoint that it resumes for ever
        folder = Path(trainer.log_dir or ".", "checkpoints")
        if trainer.ckpt_path and Path(trainer.ckpt_path).parent.absolute() == folder.absolute():
            trainer.ckpt_path = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.updated = True
        if trainer.strategy.reduce_boolean_decision(stop_requested.is_set(), all=False):
            raise Preempted

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        preempted = Path(trainer.log_dir or ".", "checkpoints", PREEMPTED)  # a collective
        if trainer.is_global_zero and preempted.exists():
            trainer.strategy.remove_checkpoint(preempted)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, CheckpointException):  # shards that filled the disk
            for folder in Path(trainer.log_dir or ".").glob("checkpoints/*.ckpt/"):
                if trainer.is_global_zero and updates(folder) is None:
                    remove(folder)
        if not isinstance(exception, Preempted) or trainer.state.fn != "fit":
            return
        if self.updated and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = Path(trainer.log_dir or ".", "checkpoints", PREEMPTED)
            with atomic(path) if trainer.is_global_zero else nullcontext() as temporary:
                trainer.save_checkpoint(trainer.strategy.broadcast(temporary), weights_only=False)
        if trainer.is_global_zero:
            step = trainer.global_step
            print(f"ended by a signal after update {step}; --ckpt_path last goes on from there")
        else:
            exception.code = 0  # else a launcher would kill rank 0, which may still be writing
