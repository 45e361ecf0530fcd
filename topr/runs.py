"""The folder of a run, runs/<name>/version_N, whatever the logger; and how a run is resumed."""

import csv
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import CSVLogger

from topr.checkpoints import newest
from topr.io import InputError, check_folder

# a resumed run keeps these settings
DECISIVE = [
    "model.policy",
    "model.task",
    "model.loss",
    "model.lora",
    "model.optimizer",
    "model.lr_scheduler",
    "model.gradient_clip_val",
    "data.train",
    "data.advantage",
    "data.batch_size",
    "data.whole_groups",
    "seed_everything",
]
FOLDER_LOGGERS = ("TensorBoardLogger", "CSVLogger")  # which write to save_dir/name/version
UNNAMED = (None, "lightning_logs")


@dataclass
class Run:
    """A run's folder, decided before any logger exists.

    Args:
        root: of all versions of the run's name.
        version: number of this one.
        done: updates before the checkpoint that it resumes.
    """

    root: Path
    version: int
    done: int = 0

    @property
    def folder(self) -> Path:
        return self.root / f"version_{self.version}"

    @staticmethod
    def of(config: Any) -> "Run":
        """A new run of this configuration, named by its logger, else by its first config file. With
        an overlay configs/loss/X.yaml it is called NAME-X, unless the command line names it."""
        save_dir = "runs"
        name = None
        for logger in loggers_of(config.trainer):
            arguments = logger.get("init_args", {})
            if is_folder_logger(logger):
                save_dir = arguments.get("save_dir") or save_dir
            if name in UNNAMED:
                name = arguments.get("name")
        files = [Path(path) for path in config.config or [] if path]  # None: YAML, not a file
        if name in UNNAMED:
            name = files[0].stem if files else "policy"
        overlays = [path.stem for path in files if path.parent.name == "loss"]
        named_here = re.search(r"\.logger\.(init_args\.)?name\b", str(sys.argv))
        if overlays and not named_here:
            name = f"{name}-{overlays[-1]}"
        check_folder("trainer.logger.init_args.save_dir", save_dir)
        root = Path(save_dir, name)
        return Run(root, 1 + max(versions(root), default=-1))

    def resume(self) -> tuple[Path | None, int]:
        """Become the run of the newest complete checkpoint of this name, if there is one; returns
        it, and the updates before it. Without one, a run that was killed before its first
        checkpoint starts again in its own folder."""
        checkpoint, self.done = newest(self.root)
        if checkpoint is not None:
            self.version = int(checkpoint.parent.parent.name.removeprefix("version_"))
            return checkpoint, self.done
        unfinished = [
            number
            for number in versions(self.root)
            if not (self.root / f"version_{number}" / "summary.json").exists()
        ]
        self.version = max(unfinished, default=self.version)
        return None, 0

    def nothing_to_resume(self) -> str:
        return f"no complete checkpoint under {self.root}: starting afresh"

    def hand_out(self, trainer: Any) -> None:
        """Make every logger of a trainer's configuration write to this folder."""
        trainer.default_root_dir = str(self.folder)
        before = loggers_of(self.earlier_config().get("trainer", {}))
        for number, logger in enumerate(loggers_of(trainer)):
            arguments = logger.init_args
            if is_folder_logger(logger):
                arguments.save_dir = str(self.root.parent)
                arguments.name = self.root.name
                arguments.version = self.version
            elif "save_dir" in arguments:
                arguments.save_dir = str(self.folder)
            if logger.class_path.endswith("TensorBoardLogger"):
                # TensorBoard drops what an interrupted run has logged since the checkpoint
                logger.dict_kwargs = {"purge_step": self.done}
            if logger.class_path.endswith("WandbLogger") and not arguments.version:
                known = before[number]["init_args"]["version"] if number < len(before) else None
                arguments.version = known or uuid.uuid4().hex[:8]

    def earlier_config(self) -> dict[str, Any]:
        """config.yaml of the run that is resumed; empty if it was killed before it wrote that."""
        path = self.folder / "config.yaml"
        return yaml.safe_load(path.read_text()) if path.is_file() else {}

    def keep_logged(self, loggers: list[Any]) -> None:
        """Keep the rows that a CSVLogger wrote before the checkpoint: it would begin a new file."""
        for logger in loggers:
            if not isinstance(logger, CSVLogger):
                continue
            path = Path(logger.log_dir, "metrics.csv")
            if not path.is_file() or not self.done:
                continue
            with path.open() as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) < self.done]
            kept = []
            for row in rows:
                kept.append({name: float(value) for name, value in row.items() if value})
                kept[-1]["step"] = int(row["step"])
            logger.experiment.metrics = kept


def loggers_of(trainer: Any) -> list[Any]:
    """The configurations of the loggers of a trainer's."""
    logger = trainer.get("logger")
    if not logger or logger is True:
        return []
    return logger if isinstance(logger, list) else [logger]


def is_folder_logger(logger: Any) -> bool:
    return logger["class_path"].endswith(FOLDER_LOGGERS)


def versions(root: Path) -> list[int]:
    """The numbers of the runs under a name."""
    names = [path.name.removeprefix("version_") for path in root.glob("version_*")]
    return [int(name) for name in names if name.isdigit()]


def check_same_run(run: Run, config: str) -> None:
    """Raise an InputError if a resumed run would be another one than before.

    Args:
        config: the present configuration, as YAML.
    """
    before = run.earlier_config()
    now = yaml.safe_load(config)
    for key in DECISIVE:
        if before and lookup(before, key) != lookup(now, key):
            message = f"{run.folder} is a run with another {key} (see its config.yaml)"
            raise InputError(f"{message}; restore it, or set another trainer.logger.init_args.name")


def lookup(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = (value or {}).get(part)
    return value
