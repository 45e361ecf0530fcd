"""Compile the parts of decoder layers with `torch.compile`."""

import torch

from topr.io import InputError, explained
from topr.policy import shared_prompts
from topr.policy.model import Policy


def compile_layers(policy: Policy) -> None:
    """Compile norms, MLPs and attention projections of the decoder layers, in place; call it after
    loading."""
    if not policy.layers:
        kind = type(policy.model).__name__
        raise InputError(f"model.compile finds no decoder layers in a {kind}; leave it false")
    what = "model.compile needs a C++ compiler, and on a GPU Triton as well"
    with explained(what, remedy="install one, or leave it false"):
        torch.compile(torch.neg)(torch.ones(2, device=policy.device))
    shared_prompts.register(torch.compiler.disable(shared_prompts.attend))
    # forwards of parts: hooks of a module (FSDP2) and checkpointing of a layer cannot be compiled
    for layer in policy.layers:
        for part in layer.children():
            part.forward = torch.compile(part.forward, dynamic=True)
