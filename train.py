"""Train, validate, test or sample from a policy: `python train.py fit --config configs/arithmetic.yaml`."""

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

# large CPU tensors in huge pages save up to a seventh of an update; torch reads this at its first tensor
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import yaml
from jsonargparse import dict_to_namespace
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.api import CheckpointException

from topr.callbacks import ExactResume, ExportPolicy
from topr.callbacks.resume import updates
from topr.datamodule import TrajectoryDataModule
from topr.distributed import Progress, end_with_parent, rank
from topr.io import (
    InputError,
    OneSentenceErrors,
    check_folder,
    command,
    first_line,
    is_out_of_memory,
    lock,
    write_text,
)
from topr.module import PolicyModule

# a resumed run keeps these settings
DECISIVE = [
    "model.policy",
    "model.task",
    "model.loss",
    "model.lora",
    "model.optimizer",
    "model.lr_scheduler",
]
DECISIVE += ["data.train", "data.batch_size", "seed_everything"]


class Parser(OneSentenceErrors, LightningArgumentParser):
    """The parser of a subcommand."""

    hint = " (python train.py fit --help lists every key)"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if found := re.match(r"unrecognized arguments: --(optimizer|lr_scheduler)\b", message):
            message += f"; here it is --model.{found[1]}"
        super().error(message, ex)


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml atomically: a resumed run is compared with it. Logs what runs are compared by."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        folder = Path(trainer.log_dir)  # the same on all ranks
        if trainer.is_global_zero:
            write_text(
                folder / self.config_filename, self.parser.dump(self.config, skip_none=False)
            )
        loss, data, rate = (
            self.config.model.loss,
            self.config.data,
            self.config.get("model.optimizer.init_args.lr"),
        )
        arguments = ", ".join(
            f"{name}={value}" for name, value in loss.get("init_args", {}).items()
        )
        # the same names for every loss: TensorBoard takes the columns of its table of all runs from one run
        found = {
            "loss": loss.class_path.rpartition(".")[2],
            "loss_arguments": arguments,
            "lr": rate,
            "seed": data.seed,
        }
        found |= {
            "batch_size": int(data.batch_size),
            "policy": self.config.model.policy,
            "data": data.train,
        }
        for logger in (
            trainer.loggers
        ):  # TensorBoard gets no metrics yet; by default it would add one, hp_metric
            logger.log_hyperparams(found, *[{}] * isinstance(logger, TensorBoardLogger))


