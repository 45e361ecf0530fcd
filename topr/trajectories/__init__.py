"""The trajectory file: read, write, validate; import, inspect and curate.

Not here: grading of responses, batching.
"""

from importlib import import_module
from typing import Any

from topr.trajectories.file import SCHEMA, Trajectory, batches, read_metadata
from topr.trajectories.file import read_trajectories, write_tables, write_trajectories

LAZY = {"add_log_probs": "topr.trajectories.scoring", "agreed": "topr.trajectories.curate"}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'topr.trajectories' has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)
