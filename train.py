"""Train, validate, test or sample: `python train.py fit --config configs/arithmetic.yaml`."""

import logging
import os
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

# large CPU tensors in huge pages save up to a seventh of an update; torch reads this at its start
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.api import CheckpointException

from topr.callbacks.board import TensorBoardExtras
from topr.callbacks.export import ExportPolicy
from topr.callbacks.preemption import Preemption
from topr.callbacks.speed import Speed
from topr.datamodule import TrajectoryDataModule
from topr.io import InputError, explained, first_line, lock, remove, write_text
from topr.io.commands import OneSentenceErrors, command
from topr.io.distributed import end_rank_with_launcher, rank
from topr.module import PolicyModule
from topr.run.checkpoints import updates_before
from topr.run.folder import Run, new_run

DEFAULTS = {
    "max_epochs": 1,
    "enable_model_summary": False,
    "reload_dataloaders_every_n_epochs": 1,  # epochs of whole groups can differ in length
    "logger": {
        "class_path": "TensorBoardLogger",
        "init_args": {"save_dir": "runs", "default_hp_metric": False},
    },
    "plugins": [{"class_path": "topr.run.checkpoints.AtomicCheckpointIO"}],
}


class Parser(OneSentenceErrors, LightningArgumentParser):
    """The parser of a subcommand."""

    hint = " (python train.py fit --help lists every key)"


