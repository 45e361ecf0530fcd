"""Tapered Off-Policy REINFORCE (arXiv:2503.14286): fine-tune a language model on stored
trajectories."""

from topr.lazy import lazy

__getattr__ = lazy(__name__, module=["PolicyModule"], datamodule=["TrajectoryDataModule"])
