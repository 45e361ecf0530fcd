"""The memory that training needs, computed from a policy's shapes and two small forwards."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from topr.batching import pack
from topr.policy import shared_prompts
from topr.policy.logprobs import padded_hidden_states, position_chunks
from topr.policy.model import Policy, empty_policy

# Gradients that exist at once in the backward of a layer, relative to what its forward keeps.
GRADIENTS = 0.5


class Memory(NamedTuple):
    """Bytes on one device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    sampling: float  # weights and optimiser while a sharded policy samples

    @property
    def peak(self) -> float:
        training = self.weights + self.gradients + self.optimizer + self.activations
        return max(training, self.sampling)


def estimate(
    name: str,
    prepare: Callable[[Policy], None],
    optimizer: Callable[..., torch.optim.Optimizer],
    device: torch.device,
    padded: bool,
    **settings: Any,
) -> Memory:
    """`peak_memory` of a policy that is not loaded.

    Raises:
        Exception: whatever a model raises that cannot run on tensors without data (experts).
    """
    # it would print a traceback
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
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
) -> Memory:
    """The memory of training, without the rows of sampling.

    Args:
        policy: with its adapters.
        state: of the optimiser, see `state_size`.
        tokens: of the largest micro-batch, where a shared prompt counts once.
        response_tokens: of the largest micro-batch.
        microbatches: per device and update.
        bfloat16: whether the precision is bf16-mixed.
        checkpointing: the module's `activation_checkpointing`.
        devices: their number.
        sharded: whether each holds a shard (FSDP2) or the whole policy (DDP).
        reshard: the module's `reshard_after_forward`.
    """
    layers = max(1, len(policy.layers))
    in_layers = {weight for layer in policy.layers for weight in layer.parameters()}
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    body = size(in_layers)
    root = size(policy.parameters()) - body
    body_trained = size(in_layers.intersection(trained))
    root_trained = size(trained) - body_trained
    shards = devices if sharded else 1

    weights = (body + root) / shards
    gradients = (body_trained + root_trained) / shards
    optimizer = gradients * state
    casts, token = kept_for_backward(policy, bfloat16)
    width = 2 if bfloat16 else 4
    head = policy.model.get_output_embeddings().weight
    sampling = 0.0
    if sharded:
        gathered = body / 4 * width
        sampling = weights + optimizer + root + gathered
        if bfloat16:
            sampling += 2 * head.numel()
        # training gathers two layers at a time, and has the gradients of two
        weights += root + (gathered * 2 / layers if reshard else gathered)
        gradients += root_trained + 2 * body_trained / layers
        casts = 0.0
    elif devices > 1:
        gradients *= 2  # the buckets of DDP

    kept = token  # bytes of each token until the backward
    recomputed = 0.0
    if checkpointing:
        kept = 4 * head.shape[1] * layers
        casts /= layers
        recomputed = token / layers
    if checkpointing == "selective":
        kept += width * sum(weight.shape[0] for weight in in_layers if weight.ndim == 2)
    last_chunk = position_chunks(response_tokens, head)[-1]
    logits = 4 * len(head) * (last_chunk.stop - last_chunk.start)
    backward = tokens * (recomputed + GRADIENTS * token / layers)
    # the logits are released before the backward of the layers
    activations = casts + tokens * kept + 8 * head.shape[1] * response_tokens
    activations += max(logits, backward)
    if head.requires_grad and microbatches > 1:
        activations += 4 * head.numel()  # its gradient, before it is added to that of the others
    # when all of these are gone, the optimiser takes up to four times the largest weight
    activations = max(activations, 16 * max(map(torch.numel, trained)) / shards)
    return Memory(weights, gradients, optimizer, activations, sampling)


def size(weights: Any) -> float:
    """Bytes in float32."""
    return 4 * sum(weight.numel() for weight in weights)


def kept_for_backward(policy: Policy, bfloat16: bool) -> tuple[float, float]:
    """Bytes that a forward keeps for its backward: casts of weights, and those of each token."""
    weights = {weight.untyped_storage()._cdata for weight in policy.parameters()}
    hidden_states = padded_hidden_states if policy.padded else shared_prompts.hidden_states

    def kept(count: int) -> int:
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            return tensor.detach()  # with the tensor itself the graph would never be freed

        ids = np.zeros(count // 2, dtype=int)
        tokens = pack([ids], [ids]).to(policy.device)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_states(policy.model, tokens)
        return sum(saved[storage] for storage in saved.keys() - weights)

    training = policy.training
    policy.eval()  # without checkpointing
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
        small = kept(128)
        large = kept(256)
    policy.train(training)
    return max(0.0, 2 * small - large), (large - small) / 128


def state_size(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """Size of an optimiser's state for a large matrix, relative to that of the matrix."""
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    weight.grad = torch.zeros_like(weight)
    stepped = optimizer([weight])
    stepped.step()
    state = stepped.state[weight].values()
    return sum(value.nbytes for value in state if isinstance(value, Tensor)) / weight.nbytes