class CLI(LightningCLI):
    """Lightning's command line with folders of runs, exact resumption and one-sentence errors."""

    trainer: Any
    run: Any = None  # the `Run` of fit

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's subcommands; only the one asked for, since a parser takes a quarter of a
        second."""
        every = LightningCLI.subcommands()
        return {name: every[name] for name in sys.argv[1:2] if name in every} or every

    def add_arguments_to_parser(self, parser: LightningArgumentParser):
        parser.add_lightning_class_args(ExportPolicy, "export")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.link_arguments("model.policy", "data.policy")
        parser.link_arguments("model.task", "data.task", apply_on="instantiate")
        parser.link_arguments(
            "model.loss",
            "data.batching",
            compute_fn=lambda loss: loss.batching,
            apply_on="instantiate",
        )

    def _set_seed(self):
        with explained("seed_everything is no valid seed", ValueError):
            super()._set_seed()

    def _parse_ckpt_path(self):
        """Do nothing: Lightning would lay the checkpoint's hyper-parameters over what the user
        wrote."""

    def before_instantiate_classes(self):
        """Decide the run's folder and the checkpoint that it resumes."""
        config = self.config[self.subcommand]
        config.data.seed = int(config.seed_everything)  # with `true`, Lightning has drawn one
        if self.subcommand == "predict":
            config.return_predictions = False  # they are written to files, and may be many
            if not config.data.out:
                raise InputError("data.out is not set; predict needs it")
        # ranks that rank 0 starts find its folder, and count one further; Lightning takes rank 0's
        run = new_run(config)
        checkpoint = self._find_checkpoint(run, config.get("ckpt_path"))
        config.ckpt_path = None  # in config.yaml, which is of the whole run
        if self.subcommand == "fit":
            self.yaml = self._parser("fit").dump(config, skip_none=False)
            run.direct_loggers(config.trainer)
            self.run = run
        else:  # no run's folder, which would stay empty
            config.trainer.logger = False
        config.ckpt_path = checkpoint

    def _find_checkpoint(self, run: Run, checkpoint: str | None) -> str | None:
        """The checkpoint that --ckpt_path names; that of `last` makes `run` the one it resumes."""
        if checkpoint != "last":
            if checkpoint and updates_before(Path(checkpoint)) is None:
                raise InputError(f"--ckpt_path: {checkpoint} is incomplete or not a checkpoint")
            return checkpoint
        newest = run.resume()
        if newest:
            rank_zero_only(print)(f"resuming {newest}")
            return str(newest)
        nothing = f"no complete checkpoint under {run.root}"
        if self.subcommand != "fit":
            raise InputError(f"--ckpt_path last: {nothing}", "train first, or name another")
        rank_zero_only(print)(f"{nothing}: starting afresh")
        return None

    def instantiate_classes(self):
        try:
            super().instantiate_classes()
        except (MisconfigurationException, TypeError, ValueError, ImportError) as error:
            # jsonargparse wraps the error of a class in one that lists every type it tried
            raise InputError(first_line(error.__cause__ or error)) from error

    def after_instantiate_classes(self):
        """Give checkpoints their folder; check that each device holds a shard of its own."""
        trainer = self.trainer
        for callback in trainer.checkpoint_callbacks:
            if self.run and isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.run.folder / "checkpoints")
        config = self.config[self.subcommand]
        checkpoint = config.get("ckpt_path")
        if isinstance(trainer.strategy, ModelParallelStrategy):
            devices = trainer.num_devices * trainer.num_nodes
            sizes = config.trainer.strategy.init_args
            if (sizes.data_parallel_size, sizes.tensor_parallel_size) != (devices, 1):
                key = "--trainer.strategy.init_args."
                raise InputError(
                    f"each of {devices} device(s) must hold its own shard",
                    f"set {key}data_parallel_size {devices} {key}tensor_parallel_size 1",
                )
        elif checkpoint and Path(checkpoint).is_dir():
            raise InputError(
                f"the checkpoint {checkpoint} is sharded",
                "resume it with --config configs/fsdp.yaml",
            )

    def begin(self, trainer, _):
        """Once a resumed checkpoint has been checked, drop the rows that came after it; write
        config.yaml."""
        self.run.keep_csv_rows(trainer.loggers, self.run.updates)
        remove(self.run.folder / "hparams.yaml")  # TensorBoardLogger would keep an old one
        write_text(self.run.folder / "config.yaml", self.yaml)

    def _run_subcommand(self, subcommand: str):
        """Run a trainer's command. If it ends in an error before it trains, it leaves no files."""
        trainer = self.trainer
        folder = None
        if self.run and trainer.is_global_zero and not trainer.fast_dev_run:
            folder = self.run.folder
            before = {folder, *folder.rglob("*")} if folder.exists() else set()
            lock(folder)
            self.run.keep_csv_rows(trainer.loggers, sys.maxsize)
            trainer.callbacks.append(LambdaCallback(on_fit_start=self.begin))
        try:
            super()._run_subcommand(subcommand)
        except (Exception, CheckpointException) as error:
            if folder and trainer.global_step == 0:
                for path in {folder, *folder.rglob("*")} - before:
                    remove(path)
            if isinstance(error, MisconfigurationException):
                raise InputError(first_line(error)) from error
            if isinstance(error, CheckpointException):  # not an Exception; every rank raises it
                if rank():
                    raise SystemExit(0) from error
                reason = first_line(next(iter(error.failures.values()))[0])
                raise InputError(
                    f"a sharded checkpoint cannot be written or read ({reason})",
                    "make room and resume with --ckpt_path last, or name another",
                ) from error
            raise


def quieten():
    """Drop what libraries print that does not concern the user."""
    ignored = [
        "LeafSpec",  # between Lightning and torch
        "gradient_checkpointing",  # between peft and transformers
        "exists and is not empty",  # a run that is resumed
        "across ranks is zero",  # without data.val
        "sync_dist",  # figures are equal on all ranks
        "The dirpath has changed",  # a checkpoint that is tested
        "no logger configured",  # for validate and test, which only print
        "no pre-optimization state",  # checkpoints hold the weights after an update
    ]
    warnings.filterwarnings("ignore", message=f".*({'|'.join(ignored)}).*")
    dropped = re.compile("litlogger|TPU|stopped: `max_")  # advertising, absent hardware
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not dropped.search(record.getMessage())
    )


def main():
    end_rank_with_launcher()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # nothing in a checkpoint is executed
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns when the loader forks
    quieten()
    callbacks = [Speed(), TensorBoardExtras(), Preemption()]
    with command():
        CLI(
            PolicyModule,
            TrajectoryDataModule,
            parser_class=Parser,
            trainer_defaults=DEFAULTS | {"callbacks": callbacks},
            save_config_callback=None,
            auto_configure_optimizers=False,
            seed_everything_default=0,
        )


if __name__ == "__main__":
    # Ctrl-C, too, can be resumed
    signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    main()
