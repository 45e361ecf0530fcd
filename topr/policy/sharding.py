"""Policies sharded with FSDP2: each rank reads its shard. While sampling, every rank holds full
weights; rank 0 collects them on its CPU for export and hashing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from topr.io import explained
from topr.policy.files import resolve_policy
from topr.policy.model import Policy, check_weights, choose_forward, empty_policy


def load_sharded(
    name: str, prepare: Callable[[Policy], None], mesh: DeviceMesh, bfloat16: bool
) -> Policy:
    """Load a policy of which each rank reads only its own rows.

    Args:
        prepare: modifies the policy before it is sharded.
        mesh, bfloat16: see `shard`.

    Raises:
        InputError: also where the files name or split the weights differently from the model.
    """
    policy = empty_policy(name)
    prepare(policy)
    shard(policy, mesh, bfloat16)
    read_shards(policy, mesh.device_type)
    check_weights(policy)
    with torch.autocast(mesh.device_type, torch.bfloat16, bfloat16):
        # the model's own logits are rounded to bfloat16
        choose_forward(policy, 0.3 if bfloat16 else 1e-3)
    policy.reshard()  # the root, which otherwise waits for a backward
    return policy


def read_shards(policy: Policy, device: str):
    """Read this rank's rows of the weights that are on the meta device: all but fresh adapters."""

    def materialise(tensor):
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    stored = [name for name, weight in policy.model.named_parameters() if weight.is_meta]
    policy.model._apply(materialise)
    weights = dict(policy.model.named_parameters())
    target = {name.replace(".base_layer.", "."): weights[name].detach() for name in stored}
    with explained(
        f"policy {policy.name!r} cannot be loaded by shards",
        (Exception, CheckpointException),
        "export it again with save_pretrained, or train it with configs/ddp.yaml",
    ):
        dcp.load(
            target, storage_reader=dcp.HuggingFaceStorageReader(str(resolve_policy(policy.name)))
        )


def shard(policy: Policy, mesh: DeviceMesh, bfloat16: bool):
    """Shard a policy over the devices of a mesh of one dimension, decoder layer by decoder layer,
    in place.

    Args:
        bfloat16: gather the layers' weights in bfloat16, to which autocast would cast them: half
            the traffic for the same update. Norms, embeddings, output projection and reduced
            gradients stay in float32.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    names = policy.model._no_split_modules or []
    # all of them first, because `fully_shard` changes the class of a layer
    for layer in [part for part in policy.modules() if type(part).__name__ in names]:
        norms = [part for part in layer.modules() if is_norm(part)]
        if bfloat16 and norms:
            fully_shard(norms, mesh=mesh)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh)
    for method in ("log_probs", "logits"):
        register_fsdp_forward_method(policy, method)


def is_norm(module: torch.nn.Module) -> bool:
    """Whether all weights of its own are vectors."""
    return {weight.dim() for weight in module.parameters(recurse=False)} == {1}


@contextmanager
def full_weights(policy: Policy) -> Iterator[None]:
    """Full weights of a sharded policy on every rank, so that each runs as many forwards as it
    needs, alone."""
    shards = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in shards:
            # fully_shard keeps the root's weights between its forward and its backward
            module.set_reshard_after_forward(module is not policy, recurse=False)
            module.reshard()


def full_state_dict(policy: Policy) -> dict[str, Tensor]:
    """All weights of the model on the CPU, tied ones once; of a sharded one on rank 0 alone. All
    ranks must call."""
    weights: Any = get_model_state_dict(
        policy.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    tied = policy.model.all_tied_weights_keys
    return {name: value for name, value in weights.items() if name not in tied}
