"""Tapered Off-Policy REINFORCE (arXiv:2503.14286): fine-tune a language model on stored
trajectories."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy(package: str, **modules: list[str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package, from the public names of each of its modules: they are
    imported when they are used, so that commands start without the rest."""
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find


__getattr__ = lazy(__name__, module=["PolicyModule"], datamodule=["TrajectoryDataModule"])
