"""Lightning's Trainer for runs that may end at any moment: checkpoints complete or not at all, SIGTERM obeyed."""

import os
import pickle
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from topr.io import InputError, atomic, first_line
from topr.ranks import refuse, total_norm

PREEMPTED = "preempted.ckpt"  # of a run ended by SIGTERM, until it has written another


class Trainer(lightning.pytorch.Trainer):
    """Whoever saves a checkpoint, a file or a folder of shards, it appears under its name when all of it is there."""

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        self.strategy.checkpoint_io = files = _Files()
        path = Path(self.strategy.broadcast(str(filepath)))
        with atomic(path) if self.is_global_zero else nullcontext() as temporary:
            try:
                super().save_checkpoint(self.strategy.broadcast(temporary), weights_only, storage_options)
                failure = files.failure
            except (OSError, RuntimeError, CheckpointException) as error:  # torch's writers raise the latter two
                failure = error
            refusal = failure and InputError(
                f"the checkpoint {path} cannot be written ({reason(failure)}); the ones before it are kept: make room "
                "and go on with --ckpt_path last"
            )
            refuse(refusal)
        older = path.with_name(PREEMPTED)
        if self.is_global_zero and older.exists() and older != path:
            self.strategy.remove_checkpoint(older)
        self.strategy.barrier()


def reason(error: BaseException) -> str:
    """What an error of torch's writers and readers comes from; of shards, the first rank's."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return first_line(failures[0][0] if failures else error)


class _Files(TorchCheckpointIO):
    """Straight to the file: Lightning holds the whole checkpoint in memory twice and writes it to /tmp first."""

    failure: Exception | None = None  # of the one rank that writes, told when all ranks have come through

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any | None = None) -> None:
        try:
            torch.save(checkpoint, path)
        except (OSError, RuntimeError) as error:
            self.failure = error

    def remove_checkpoint(self, path: str | Path) -> None:
        path = Path(path)
        aside = path.with_name(f".{path.name}.{os.getpid()}.old")  # half a folder must not pass for a checkpoint
        os.replace(path, aside)
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


class ShardIndex(pickle.Unpickler):
    """Reads the index of a sharded checkpoint, which torch would unpickle with whatever it calls."""

    NAMES = {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"}
    NAMES |= {"MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout", "Size"}
    NAMES |= {"PosixPath", "float32", "float64", "bfloat16", "float16", "int64", "int32", "bool", "uint8"}

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.NAMES or module.partition(".")[0] not in ("torch", "pathlib"):
            raise pickle.UnpicklingError(f"the index of the shards names {module}.{name}")
        return super().find_class(module, name)


class Preempted(SystemExit):
    """The run was asked to end; its exit code is that of a process ended by SIGTERM."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)


class Survival(Callback):
    """What a run needs to go on as if nothing had been, beyond what Lightning keeps in a checkpoint.

    On SIGTERM (on SLURM also on SIGUSR1) `fit` ends after the update, or at the sampled token, that it is at and leaves
    `preempted.ckpt`. Every other command ends at once: what it wrote is complete, and the same command goes on from
    there. A validation that a checkpoint came just before is made up for; the generators' states come back.
    """

    def __init__(self):
        self.signals = {signal.SIGTERM, signal.SIGUSR1} if "SLURM_JOB_ID" in os.environ else {signal.SIGTERM}
        self.training, self.random = False, {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._listen(trainer)
        self.training = True
        folder = Path(trainer.log_dir or ".") / "checkpoints"
        if trainer.ckpt_path and Path(trainer.ckpt_path).parent.absolute() == folder.absolute():
            trainer.ckpt_path = None  # else it would stay for ever, one after each interruption
        if self.random:
            torch.set_rng_state(self.random["cpu"])
            if module.device.type == "cuda" and "cuda" in self.random:  # not where a CPU saved it
                torch.cuda.set_rng_state(self.random["cuda"], module.device)

    def on_predict_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._listen(trainer)

    on_validation_start = on_test_start = on_predict_start

    def _listen(self, trainer: Trainer) -> None:
        def receive(number: int, frame: Any) -> None:
            trainer.lightning_module.interrupted = True
            if getattr(trainer.strategy.launcher, "procs", None):
                trainer.strategy.launcher.kill(signal.SIGTERM)  # the processes that this one started
            if trainer.state.fn != "fit":
                raise Preempted

        for number in self.signals:
            signal.signal(number, receive)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not total_norm(module.parameters()).isfinite():
            refuse(
                InputError(
                    f"some weights are NaN or infinite after update {trainer.global_step}; no checkpoint is written of "
                    "them and earlier ones are kept: lower the learning rate and go on with --ckpt_path last"
                )
            )
        checkpoint["random"] = {"cpu": torch.get_rng_state()}
        if module.device.type == "cuda":
            checkpoint["random"]["cuda"] = torch.cuda.get_rng_state(module.device)
        due = trainer.validating or trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        checkpoint["validation_due"] = bool(due and module.figures[0] < trainer.global_step)

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self.random = checkpoint["random"]
        # The trainer counts micro-batches, of which another number may make a step now, and a checkpoint from a
        # validation may lie within one: go back to the last whole step, where the loader resumes as well.
        loop = checkpoint["loops"]["fit_loop"]
        (loader,) = loop["state_dict"]["combined_loader"]
        done = loader["global_batches"] * trainer.datamodule.microbatches(loader["epoch"])
        for counts in loop["epoch_progress"].values():  # a run resumed at the end of an epoch does not count the next
            counts["ready"] = counts["started"] = loader["epoch"] + 1
        current = loop["epoch_loop.batch_progress"]["current"]
        shift = done - current["processed"]
        current.update({name: count + shift for name, count in current.items()})
        begun, due = loop["epoch_loop.val_loop.batch_progress"], checkpoint["validation_due"]
        begun["total"] |= {"ready": 1, "started": 1, "processed": 1 - due, "completed": 1 - due}
        if due:  # say that it had begun: then the trainer starts with it
            for counts in loop["epoch_loop.batch_progress"]["total"], current:
                counts["completed"] = counts["processed"]
            begun["current"] |= {"ready": 0, "started": 0, "processed": 0, "completed": 0}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step  # the loggers' step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        whole = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0
        if whole and trainer.strategy.reduce_boolean_decision(module.interrupted, all=False):
            raise Preempted

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.training = False  # a checkpoint of now would hold a run without an end; the last one leads here again

    def on_exception(self, trainer: Trainer, module: LightningModule, error: BaseException) -> None:
        if not isinstance(error, Preempted) or trainer.state.fn != "fit":
            return
        if self.training and trainer.global_step and not trainer.fast_dev_run:
            trainer.save_checkpoint(Path(trainer.log_dir) / "checkpoints" / PREEMPTED)
        if trainer.is_global_zero:
            print(f"ended by SIGTERM after update {trainer.global_step}; --ckpt_path last goes on from there")
        else:
            error.code = 0  # else a launcher would kill rank 0, which may not be done yet
