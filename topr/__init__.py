"""Tapered Off-Policy REINFORCE (arXiv:2503.14286): fine-tune a language model on stored trajectories."""
