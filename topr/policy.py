"""Policies: Hugging Face causal language models, in from a folder or the hub, out as a folder."""

import warnings
from pathlib import Path
from types import MethodType

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from topr.attention import NAME, attend, register
from topr.io import InputError, atomic, first_line
from topr.logprobs import response_log_probs, response_loss
from topr.packing import pack
from topr.policy_files import resolve_policy, stored_tensors

FLOATS = ["F16", "BF16", "F32", "F64"]


def load_policy(policy: str) -> nn.Module:
    """A policy's model with float32 weights and dropout off.

    Raises:
        InputError: it cannot be loaded, or its head is none that `response_log_probs` computes exactly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = resolve_policy(policy)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_config(policy),
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise InputError(f"policy {policy!r} cannot be loaded as a causal model: {first_line(error)}") from error
    if missing := sorted(loading["missing_keys"]):  # they would be random numbers
        raise InputError(f"policy {policy!r} lacks the weights {', '.join(missing[:3])}; export or download it again")
    if unknown := sorted(loading["unexpected_keys"]):
        told = f"policy {policy!r} holds the weights {', '.join(unknown[:3])}, for which its config.json has no place"
        if any(name.startswith(f"{model.base_model_prefix}.") for name in unknown):  # layers, which would be cut off
            raise InputError(f"{told}; set the number of layers right, or take them out of the file")
        warnings.warn(f"{told}: they are left out", stacklevel=2)
    check_weights(model, policy)
    equip(model)
    check_forward(model, policy)
    return model


def own_device() -> torch.device:
    """This process's GPU, or the CPU; a policy loaded `with` it goes there, not by way of the host's memory."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def empty_policy(policy: str) -> nn.Module:
    """A policy's model without its weights: parameters on the meta device, float32, buffers as they shall be.

    Raises:
        InputError: its config is none of a causal model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = resolve_policy(policy)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(_config(policy), dtype=torch.float32, trust_remote_code=False)
        model.tie_weights()  # which the absence of weights has parted
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except Exception as error:
        raise InputError(f"policy {policy!r} cannot be loaded as a causal model: {first_line(error)}") from error
    equip(model)
    return model


def equip(model: nn.Module) -> None:
    """Make the forwards of `topr.logprobs` methods, which FSDP2 can wrap."""
    for forward in (response_log_probs, response_loss):
        setattr(model, forward.__name__, MethodType(forward, model))


def compile_layers(model: nn.Module) -> None:
    """Compile the norms, MLPs and attention of a model's decoder layers, in place, but for attention over spans.

    To be called last, as `check_forward` registers attention that the compiler would look into.

    Raises:
        InputError: there is no compiler, or the model's class does not name its layers.
    """
    if not (layers := decoder_layers(model)):
        raise InputError(f"model.compile finds no decoder layers in a {type(model).__name__}; leave it false")
    try:
        torch.compile(torch.neg)(torch.ones(2, device=model.device))
    except Exception as error:  # whatever its absence makes the library raise
        told = f"model.compile needs a C++ compiler (on a GPU Triton as well): {first_line(error)}"
        raise InputError(f"{told}; install one, or leave it false") from error
    register(torch.compiler.disable(attend))
    # forwards of parts: a module's hooks (FSDP2) and a layer's checkpointing cannot be compiled
    for layer in layers:
        for part in layer.children():
            part.forward = torch.compile(part.forward, dynamic=True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers, of which `fully_shard` changes the class."""
    named = model._no_split_modules
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in named]


