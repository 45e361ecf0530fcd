"""Trajectory files of what `predict` samples."""

from lightning.pytorch.callbacks import BasePredictionWriter

from topr.datamodule import ProblemBatch
from topr.distributed import gather
from topr.trajectories.file import write_trajectories


class PredictionWriter(BasePredictionWriter):
    """Writes the trajectories of each batch to the file that the batch names, if any. A trial run
    (fast_dev_run) writes nothing."""

    def __init__(self):
        super().__init__(write_interval="batch")

    def write_on_batch_end(
        self, trainer, pl_module, prediction, batch_indices, batch: ProblemBatch, *_
    ):
        if batch.path is not None and prediction and not trainer.fast_dev_run:
            write_trajectories(batch.path, prediction, batch.job.metadata)

    def on_predict_end(self, trainer, pl_module):
        """Say where the trajectories are, when every rank has written its files."""
        gather(None)
        folder = getattr(trainer.datamodule, "out", None)
        if folder is not None and trainer.is_global_zero and not trainer.fast_dev_run:
            print(f"trajectories are under {folder}")
