"""Trajectory files of what `predict` samples."""

from pathlib import Path
from shlex import quote
from typing import Any

import pyarrow.parquet as pq
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from topr.datamodule import PredictionBatch
from topr.distributed import gather
from topr.io import InputError
from topr.trajectories.file import Trajectory, write_trajectories


class PredictionWriter(BasePredictionWriter):
    """Writes the trajectories of each batch to the file that the batch names, if any. A trial run
    (fast_dev_run) writes nothing."""

    def __init__(self) -> None:
        super().__init__(write_interval="batch")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: list[Trajectory],
        batch_indices: Any,
        batch: PredictionBatch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if batch.path is not None and prediction and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_trajectories(batch.path, prediction, batch.job.metadata)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the folder of trajectories now holds."""
        folder = getattr(trainer.datamodule, "out", None)  # type: ignore[attr-defined]
        gather(None)  # until every rank has written its files
        if folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        files = sorted(Path(folder).glob("*.parquet"))
        if not files:
            message = "the sampler left out every response to data.problems"
            raise InputError(f"{message}; look at its warnings")
        count = sum(pq.read_metadata(file).num_rows for file in files)
        print(f"{count} trajectories are under {folder}. Next:")
        print(f"  python -m topr.trajectories inspect {quote(f'{folder}/*.parquet')}")
