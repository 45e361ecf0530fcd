"""Does it fit? The peak memory of a device, by arithmetic on a policy's shapes and two small forwards."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from topr.batching import pack
from topr.policy.logprobs import output_head
from topr.policy.model import Policy, empty_policy, shared_prompts

GRADIENTS = (
    0.5  # of a layer's activations, as many as exist at once, relative to what its forward keeps
)


def estimate(
    name: str,
    prepare: Callable[[Policy], None],
    optimizer: Callable[..., torch.optim.Optimizer],
    device: torch.device,
    padded: bool,
    **settings: Any,
) -> dict[str, float]:
    """`peak_memory` of a policy that is not loaded; `prepare` adds its adapters. Raises what a model raises that cannot
    be computed on tensors without data, such as mixtures of experts."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(
        logging.CRITICAL
    )  # it would print a traceback
    state = state_size(optimizer)
    policy = empty_policy(name)
    if not padded:
        policy.model.set_attn_implementation(shared_prompts.NAME)
    prepare(policy)
    with FakeTensorMode(allow_non_fake_inputs=True):  # tensors without data
        policy.model.to_empty(device=device)
        policy.model.tie_weights()  # `to_empty` unties them
        return peak_memory(policy, state, **settings)


def peak_memory(
    policy: Policy,
    state: float,
    *,
    tokens: int,
    response_tokens: int,
    microbatches: int,
    bfloat16: bool,
    checkpointing: bool | str = False,
    devices: int = 1,
    sharded: bool = False,
    reshard: bool = True,
) -> dict[str, float]:
    """Bytes of a device: `fit`, the peak of training, with its parts; `sample`, the least of sampling in training;
    `predict`, that of predict and evaluate.py. Sampling takes what is left for its rows.

    Args:
        policy: with its adapters.
        state: see `state_size`.
        tokens, response_tokens: of a micro-batch; the former count a prompt once.
        microbatches: per device and update.
        bfloat16: whether the precision is bf16-mixed.
        checkpointing, reshard: `activation_checkpointing` and `reshard_after_forward` of the module.
        devices, sharded: their number, and whether each holds a shard (FSDP2) or the whole policy (DDP).
    """
    layers, head = max(1, len(policy.layers)), output_head(policy.model)
    vocabulary, hidden = head.weight_VD.shape
    in_layers = {parameter for layer in policy.layers for parameter in layer.parameters()}
    in_root = set(policy.parameters()) - in_layers
    trained = {parameter for parameter in policy.parameters() if parameter.requires_grad}
    groups = in_layers, in_root, in_layers & trained, in_root & trained
    body, root, body_trained, root_trained = (4 * sum(map(torch.numel, group)) for group in groups)
    shards, width = devices if sharded else 1, 2 if bfloat16 else 4
    fixed, token = kept_for_backward(policy, bfloat16)
    parts = {"weights": (body + root) / shards, "gradients": (body_trained + root_trained) / shards}
    parts["optimizer"] = parts["gradients"] * state
    if sharded:
        predict = (
            parts["weights"] + (root + body / 4 * width) + bfloat16 * 2 * head.weight_VD.numel()
        )
        parts["weights"] += root + body / 4 * width * (2 / layers if reshard else 1)
        parts["gradients"] += root_trained + 2 * body_trained / layers
        fixed = 0.0  # gathered weights need no cast
    else:
        predict = body + root + bfloat16 * (body + root) / 2  # the latter: casts of all weights
        parts["gradients"] *= 1 + (devices > 1)  # the buckets of DDP
    kept, recomputed = token, 0.0
    if checkpointing:
        products = sum(parameter.shape[0] for parameter in in_layers if parameter.ndim == 2)
        kept = 4 * hidden * layers + (width * products if checkpointing == "selective" else 0)
        fixed, recomputed = fixed / layers, token / layers
    # freed before the backward
    logits = 4 * vocabulary * min(head.chunk, response_tokens)
    backward = tokens * (recomputed + GRADIENTS * token / layers)
    parts["activations"] = (
        fixed + tokens * kept + 8 * hidden * response_tokens + max(logits, backward)
    )
    # the gradient of a micro-batch, before it is added to that of the others
    parts["head"] = (
        4.0 * head.weight_VD.numel() * (head.weight_VD.requires_grad and microbatches > 1)
    )
    # when both are gone, the optimiser takes up to four times the largest weight
    largest = max(map(torch.numel, trained))
    parts["activations"] = max(parts["activations"], 16 * largest / shards - parts["head"])
    return {
        "fit": sum(parts.values()),
        **parts,
        "sample": predict + parts["optimizer"],
        "predict": predict,
    }


def kept_for_backward(policy: Policy, bfloat16: bool) -> tuple[float, float]:
    """Bytes that a forward without checkpointing keeps for its backward: casts of weights, and those of each token."""
    weights = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}

    def kept(count: int) -> int:
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            return (
                tensor.detach()
            )  # with the tensor itself the graph would hold itself, and never be freed

        tokens = pack([np.zeros(count // 2, dtype=int)], [np.zeros(count // 2, dtype=int)]).to(
            policy.device
        )
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            policy(tokens, lambda hidden_ND, head: hidden_ND)
        return sum(size for key, size in saved.items() if key not in weights)

    training = policy.training
    policy.eval()
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
        small, large = kept(128), kept(256)
    policy.train(training)
    return max(0.0, 2 * small - large), (large - small) / 128


def state_size(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """Size of an optimiser's state for a large matrix, relative to that of the matrix."""
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    weight.grad = torch.zeros_like(weight)
    one = optimizer([weight])
    one.step()
    return (
        sum(value.nbytes for value in one.state[weight].values() if isinstance(value, Tensor))
        / weight.nbytes
    )
