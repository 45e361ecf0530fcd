"""Train, validate, test or sample: `python train.py fit --config configs/arithmetic.yaml`."""

import logging
import os
import re
import shutil
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# large CPU tensors in huge pages save up to a seventh of an update; torch reads this at its start
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.api import CheckpointException

from topr.callbacks import ExportPolicy, Preemption, Speed, TensorBoardExtras
from topr.checkpoints import updates
from topr.datamodule import TrajectoryDataModule
from topr.distributed import end_with_parent, rank
from topr.io import (
    InputError,
    OneSentenceErrors,
    command,
    first_line,
    is_out_of_memory,
    lock,
    write_text,
)
from topr.module import PolicyModule
from topr.runs import Run, check_same_run

DEFAULTS = {
    "max_epochs": 1,
    "enable_model_summary": False,
    "reload_dataloaders_every_n_epochs": 1,  # epochs of whole groups can differ in length
    "logger": {
        "class_path": "TensorBoardLogger",
        "init_args": {"save_dir": "runs", "default_hp_metric": False},
    },
    "plugins": [{"class_path": "topr.checkpoints.AtomicCheckpointIO"}],
}


class Parser(OneSentenceErrors, LightningArgumentParser):
    """The parser of a subcommand."""

    hint = " (python train.py fit --help lists every key)"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        found = re.match(r"unrecognized arguments: --(optimizer|lr_scheduler)\b", message)
        if found:
            message += f"; here it is --model.{found[1]}"
        super().error(message, ex)

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        except (InputError, UnicodeDecodeError) as error:  # neither names the file
            raise InputError(f"{cfg_path}: {error}") from error


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml to the run's folder, and logs what runs are compared by."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(trainer.log_dir or ".")  # the same on all ranks
        if trainer.is_global_zero:
            text = self.parser.dump(self.config, skip_none=False)
            write_text(folder / self.config_filename, text)
        config = self.config
        arguments = config.model.loss.get("init_args", {}).items()
        advantage = config.data.advantage
        found = {
            "loss": config.model.loss.class_path.rpartition(".")[2],
            "loss_arguments": ", ".join(f"{name}={value}" for name, value in arguments),
            "advantage": advantage.class_path.rpartition(".")[2] if advantage else None,
            "lr": config.get("model.optimizer.init_args.lr"),
            "seed": config.data.seed,
            "batch_size": int(config.data.batch_size),
            "policy": config.model.policy,
            "data": config.data.train,
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(found, {})  # by default it would add a metric, hp_metric
            else:
                logger.log_hyperparams(found)


class CLI(LightningCLI):
    """Lightning's command line with folders of runs, exact resumption and one-sentence errors."""

    trainer: Any
    run: Run | None = None  # of fit

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's subcommands; only the one asked for, since a parser takes a quarter of a
        second."""
        every = LightningCLI.subcommands()
        return {name: every[name] for name in sys.argv[1:2] if name in every} or every

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "data.seed", compute_fn=check_seed)
        parser.link_arguments("model.policy", "data.policy")
        parser.link_arguments("model.task", "data.task", apply_on="instantiate")
        parser.link_arguments(
            "model.loss",
            "data.batching",
            compute_fn=lambda loss: loss.batching,
            apply_on="instantiate",
        )

    def _parse_ckpt_path(self) -> None:
        """Lightning would lay the hyper-parameters of the checkpoint over what the user wrote."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        config.data.seed = int(config.seed_everything)  # with `true`, Lightning has drawn one
        if self.subcommand == "predict":
            config.return_predictions = False  # they are written to files, and may be many
        if self.subcommand == "predict" and config.data.out is None:
            raise InputError("data.out is not set; predict needs it")
        run = Run.of(config)
        if config.get("ckpt_path") == "last":
            checkpoint, done = run.resume()
            config.ckpt_path = checkpoint and str(checkpoint)
            print(f"resuming {checkpoint}" if checkpoint else run.nothing_to_resume())
        elif config.get("ckpt_path") and updates(Path(config.ckpt_path)) is None:
            message = f"--ckpt_path: {config.ckpt_path} is incomplete or not a checkpoint"
            raise InputError(f"{message}; name another")
        if self.subcommand == "fit":
            if config.get("ckpt_path"):
                check_same_run(run, self._parser("fit").dump(config, skip_none=False))
            self.run = run
            run.hand_out(config.trainer)
        else:  # no run's folder, which would stay empty
            config.trainer.logger = False
            self.save_config_callback = None

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (MisconfigurationException, TypeError, ValueError, ImportError) as error:
            raise InputError(first_line(error)) from error

    def after_instantiate_classes(self) -> None:
        """Give checkpoints their folder; check that each device holds a shard of its own."""
        trainer = self.trainer
        for callback in trainer.checkpoint_callbacks:
            if self.run and isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.run.folder / "checkpoints")
        if self.run:
            self.run.keep_logged(trainer.loggers)
        config = self.config[self.subcommand]
        checkpoint = config.get("ckpt_path")
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            if checkpoint and Path(checkpoint).is_dir():
                message = f"the checkpoint {checkpoint} is sharded"
                raise InputError(f"{message}; resume it with --config configs/fsdp.yaml")
            return
        devices = trainer.num_devices * trainer.num_nodes
        sizes = config.trainer.strategy.init_args
        if (sizes.data_parallel_size, sizes.tensor_parallel_size) != (devices, 1):
            key = "--trainer.strategy.init_args."
            remedy = f"set {key}data_parallel_size {devices} {key}tensor_parallel_size 1"
            raise InputError(f"each of {devices} device(s) must hold its own shard: {remedy}")

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a trainer's command. If its input turns out bad before the first update, remove the
        run's new folder."""
        folder = self.run.folder if self.run and not self.trainer.fast_dev_run else None
        created = folder is not None and not folder.exists()
        if folder and self.trainer.is_global_zero:
            lock(folder)
        try:
            super()._run_subcommand(subcommand)
        except (
            InputError,
            MisconfigurationException,
            RuntimeError,
            MemoryError,
            CheckpointException,
        ) as error:
            message = self._explain(error)
            if created and self.trainer.is_global_zero and self.trainer.global_step == 0:
                shutil.rmtree(folder, ignore_errors=True)  # type: ignore[arg-type]
                with suppress(OSError):  # other versions are there
                    folder.parent.rmdir()  # type: ignore[union-attr]
            raise InputError(message) from error

    def _explain(self, error: BaseException) -> str:
        """One sentence for an error of a run; an error of unknown cause is raised again."""
        if isinstance(error, InputError | MisconfigurationException):
            return first_line(error)
        # Lightning has reset its own state
        training = self.trainer.fit_loop.epoch_loop.total_batch_idx >= 0
        if isinstance(error, CheckpointException):
            if rank():  # every rank raises it
                raise SystemExit(0) from error
            reason = first_line(next(iter(error.failures.values()))[0])
            if training:
                remedy = "make room and resume with --ckpt_path last"
                return f"the checkpoint cannot be written ({reason}); {remedy}"
            checkpoint = self.config[self.subcommand].ckpt_path
            return f"the checkpoint {checkpoint} cannot be loaded ({reason}); name another"
        if not is_out_of_memory(error):
            raise error
        if training:
            key = f"data.microbatch_tokens, now {self.datamodule.microbatch_tokens}"
            update = self.trainer.global_step + 1
            return f"out of memory in update {update} ({first_line(error)}); lower {key}"
        remedy = "take a smaller policy, or shard it (configs/fsdp.yaml)"
        return f"out of memory ({first_line(error)}); {remedy}"


