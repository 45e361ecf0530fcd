"""Trajectory files of what `predict` samples."""

from pathlib import Path

import pyarrow.parquet as pq
from lightning.pytorch.callbacks import BasePredictionWriter

from topr.datamodule import ProblemBatch
from topr.distributed import gather
from topr.trajectories.file import Trajectory, write_trajectories


class PredictionWriter(BasePredictionWriter):
    """Writes the trajectories of each batch to the file that the batch names, if any. A trial run
    (fast_dev_run) writes nothing."""

    def __init__(self):
        super().__init__(write_interval="batch")

    def write_on_batch_end(
        self,
        trainer,
        pl_module,
        prediction: list[Trajectory],
        batch_indices,
        batch: ProblemBatch,
        batch_idx: int,
        dataloader_idx: int,
    ):
        if batch.path is not None and prediction and not trainer.fast_dev_run:
            write_trajectories(batch.path, prediction, batch.job.metadata)

    def on_predict_end(self, trainer, pl_module):
        """Say what the folder of trajectories now holds."""
        gather(None)  # until every rank has written its files
        folder = getattr(trainer.datamodule, "out", None)
        if folder is not None and trainer.is_global_zero and not trainer.fast_dev_run:
            files = Path(folder).glob("*.parquet")
            count = sum(pq.read_metadata(file).num_rows for file in files)
            print(f"{count} trajectories are under {folder}")
