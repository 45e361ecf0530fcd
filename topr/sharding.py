"""Policies over several devices with FSDP2: each rank reads its shard from the files; whole weights are brief."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from topr.io import InputError, first_line
from topr.policy import check_forward, check_weights, decoder_layers, empty_policy, load_policy
from topr.policy_files import resolve_policy, stored_tensors
from topr.ranks import refuse


def load_sharded(
    policy: str, prepare: Callable[[nn.Module], None], mesh: DeviceMesh, bfloat16: bool, reshard: bool
) -> nn.Module:
    """A policy whose weights no rank ever holds whole: tensor by tensor, each reads its rows from the files.

    Args:
        policy: folder or hub name.
        prepare: changes the model in place before it is sharded (adapters, checkpointing of activations).
        mesh: one dimension, over which weights, gradients and optimiser state are split.
        bfloat16: see `shard`.
        reshard: see `shard`.

    Raises:
        InputError: as `load_policy`.
    """
    model = empty_policy(policy)
    stored, places = set(stored_tensors(policy)), set(model.state_dict())
    if not {name for name, _ in model.named_parameters()} <= stored <= places:
        rank_zero_warn(
            f"the files of policy {policy!r} name or cut its weights otherwise than its model does, so every rank "
            "loads all of them before it keeps its shard; save_pretrained of the loaded model would mend that"
        )
        model = load_policy(policy)
    prepare(model)
    names = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    shard(model, mesh, bfloat16, reshard)
    if names:
        # what exists already, such as fresh adapters and rotary frequencies, is in no file
        tensors = dict(chain(model.named_parameters(), model.named_buffers()))
        kept = {name: tensor.detach().clone() for name, tensor in tensors.items() if name not in names}
        model.to_empty(device=mesh.device_type)
        tensors = dict(chain(model.named_parameters(), model.named_buffers()))
        with torch.no_grad():
            for name, tensor in kept.items():
                tensors[name].copy_(tensor)
        try:
            stored = {name.replace(".base_layer.", "."): tensors[name].detach() for name in names}
            dcp.load(stored, storage_reader=dcp.HuggingFaceStorageReader(str(resolve_policy(policy))))
        except (Exception, CheckpointException) as error:  # whatever a broken file makes the library raise
            raise InputError(f"policy {policy!r} cannot be loaded as a causal model: {first_line(error)}") from error
    refusal = None
    try:
        check_weights(model, policy)
    except InputError as error:  # perhaps of this rank's rows alone
        refusal = error
    refuse(refusal)
    with torch.autocast(mesh.device_type, torch.bfloat16, enabled=bfloat16):
        check_forward(model, policy, 0.3 if bfloat16 else 1e-3)  # its own logits are rounded to bfloat16
    model.reshard()  # the root, which waits for a backward
    return model


def shard(model: nn.Module, mesh: DeviceMesh, bfloat16: bool = False, reshard: bool = True) -> None:
    """Shard a policy over the devices of a mesh, decoder layer by decoder layer, in place.

    The root's weights (embeddings, output projection) are gathered for whole calls, those of a layer for its own.

    Args:
        model: the policy.
        mesh: one dimension.
        bfloat16: gather the layers' weights in bfloat16, which autocast would make of them anyway: half the traffic
            for the same update. Norms, which autocast leaves alone, the root, the residual stream and reduced gradients
            stay in float32.
        reshard: drop a layer's gathered weights after its forward and gather them again for its backward: less memory,
            half as much traffic again.
    """
    kept = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in decoder_layers(model):
        norms = [part for part in layer.modules() if _is_norm(part)]
        if bfloat16 and norms:  # autocast leaves them in float32
            fully_shard(norms, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(layer, mesh=mesh, mp_policy=kept, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    model.reshard_layers = reshard
    for name in ("response_log_probs", "response_loss"):
        register_fsdp_forward_method(model, name)


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.dim() == 1 for parameter in own)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Whole weights of a sharded policy on every rank, so that each runs as many forwards as it needs, alone."""
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in shards:
            # the root is left whole between its forward and its backward, as fully_shard does
            module.set_reshard_after_forward(module is not model and model.reshard_layers, recurse=False)
            module.reshard()


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU, tied ones once; of a sharded model on rank 0 alone, and every rank has to call."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value for name, value in weights.items() if name not in tied}
