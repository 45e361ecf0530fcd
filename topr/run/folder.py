"""The folder of a run, runs/NAME/version_N, whatever the logger; and how a run is resumed."""

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from topr.io import check_folder
from topr.run.checkpoints import newest

FOLDER_LOGGERS = ("TensorBoardLogger", "CSVLogger")  # which write to save_dir/name/version


@dataclass
class Run:
    """A run's folder, decided before any logger exists.

    Args:
        root: folder of all versions of the run's name.
        version: number of this one.
        updates: made before the checkpoint that it resumes.
    """

    root: Path
    version: int
    updates: int = 0

    @property
    def folder(self) -> Path:
        return self.root / f"version_{self.version}"

    def resume(self) -> Path | None:
        """Find the newest complete checkpoint of this name, and take over version and updates of
        its run. Without one, the newest run that did not end starts again in its own folder."""
        checkpoint, self.updates = newest(self.root)
        if checkpoint:
            self.version = number_of(checkpoint.parent.parent)
            return checkpoint
        for version in versions(self.root):
            if not (self.root / f"version_{version}" / "summary.json").exists():
                self.version = version
        return None

    def direct_loggers(self, trainer):
        """Make every logger of a trainer's configuration write to this folder."""
        trainer.default_root_dir = str(self.folder)
        for logger in loggers_of(trainer):
            kind = logger.class_path.rpartition(".")[2]
            arguments = logger.init_args
            if kind in FOLDER_LOGGERS:
                arguments.save_dir = str(self.root.parent)
                arguments.name = self.root.name
                arguments.version = self.version
            elif "save_dir" in arguments:
                arguments.save_dir = str(self.folder)
            if kind == "TensorBoardLogger":
                # it drops what was logged after the checkpoint
                logger.dict_kwargs = {"purge_step": self.updates}

    def keep_csv_rows(self, loggers, updates: int):
        """Keep what was logged to metrics.csv before so many updates: a CSVLogger starts a new
        file."""
        for logger in loggers:
            file = self.folder / "metrics.csv"
            if isinstance(logger, CSVLogger) and file.exists():
                rows = [
                    row
                    for row in csv.DictReader(file.read_text().splitlines())
                    # a killed run can have left half a row
                    if None not in row.values() and int(row["step"]) < updates
                ]
                file.unlink()  # the logger would add to it
                logger.experiment.metrics = rows
                logger.save()


def new_run(config) -> Run:
    """The next run of a configuration. Its logger names it, else its first config file. With an
    overlay configs/loss/X.yaml it is called NAME-X, unless the command line names it."""
    save_dir = config.trainer.default_root_dir or "runs"
    files = [Path(path) for path in config.config or [] if path]  # None: YAML, not a file
    name = files[0].stem if files else "policy"
    for logger in reversed(loggers_of(config.trainer)):
        if logger.class_path.endswith(FOLDER_LOGGERS):
            save_dir = logger.init_args.save_dir
        if logger.init_args.get("name") not in (None, "lightning_logs"):
            name = logger.init_args.name
    overlays = [path.stem for path in files if path.parent.name == "loss"]
    # the configuration cannot tell where a name comes from
    if overlays and not re.search(r"\.logger\.(init_args\.)?name\b", str(sys.argv)):
        name = f"{name}-{overlays[-1]}"
    check_folder("trainer.logger.init_args.save_dir", save_dir)
    root = Path(save_dir, name)
    return Run(root, max(versions(root), default=-1) + 1)


def loggers_of(trainer):
    """The configurations of a trainer's loggers."""
    loggers = trainer.get("logger") or []
    if not isinstance(loggers, list):
        loggers = [loggers]
    # true is Lightning's default, whose folder is that of the trainer
    return [logger for logger in loggers if hasattr(logger, "init_args")]


def versions(root: Path) -> list[int]:
    """The numbers of the runs under a name, in ascending order."""
    return sorted(number_of(path) for path in root.glob("version_*") if path.name[8:].isdigit())


def number_of(version: Path) -> int:
    return int(version.name.removeprefix("version_"))
