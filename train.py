"""Train, validate, test or sample from a policy: `python train.py fit --config configs/arithmetic.yaml`."""

import logging
import os
import pydoc
import re
import shutil
import sys
import warnings
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import Any, NoReturn

# large tensors on a CPU in huge pages: small ones cost up to a seventh of an update; read with torch's first tensor,
# which Lightning makes
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import yaml
from jsonargparse import dict_to_namespace, get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from topr.datamodule import TrajectoryDataModule
from topr.io import (
    InputError,
    atomic,
    check_counts,
    check_file,
    check_folder,
    command,
    first_line,
    is_out_of_memory,
    sweep,
)
from topr.module import PolicyModule
from topr.ranks import end_with_parent, rank
from topr.rows import LONGEST_LINE
from topr.trainer import ShardIndex, Survival, Trainer, reason

# of Lightning's counts, which it does not check
LEAST = {"min_epochs": 0, "min_steps": 0, "log_every_n_steps": 0, "num_sanity_val_steps": -1, "gradient_clip_val": 0}
LEAST |= {"check_val_every_n_epoch": 1}
# a resumed run keeps them
DECISIVE = ["model.policy", "model.task", "model.loss", "model.lora", "model.optimizer"]
DECISIVE += ["data.train", "data.batch_size", "seed_everything"]


class Parser(LightningArgumentParser):
    """Says what is wrong with the configuration in one sentence, and takes no key by its first letters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def parse_path(self, path: str | os.PathLike, *args, **kwargs):
        check_file(path, "name a YAML file")
        if os.path.getsize(path) > LONGEST_LINE:
            raise InputError(f"{path} is longer than {LONGEST_LINE} bytes; name a YAML file")
        try:
            return super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is no text in UTF-8 ({error.reason}); name a YAML file") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        hint = " (python train.py fit --help lists every key)"
        sentence = re.sub(r"\s+", " ", str(message)).replace(hint, "")  # an inner parser may have hinted already
        sentence = re.sub(r"Does not validate against any of .*? Errors: - (.*?) - .*", r"\1", sentence)
        sentence = re.sub(r"- Expected a path but .*? - |Parser key |<class '(\w+)'>", r"\1", sentence).strip()
        raise InputError(sentence + hint) from ex


def load_yaml(text: str) -> Any:
    """What the parser makes of a text, unless a key stands twice, of which the last would count, or aliases swell it.

    Raises:
        yaml.YAMLError: the text is no YAML, or such a one.
    """
    nodes, seen = [yaml.compose(text, Loader=yaml.CSafeLoader)], 0
    while nodes:
        node, seen = nodes.pop(), seen + 1
        if seen > 100_000:
            raise yaml.YAMLError("it holds more than 100,000 values, aliases counted as often as they are used")
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            if len(set(keys)) < len(keys):
                raise yaml.YAMLError(f"the key {max(keys, key=keys.count)!r} stands twice")
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return LOAD_YAML(text)


LOAD_YAML = get_loader("yaml")
set_loader("yaml", load_yaml, (yaml.YAMLError, RecursionError, ValueError))


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml whole or not at all: a run that is resumed is compared with it."""

    def setup(self, trainer: Trainer, module: PolicyModule, stage: str) -> None:
        folder = Path(trainer.log_dir)  # which the ranks agree on
        if trainer.is_global_zero:
            with atomic(folder / self.config_filename) as path:
                path.write_text(self.parser.dump(self.config, skip_none=False))