class CLI(LightningCLI):
    """Lightning's command line with checks of the configuration and exact resumption."""

    trainer: Any

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's subcommands; only the one that was asked for, since each parser takes a quarter of a second."""
        every = LightningCLI.subcommands()
        return {name: every[name] for name in sys.argv[1:2] if name in every} or every

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "data.seed", compute_fn=check_seed)
        parser.link_arguments("model.policy", "data.policy")
        for name in ("loss", "task"):
            parser.link_arguments(f"model.{name}", f"data.{name}", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Do not load the checkpoint here: Lightning looks for hyperparameters, which ours do not hold."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        config.data.seed = int(
            config.seed_everything
        )  # with seed_everything: true, Lightning has drawn a seed
        check_trainer(config.trainer)
        self._name_after_loss(config)
        if config.get("ckpt_path") == "last":
            self._resume_newest(config)
        elif config.get("ckpt_path") and updates(Path(config.ckpt_path)) is None:
            raise InputError(
                f"--ckpt_path: {config.ckpt_path} is incomplete or not a checkpoint; name another"
            )
        if self.subcommand != "fit":  # a run's folder would stay empty
            config.trainer.logger, self.save_config_callback = False, None

    def _name_after_loss(self, config: Any) -> None:
        """Call a run with the overlay configs/loss/X.yaml NAME-X, unless the command line names it."""
        files = [
            Path(path) for path in config.config or [] if path
        ]  # None stands for YAML in place of a file
        overlays = [path.stem for path in files if path.parent.name == "loss"]
        arguments: Any = getattr(config.trainer.logger, "init_args", {})
        if (
            overlays
            and arguments.get("name")
            and not re.search(r"\.logger\.(init_args\.)?name\b", str(sys.argv))
        ):
            arguments.name = f"{arguments.name}-{overlays[-1]}"

    def _resume_newest(self, config: Any) -> None:
        """Continue the newest complete checkpoint of this run's name in its version_N; start afresh without one."""
        logger = config.trainer.logger
        arguments = getattr(logger, "init_args", None)
        if arguments is None or "save_dir" not in arguments:
            raise InputError(
                "--ckpt_path last needs trainer.logger: TensorBoardLogger, which numbers the versions"
            )
        root = Path(arguments.save_dir) / (arguments.name or "")
        found = sorted(
            root.glob("version_*/checkpoints/*.ckpt"), key=os.path.getmtime, reverse=True
        )
        newest, done = next(
            ((path, n) for path in found if (n := updates(path)) is not None), (None, 0)
        )
        config.ckpt_path = newest and str(newest)
        print(
            f"resuming {newest}"
            if newest
            else f"no complete checkpoint under {root}: starting afresh"
        )
        # a run that was killed before its first checkpoint starts again in its own folder
        unfinished = [
            path for path in root.glob("version_*") if not (path / "summary.json").exists()
        ]
        version = (
            newest.parent.parent if newest else max(unfinished, key=os.path.getmtime, default=None)
        )
        if self.subcommand != "fit" or version is None:
            return
        if (version / "config.yaml").is_file():  # otherwise it was killed even before it wrote that
            texts = (
                (version / "config.yaml").read_text(),
                self._parser("fit").dump(config, skip_none=False),
            )
            before, now = (dict_to_namespace(yaml.safe_load(text)) for text in texts)
            changed = next((key for key in DECISIVE if before.get(key) != now.get(key)), None)
            if changed and newest:
                message = f"{newest} comes from a run with another {changed} (see {version / 'config.yaml'})"
                raise InputError(
                    f"{message}; restore that setting, or set another trainer.logger.init_args.name"
                )
            if changed:
                return
        logger.dict_kwargs = {
            "purge_step": done
        }  # TensorBoard drops what was logged after the checkpoint
        arguments.version = int(version.name.removeprefix("version_"))

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (MisconfigurationException, TypeError, ValueError, ImportError) as error:
            raise InputError(first_line(error)) from error

    def instantiate_trainer(self, **settings: Any) -> Any:
        config = self.config_init[self.subcommand].trainer
        callbacks = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
        own = any(
            isinstance(callback, ProgressBar) for callback in callbacks
        )  # shown instead of ours
        Progress.enabled = not own and config.enable_progress_bar is not False
        return super().instantiate_trainer(enable_progress_bar=own, **settings)

    def after_instantiate_classes(self) -> None:
        """Raise an InputError for devices without a shard of their own, and for shards without sharding."""
        config, devices = (
            self.config[self.subcommand],
            self.trainer.num_devices * self.trainer.num_nodes,
        )
        checkpoint = config.get("ckpt_path")
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            if checkpoint and Path(checkpoint).is_dir():
                raise InputError(
                    f"the checkpoint {checkpoint} is sharded; resume it with --config configs/fsdp.yaml"
                )
            return
        key, sizes = "trainer.strategy.init_args.", config.trainer.strategy.init_args
        if (sizes.data_parallel_size, sizes.tensor_parallel_size) != (devices, 1):
            remedy = f"set --{key}data_parallel_size {devices} --{key}tensor_parallel_size 1"
            raise InputError(f"each of {devices} device(s) must hold a shard of its own: {remedy}")

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a trainer's command; if its input turns out bad before the first update, remove the run's new folder."""
        folder = Path(self.trainer.log_dir or ".")
        created = not folder.exists()
        if subcommand == "fit" and self.trainer.is_global_zero and not self.trainer.fast_dev_run:
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
            for bar in [*Progress._instances]:  # else it would be drawn again below the message
                bar.close()
            message = self._explain(error)
            if created and self.trainer.is_global_zero and self.trainer.global_step == 0:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # other versions are there
                    folder.parent.rmdir()
            raise InputError(message) from error

    def _explain(self, error: BaseException) -> str:
        """One sentence for an error of a run; an error of unknown cause is raised again."""
        if isinstance(error, (InputError, MisconfigurationException)):
            return first_line(error)
        training = any(getattr(callback, "training", False) for callback in self.trainer.callbacks)
        if isinstance(error, CheckpointException):
            if rank():  # every rank raises it
                raise SystemExit(0) from error
            reason = first_line(
                next(iter(error.failures.values()))[0]
            )  # of the first rank that failed
            if training:
                return f"the checkpoint cannot be written ({reason}); make room and resume with --ckpt_path last"
            return f"the checkpoint {self.config[self.subcommand].ckpt_path} cannot be loaded ({reason}); name another"
        if not is_out_of_memory(error):
            raise error
        if training:
            key = f"data.microbatch_tokens, now {self.trainer.datamodule.microbatch_tokens}"
            return f"out of memory in update {self.trainer.global_step + 1} ({first_line(error)}); lower {key}"
        return f"out of memory ({first_line(error)}); take a smaller policy, or shard it (configs/fsdp.yaml)"


def check_trainer(trainer: Any) -> None:
    """Raise an InputError for settings of the trainer that this project does not support."""
    save_dir = getattr(getattr(trainer.logger, "init_args", None), "save_dir", None)
    if save_dir is not None:
        check_folder("trainer.logger.init_args.save_dir", save_dir)
    strategy = str(getattr(trainer.strategy, "class_path", trainer.strategy))
    accumulates = trainer.accumulate_grad_batches != 1 or "GradientAccumulationScheduler" in str(
        trainer.callbacks
    )
    cuts = trainer.limit_train_batches not in (None, 1.0) or trainer.overfit_batches
    casts = trainer.precision not in (None, "32-true", "32", 32, "bf16-mixed")
    for wrong, message in (
        (
            accumulates,
            "accumulate_grad_batches must stay at 1: set data.microbatch_tokens, from which it follows",
        ),
        (
            trainer.logger in (False, []),
            "logger is false, but its folder is where a run's files go; leave it on",
        ),
        (
            cuts,
            "limit_train_batches and overfit_batches would cut an update in pieces; set trainer.max_steps",
        ),
        (
            "fsdp" in strategy.lower(),
            f"strategy {strategy} is FSDP1; use FSDP2, with --config configs/fsdp.yaml",
        ),
        (
            casts,
            f"precision is {trainer.precision}; weights stay in float32: choose 32-true or bf16-mixed",
        ),
    ):
        if wrong:
            raise InputError(f"trainer.{message}")


def check_seed(value: bool | int) -> int:
    if not 0 <= value < 2**32:  # numpy takes 32 bits
        raise InputError(f"seed_everything is {value}; it must lie between 0 and {2**32 - 1}")
    return int(value)


def main() -> None:
    end_with_parent()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = (
        "1"  # nothing in a checkpoint or its shards is executed
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns when the loader forks
    # between Lightning and torch, peft and transformers; of a run that is resumed; of predict, which writes files
    ignored = [
        "LeafSpec",
        "gradient_checkpointing",
        "exists and is not empty",
        "returned None if it was on purpose",
    ]
    warnings.filterwarnings("ignore", message=f".*({'|'.join(ignored)}).*")
    dropped = re.compile(
        "litlogger|TPU|stopped: `max_"
    )  # advertising, absent hardware, what a bar shows
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda r: not dropped.search(r.getMessage())
    )
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "gradient_clip_val": 1.0,
        "num_sanity_val_steps": 0,
    }
    logger = {
        "class_path": "TensorBoardLogger",
        "init_args": {"save_dir": "runs", "name": "policy"},
    }
    plugins, callbacks = (
        [{"class_path": "topr.callbacks.AtomicCheckpointIO"}],
        [ExactResume(), ExportPolicy()],
    )
    defaults |= {
        "enable_model_summary": False,
        "logger": logger,
        "plugins": plugins,
        "callbacks": callbacks,
    }
    options: dict[str, Any] = {"auto_configure_optimizers": False, "seed_everything_default": 0}
    options |= {
        "parser_class": Parser,
        "trainer_defaults": defaults,
        "save_config_callback": SaveConfig,
    }
    for evaluation, split in (
        (Trainer.validate, "val"),
        (Trainer.test, "test"),
    ):  # the docstrings are shown as help
        evaluation.__doc__ = (
            f"Sample and grade responses to the problems in data.{split}, and print the metrics."
        )
    Trainer.predict.__doc__ = (
        "Sample, grade and score responses to data.problems; write trajectory files to data.out."
    )
    with command():
        CLI(PolicyModule, TrajectoryDataModule, **options)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM)
    )  # Ctrl-C, too, can be resumed
    main()
