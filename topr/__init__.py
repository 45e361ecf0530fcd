"""Tapered Off-Policy REINFORCE (arXiv:2503.14286): fine-tune a language model on stored trajectories."""

from importlib import import_module
from typing import Any

MODULES = {"PolicyModule": "topr.module", "TrajectoryDataModule": "topr.datamodule"}


def __getattr__(name: str) -> Any:
    """Imported when used: commands start without what they do not need."""
    if name not in MODULES:
        raise AttributeError(f"module 'topr' has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)
