"""Runs that may end at any moment, by SIGTERM."""

import signal
from contextlib import nullcontext
from pathlib import Path

from lightning.pytorch import Callback

from topr.io import atomic
from topr.io.distributed import Preempted, stop_requested

PREEMPTED = "preempted.ckpt"  # removed when training ends


class Preemption(Callback):
    """On SIGTERM `fit` ends after the current update, or sampled token, and writes
    `preempted.ckpt`. Every other command ends at once: what it has written is complete, and the
    same command resumes."""

    def __init__(self):
        self.updated = False  # whether this process has made an update
        stop_requested.clear()

    def listen(self, trainer, pl_module):
        """Handle SIGTERM from now on; Lightning has set its own handler by then."""

        def receive(number, frame):
            stop_requested.set()
            launcher = trainer.strategy.launcher
            if launcher:
                launcher.kill(signal.SIGTERM)  # the processes that this one started
            if trainer.state.fn != "fit":
                raise Preempted

        signal.signal(signal.SIGTERM, receive)

    on_sanity_check_start = on_validation_start = listen
    on_test_start = on_predict_start = listen

    def on_train_start(self, trainer, pl_module):
        self.listen(trainer, pl_module)
        # ModelCheckpoint would keep the checkpoint that it resumes for ever
        trainer.ckpt_path = None

    def on_train_batch_end(self, trainer, *_):
        self.updated = True
        if trainer.strategy.reduce_boolean_decision(stop_requested.is_set(), all=False):
            raise Preempted

    def on_fit_end(self, trainer, pl_module):
        path = preempted_path(trainer)
        if path.exists():
            trainer.strategy.remove_checkpoint(path)

    def on_exception(self, trainer, pl_module, exception):
        if not isinstance(exception, Preempted) or trainer.state.fn != "fit":
            return
        if self.updated and not trainer.fast_dev_run:
            path = preempted_path(trainer)
            with atomic(path) if trainer.is_global_zero else nullcontext() as temporary:
                path = trainer.strategy.broadcast(temporary or path)
                trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            print(
                f"ended by a signal after update {trainer.global_step}; "
                "--ckpt_path last goes on from there"
            )
        else:
            exception.code = 0  # else a launcher would kill rank 0, which may still be writing


def preempted_path(trainer) -> Path:
    """Where the checkpoint of a stopped run lies. All ranks must call."""
    return Path(trainer.log_dir or ".", "checkpoints", PREEMPTED)
