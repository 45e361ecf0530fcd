"""Policies sharded with FSDP2: each rank reads its shard; full weights are materialised only while sampling."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
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

from topr.distributed import same_error_on_all_ranks
from topr.io import explained
from topr.policy.files import resolve_policy, stored_tensors
from topr.policy.model import Policy, check_forward, check_weights, empty_policy, load_policy


def load_sharded(
    name: str, prepare: Callable[[Policy], None], mesh: DeviceMesh, bfloat16: bool, reshard: bool
) -> Policy:
    """Load a policy of which each rank reads only its own rows; `prepare` modifies it before it is sharded."""
    policy = empty_policy(name)
    stored, expected = set(stored_tensors(name)), set(policy.model.state_dict())
    if not {key for key, _ in policy.model.named_parameters()} <= stored <= expected:
        message = (
            f"the files of policy {name!r} name or split its weights differently from its model"
        )
        rank_zero_warn(
            f"{message}, so every rank loads all of them; export it again with save_pretrained"
        )
        policy = load_policy(name)
    prepare(policy)
    from_files = {key for key, parameter in policy.model.named_parameters() if parameter.is_meta}
    shard(policy, mesh, bfloat16, reshard)
    if from_files:
        # unlike `to_empty`: fresh adapters and rotary frequencies are in no file
        device = mesh.device_type
        policy.model._apply(
            lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)
        )
        weights = dict(policy.model.named_parameters())
        target = {key.replace(".base_layer.", "."): weights[key].detach() for key in from_files}
        with explained(
            f"policy {name!r} cannot be loaded as a causal model", (Exception, CheckpointException)
        ):
            dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(resolve_policy(name))))
    with same_error_on_all_ranks():
        check_weights(policy)  # of this rank's rows
    with torch.autocast(mesh.device_type, torch.bfloat16, enabled=bfloat16):
        check_forward(
            policy, 0.3 if bfloat16 else 1e-3
        )  # the model's own logits are rounded to bfloat16
    policy.reshard()  # the root, which otherwise waits for a backward
    return policy


def shard(policy: Policy, mesh: DeviceMesh, bfloat16: bool = False, reshard: bool = True) -> None:
    """Shard a policy over the devices of a mesh of one dimension, decoder layer by decoder layer, in place.

    Args:
        bfloat16: gather the layers' weights in bfloat16, to which autocast would cast them: half the traffic for the
            same update. Norms, embeddings, output projection and reduced gradients stay in float32.
        reshard: drop a layer's gathered weights after its forward and gather them again for its backward.
    """
    dtype = torch.bfloat16 if bfloat16 else None
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in policy.layers:
        norms = [
            part
            for part in layer.modules()
            if {p.dim() for p in part.parameters(recurse=False)} == {1}
        ]
        if bfloat16 and norms:
            fully_shard(norms, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(policy, mesh=mesh)
    policy.reshard_layers = reshard
    register_fsdp_forward_method(policy, "logits")
    register_fsdp_forward_method(policy, "log_probs")


@contextmanager
def full_weights(policy: Policy) -> Iterator[None]:
    """Full weights of a sharded policy on every rank, so that each runs as many forwards as it needs, alone."""
    shards = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in shards:
            # fully_shard keeps the root's weights between its forward and its backward
            module.set_reshard_after_forward(
                module is not policy and policy.reshard_layers, recurse=False
            )
            module.reshard()


def full_state_dict(policy: Policy) -> dict[str, Tensor]:
    """All weights of the model on the CPU, tied ones once; of a sharded one on rank 0 alone. All ranks must call."""
    model = policy.model
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {
        name: value
        for name, value in weights.items()
        if name not in tied and isinstance(value, Tensor)
    }
