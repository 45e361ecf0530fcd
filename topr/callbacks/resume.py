"""Runs that may end at any moment: complete checkpoints, SIGTERM, exact resumption."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from topr.callbacks.evaluate import Evaluate, find
from topr.distributed import Preempted, stop_requested
from topr.io import atomic, explained, remove

PREEMPTED = "preempted.ckpt"  # written on SIGTERM, removed when training ends


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint file appears under its name when it is complete, and a folder of shards disappears at once.
    Lightning would hold the whole checkpoint in memory twice. A folder of shards is complete when it holds meta.pt,
    which is written last; see `updates`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        what, errors = (
            f"the checkpoint {path} cannot be written",
            (OSError, RuntimeError),
        )  # torch raises the latter
        remedy = "earlier ones are kept: make room and resume with --ckpt_path last"
        with explained(what, errors, remedy), atomic(path) as temporary:
            torch.save(checkpoint, temporary)

    def remove_checkpoint(self, path: str | Path) -> None:
        path = Path(path)
        aside = path.with_name(
            f".{path.name}.{os.getpid()}.old"
        )  # half a folder must not pass for a checkpoint
        os.replace(path, aside)
        remove(aside)


def updates(checkpoint: Path) -> int | None:
    """Updates before a checkpoint, a file or a folder of shards; None if it is incomplete or not a checkpoint."""
    try:
        file = checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint
        content = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
        if checkpoint.is_dir() and not (checkpoint / ".metadata").stat().st_size:
            return None
        return (
            content["global_step"]
            if content.keys() >= {"loops", "pytorch-lightning_version"}
            else None
        )
    except Exception:  # whatever torch raises about a broken file
        return None


class ExactResume(Callback):
    """State for exact resumption, beyond what Lightning keeps in a checkpoint; obeys SIGTERM. On SIGTERM (on SLURM also
    on SIGUSR1) `fit` ends after the current update, or sampled token, and writes `preempted.ckpt`. Every other command
    ends at once: what it has written is complete, and the same command resumes. If a checkpoint was saved just before a
    validation, the resumed run starts with that validation."""

    def __init__(self):
        self.signals = (
            {signal.SIGTERM, signal.SIGUSR1} if "SLURM_JOB_ID" in os.environ else {signal.SIGTERM}
        )
        self.training, self.random = False, {}

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        stop_requested.clear()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.listen(trainer)
        self.training = True
        folder = Path(trainer.log_dir or ".") / "checkpoints"
        if trainer.ckpt_path and Path(trainer.ckpt_path).parent.absolute() == folder.absolute():
            trainer.ckpt_path = (
                None  # ModelCheckpoint would keep it for ever, one after each interruption
            )
        if self.random:
            torch.set_rng_state(self.random["cpu"])
            if module.device.type == "cuda" and "cuda" in self.random:  # absent if a CPU saved it
                torch.cuda.set_rng_state(self.random["cuda"], module.device)

    def listen(self, trainer: Any, *_: Any) -> None:
        """Handle the signals from now on; Lightning has set its own handlers by then."""

        def receive(number: int, frame: Any) -> None:
            stop_requested.set()
            if getattr(trainer.strategy.launcher, "procs", None):
                trainer.strategy.launcher.kill(
                    signal.SIGTERM
                )  # the processes that this one started
            if trainer.state.fn != "fit":
                raise Preempted

        for number in self.signals:
            signal.signal(number, receive)

    on_validation_start = on_test_start = on_predict_start = listen  # type: ignore[assignment]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = {"cpu": torch.get_rng_state()}
        if module.device.type == "cuda":
            checkpoint["random"]["cuda"] = torch.cuda.get_rng_state(module.device)
        due = trainer.validating or trainer.fit_loop.epoch_loop._should_check_val_fx(
            trainer.fit_loop._data_fetcher
        )
        validated = find(trainer, Evaluate).validated[0]
        checkpoint["validation_due"] = bool(due and validated < trainer.global_step)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self.random = checkpoint["random"]
        trainer.datamodule.padded = module.policy.padded  # `Monitor` sets it only after this hook
        # Lightning counts micro-batches. An update may now take another number of them, and a checkpoint that a
        # validation wrote may lie within an update: go back to the last whole update, where the loader resumes as well.
        loop = checkpoint["loops"]["fit_loop"]
        (loader,) = loop["state_dict"]["combined_loader"]
        done = loader["global_batches"] * trainer.datamodule.microbatches(loader["epoch"])
        for counts in loop[
            "epoch_progress"
        ].values():  # a run resumed at the end of an epoch does not count the next
            counts["ready"] = counts["started"] = loader["epoch"] + 1
            counts["completed"] = counts["processed"]
        current = loop["epoch_loop.batch_progress"]["current"]
        if (
            loop["epoch_progress"]["current"]["processed"] > loader["epoch"]
        ):  # the epoch was over: begin the next
            done, loop["epoch_loop.batch_progress"]["is_last_batch"] = 0, False
        shift = done - current["processed"]
        current.update({name: count + shift for name, count in current.items()})
        validation, due = loop["epoch_loop.val_loop.batch_progress"], checkpoint["validation_due"]
        validation["total"] |= {
            "ready": 1,
            "started": 1,
            "processed": 1 - due,
            "completed": 1 - due,
        }
        if due:  # Lightning starts with a validation that had begun
            for counts in loop["epoch_loop.batch_progress"]["total"], current:
                counts["completed"] = counts["processed"]
            validation["current"] |= {"ready": 0, "started": 0, "processed": 0, "completed": 0}

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step  # the loggers' step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        whole = (
            trainer.fit_loop.epoch_loop.batch_progress.current.ready
            % trainer.accumulate_grad_batches
            == 0
        )
        if whole and trainer.strategy.reduce_boolean_decision(stop_requested.is_set(), all=False):
            raise Preempted

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.training = False  # a checkpoint written from now on would miss the end; the last one leads here again

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        preempted = Path(trainer.log_dir or ".") / "checkpoints" / PREEMPTED  # a collective
        if trainer.is_global_zero and preempted.exists():
            trainer.strategy.remove_checkpoint(preempted)

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        if isinstance(error, CheckpointException):  # of shards that filled the disk, on every rank
            for folder in Path(trainer.log_dir).glob("checkpoints/*.ckpt/"):
                if trainer.is_global_zero and updates(folder) is None:
                    remove(folder)
        if not isinstance(error, Preempted) or trainer.state.fn != "fit":
            return
        if self.training and trainer.global_step and not trainer.fast_dev_run:
            path = Path(trainer.log_dir) / "checkpoints" / PREEMPTED
            with atomic(path) if trainer.is_global_zero else nullcontext() as temporary:
                trainer.save_checkpoint(trainer.strategy.broadcast(temporary), weights_only=False)
        if trainer.is_global_zero:
            print(
                f"ended by a signal after update {trainer.global_step}; --ckpt_path last goes on from there"
            )
        else:
            error.code = 0  # else a launcher would kill rank 0, which may still be writing