def _config(policy: str):
    """A model's configuration with dropout off.

    Raises:
        ValueError: it cannot be that of the policy's weights.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(resolve_policy(policy), trust_remote_code=False)
    # log mu and log pi must come from one deterministic function, whatever mode the trainer sets
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, (int, float)):
            setattr(config, name, 0.0)
    stored = len(stored_tensors(policy))
    if not 0 < getattr(config.get_text_config(), "num_hidden_layers", 1) <= stored:  # a million take an hour
        raise ValueError(f"config.json names a number of layers that {stored} tensors do not make")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("it is quantised; take the weights that it was made from")
    return config


def check_weights(model: nn.Module, policy: str) -> None:
    """Refuse weights, or the shards of this rank, of no use, and a generation config that fits no token."""
    stored = stored_tensors(policy)
    for name, weight in model.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if stored.get(name, (None, "F32"))[1] not in FLOATS or not local.sum().isfinite():
            raise InputError(
                f"policy {policy!r}: the weights {name} hold NaN or infinite numbers, or none of the types "
                f"{', '.join(FLOATS)}; export or download it again"
            )
    ends, vocabulary = model.generation_config.eos_token_id, model.config.get_text_config().vocab_size
    for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if type(end) is not int or not 0 <= end < vocabulary:
            raise InputError(f"policy {policy!r}: eos_token_id {end!r} in generation_config.json is no token id")


@torch.no_grad()
def check_forward(model: nn.Module, policy: str, bound: float = 1e-3) -> None:
    """Let the model compute a prompt once for all its responses if it does so rightly, else pad, with a warning.

    Args:
        model: the policy.
        policy: its name, for messages.
        bound: on differences of log-probs, and of hidden states relative to the largest.

    Raises:
        InputError: the model's own logits are not what `response_log_probs` takes them to be (scaled heads, say).
    """
    ids = np.arange(6) % model.config.get_text_config().vocab_size
    tokens = pack([ids[:3], ids[:3], ids[3:5]], [ids[3:], ids[1:3], ids[5:]]).to(model.device)
    own = model(tokens.input_ids_L[None, :5]).logits[0, 2:5].float().log_softmax(-1)  # the first prompt and response
    log_probs, hidden = model.response_log_probs(tokens)
    difference = (own.gather(1, tokens.target_N[:3, None])[:, 0] - log_probs[:3]).abs().max().item()
    if not difference < bound:
        raise InputError(
            f"policy {policy!r} ({type(model).__name__}) does more to its logits than a projection and a soft cap: "
            f"log-probs differ by {difference:.1e}; choose a model with a plain output projection"
        )
    implementation, windows = model.config._attn_implementation, []

    def recorded(*arguments, sliding_window: int | None = None, **keywords):
        windows.append(sliding_window)
        return attend(*arguments, sliding_window=sliding_window, **keywords)

    try:
        register(recorded)
        model.set_attn_implementation(NAME)
        _, shared = model.response_log_probs(tokens)
        exact = windows == _windows(model.config.get_text_config())
        exact = exact and ((shared - hidden).abs().max() <= bound * hidden.abs().max()).item()
    except Exception:  # whatever a model makes of a keyword that it does not know
        exact = False
    finally:
        register(attend)
    if not exact:
        model.set_attn_implementation(implementation)
        warnings.warn(
            f"policy {policy!r} ({type(model).__name__}) attends in a way of its own, so trajectories are padded and "
            "their prompts computed again, which takes more time and memory",
            stacklevel=2,
        )


def _windows(config) -> list[int | None]:
    """The sliding window of each layer; layers of another kind, which none of our attention serves, have window 0."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [{"full_attention": None, "sliding_attention": window}.get(kind, 0) for kind in kinds]


def end_tokens(model: nn.Module, tokenizer) -> set[int]:
    """Ids that end a response: the tokenizer's EOS and those of the generation config (Llama 3 has two)."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return {tokenizer.eos_token_id, *configured} - {None}


def export_policy(model: nn.Module, tokenizer, path: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; it appears complete or not at all.

    Of a model with adapters these are written, for `merge`.

    Raises:
        InputError: it cannot be written.
    """
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with atomic(path) as folder:
        try:
            model.save_pretrained(folder, state_dict=state_dict)
        except SafetensorError as error:
            raise InputError(f"{path} cannot be written ({error}); make room and start again") from error
        tokenizer.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):  # they are written for their owner alone
            weights.chmod((folder / "tokenizer_config.json").stat().st_mode)