class CLI(LightningCLI):
    """Lightning's command line with the checks and the resumption that the README promises."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's, or of them the one that is asked for: the parser of each takes a quarter of a second."""
        every = LightningCLI.subcommands()
        return {name: every[name] for name in sys.argv[1:2] if name in every} or every

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "data.seed", compute_fn=seed)

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would load a whole checkpoint for the hyperparameters that ours do not hold."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        trainer = config.trainer
        config.data.seed = int(config.seed_everything)  # for true, Lightning has drawn a number by now
        if trainer.accumulate_grad_batches != 1 or "GradientAccumulationScheduler" in str(trainer.callbacks):
            raise InputError(
                "trainer.accumulate_grad_batches must stay at 1: set data.microbatch_tokens, from which the number of "
                "micro-batches per step follows"
            )
        for key, least in LEAST.items():
            check_counts("trainer.", least, **{key: trainer[key]})
        if trainer.val_check_interval == 0 or trainer.overfit_batches != 0:
            raise InputError("trainer.val_check_interval must be above 0, and trainer.overfit_batches stay at 0")
        optimizer = pydoc.locate(str(getattr(config.model.optimizer, "class_path", None)))
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):  # the parser takes any callable
            raise InputError(f"model.optimizer: {config.model.optimizer!r:.200} is no torch optimiser; name its class")
        if trainer.logger in (False, []):
            raise InputError("trainer.logger is false, but its folder is where a run's files go; leave the logger on")
        save_dir = getattr(getattr(trainer.logger, "init_args", None), "save_dir", None)
        if save_dir is not None:
            check_folder("trainer.logger.init_args.save_dir", save_dir)
        if trainer.limit_train_batches not in (None, 1.0):
            raise InputError("trainer.limit_train_batches would cut an update in pieces; set trainer.max_steps")
        if re.search("fsdp", str(trainer.strategy), re.IGNORECASE):
            raise InputError(
                f"trainer.strategy {getattr(trainer.strategy, 'class_path', trainer.strategy)} is FSDP1, which changes "
                "the updates of factored optimisers; use Lightning's ModelParallelStrategy (FSDP2) as in "
                "configs/fsdp.yaml"
            )
        if trainer.precision not in (None, "32-true", "32", 32, "bf16-mixed"):
            raise InputError(
                f"trainer.precision is {trainer.precision}; weights stay in float32: choose 32-true or bf16-mixed"
            )
        if config.get("ckpt_path") == "last":
            self._resume_newest(config)
        elif config.get("ckpt_path") and updates(Path(config.ckpt_path)) is None:
            raise InputError(
                f"--ckpt_path: {config.ckpt_path} is no checkpoint, or not all of it is there; name a .ckpt that a run "
                "wrote, or 'last'"
            )

        if self.subcommand == "predict":  # its files go to data.out; a run's folder would hold nothing
            config.trainer.logger, self.save_config_callback = False, None

    def _resume_newest(self, config) -> None:
        """Point a run at the newest checkpoint of its name and at that checkpoint's version_N; afresh without one."""
        logger = config.trainer.logger
        arguments = getattr(logger, "init_args", None)
        if arguments is None or "save_dir" not in arguments:
            raise InputError("--ckpt_path last needs trainer.logger: TensorBoardLogger, which numbers the versions")
        root = Path(arguments.save_dir) / (arguments.name or "")
        found = sorted(root.glob("version_*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
        newest, done = next(((path, n) for path in found if (n := updates(path)) is not None), (None, 0))
        config.ckpt_path = newest and str(newest)
        print(f"resuming {newest}" if newest else f"no complete checkpoint under {root}: starting afresh")
        if self.subcommand != "fit":
            return
        if newest:
            version = newest.parent.parent
        else:  # begin a run again in its own folder if it was killed before its first checkpoint
            begun = [path for path in root.glob("version_*") if not (path / "summary.json").exists()]
            version = max(begun, key=lambda path: path.stat().st_mtime, default=root)
        if not (version / "config.yaml").is_file():
            # killed before it was written: the folder holds an empty event file at most
            if version != root and all("tfevents" in path.name for path in version.iterdir()):
                arguments.version = int(version.name.removeprefix("version_"))
            return
        texts = (version / "config.yaml").read_text(), self._parser("fit").dump(config, skip_none=False)
        try:
            before, now = (dict_to_namespace(yaml.safe_load(text)) for text in texts)
        except (yaml.YAMLError, AttributeError, TypeError) as error:
            raise InputError(
                f"{version / 'config.yaml'} holds no configuration; put back that run's, or give this one a "
                "trainer.logger.init_args.name of its own"
            ) from error
        changed = next((key for key in DECISIVE if before.get(key) != now.get(key)), None)
        if changed and newest:
            raise InputError(
                f"{newest} comes from a run with another {changed} (see {version / 'config.yaml'}); go on with that "
                "run's settings, or give this one a trainer.logger.init_args.name of its own"
            )
        if not changed:
            arguments.version = int(version.name.removeprefix("version_"))
            # TensorBoard forgets what was logged after the checkpoint and is logged again
            logger.dict_kwargs = {"purge_step": done}
            for folder in (version, version / "checkpoints"):
                sweep(folder)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (MisconfigurationException, TypeError, ValueError, ImportError) as error:
            inner = error  # the parser may have wrapped one of ours
            while inner is not None and not isinstance(inner, InputError):
                inner = inner.__cause__ or inner.__context__
            raise InputError(first_line(inner or error)) from error
        if self.subcommand:
            self._check_sharding(self.config[self.subcommand])

    def _check_sharding(self, config) -> None:
        """Refuse devices that hold no shard of their own, and shards where there is no sharding."""
        checkpoint, devices = config.get("ckpt_path"), self.trainer.num_devices * self.trainer.num_nodes
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            if checkpoint and Path(checkpoint).is_dir():
                raise InputError(
                    f"the checkpoint {checkpoint} is sharded; go on with --config configs/fsdp.yaml, on any number of "
                    "devices"
                )
            return
        key, sizes = "trainer.strategy.init_args.", config.trainer.strategy.init_args
        if (sizes.data_parallel_size, sizes.tensor_parallel_size) != (devices, 1):
            raise InputError(
                f"{key}data_parallel_size is {sizes.data_parallel_size} and tensor_parallel_size "
                f"{sizes.tensor_parallel_size}, but {devices} device(s) each hold a shard of their own: set "
                f"--{key}data_parallel_size {devices} --{key}tensor_parallel_size 1"
            )

    def _run(self, command: str, **arguments) -> None:
        """Run a trainer's command; when its input turns out bad before the first update, leave no trace of it."""
        arguments["weights_only"] = True  # nothing in a checkpoint is executed
        folder = Path(self.trainer.log_dir or ".")
        fresh = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            getattr(self.trainer, command)(**arguments)
        except (InputError, MisconfigurationException, RuntimeError, MemoryError, CheckpointException) as error:
            told = first_line(error)
            if isinstance(error, CheckpointException):  # every rank has it
                if rank():
                    raise SystemExit(0) from error
                told = f"the checkpoint {arguments['ckpt_path']} cannot be loaded ({reason(error)}); name another"
            elif not isinstance(error, (InputError, MisconfigurationException)):
                if not is_out_of_memory(error):
                    raise
                told = f"out of memory in {self.model.doing} ({told}); lower {self.model.remedy}"
            if fresh and self.trainer.global_step == 0:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # other runs may have begun beside this one
                    for parent in fresh[1:]:
                        parent.rmdir()
            raise InputError(told) from error

    # the command line looks here before it looks at the trainer
    fit, validate = partialmethod(_run, "fit"), partialmethod(_run, "validate")
    test, predict = partialmethod(_run, "test"), partialmethod(_run, "predict")


def seed(value: bool | int) -> int:
    """The seed, which numpy takes only up to 32 bits."""
    check_counts("", least=0, most=2**32 - 1, seed_everything=int(value))
    return int(value)


def updates(checkpoint: Path) -> int | None:
    """Updates behind a checkpoint, a file or a folder of shards; None if it is none or not all of it is there.

    Nothing in it is executed, and its weights are not read.
    """
    try:
        file = checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint
        check_file(file)
        if checkpoint.is_dir():
            with (checkpoint / ".metadata").open("rb") as index:
                ShardIndex(index).load()
        content = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
        return content["global_step"] if content.keys() >= {"loops", "pytorch-lightning_version"} else None
    except Exception:  # whatever torch makes of a broken file
        return None


def main() -> None:
    end_with_parent()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # of the shards of a checkpoint, too
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns when the loader forks
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # between Lightning and torch, peft and transformers
    warnings.filterwarnings("ignore", message=".*LeafSpec.*|.*is_gradient_checkpointing.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "litlogger" not in r.getMessage())
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a run that is resumed
    with command():
        CLI(
            PolicyModule,
            TrajectoryDataModule,
            trainer_class=Trainer,
            parser_class=Parser,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            trainer_defaults={
                "max_epochs": 1,
                "gradient_clip_val": 1.0,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "callbacks": [Survival()],
                "logger": {
                    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                    "init_args": {"save_dir": "runs", "name": "policy"},
                },
            },
        )


if __name__ == "__main__":
    sys.exit(main())