def check_seed(value: bool | int) -> int:
    if not 0 <= value < 2**32:  # numpy takes 32 bits
        raise InputError(f"seed_everything is {value}; it must lie between 0 and {2**32 - 1}")
    return int(value)


def quieten() -> None:
    """Drop what libraries print that does not concern the user."""
    ignored = [
        "LeafSpec",  # between Lightning and torch
        "gradient_checkpointing",  # between peft and transformers
        "exists and is not empty",  # a run that is resumed
        "infer the batch indices",  # of predict, which no one asks for
        "The dirpath has changed",  # a checkpoint that is tested
        "no pre-optimization state",  # checkpoints hold the weights after an update
    ]
    warnings.filterwarnings("ignore", message=f".*({'|'.join(ignored)}).*")
    dropped = re.compile("litlogger|TPU|stopped: `max_")  # advertising, absent hardware
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: not dropped.search(record.getMessage()))


def main() -> None:
    end_with_parent()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # nothing in a checkpoint is executed
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns when the loader forks
    quieten()
    for evaluation, split in ((Trainer.validate, "val"), (Trainer.test, "test")):
        # shown as help
        text = f"Sample and grade responses to the problems in data.{split}, and print the metrics."
        evaluation.__doc__ = text
    text = "Sample, grade and score responses to data.problems; write trajectory files to data.out."
    Trainer.predict.__doc__ = text
    callbacks = [Speed(), TensorBoardExtras(), ExportPolicy(), Preemption()]
    with command():
        CLI(
            PolicyModule,
            TrajectoryDataModule,
            parser_class=Parser,
            trainer_defaults=DEFAULTS | {"callbacks": callbacks},
            save_config_callback=SaveConfig,
            auto_configure_optimizers=False,
            seed_everything_default=0,
        )


if __name__ == "__main__":
    # Ctrl-C, too, can be resumed
    signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    main()
