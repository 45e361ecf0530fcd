"""Policies: Hugging Face causal language models, in from a folder or the hub, out as a folder."""

import hashlib
import json
import os
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from topr.io import InputError, atomic, check_counts, check_file, first_line
from topr.logprobs import pad, response_log_probs

SETTINGS = ["config.json", "generation_config.json", "tokenizer_config.json"]
FLOATS = ["F16", "BF16", "F32", "F64"]
FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]  # never pickled weights, never code


def resolve_policy(policy: str) -> Path:
    """The local folder of a policy: the path itself, or the snapshot of a hub name.

    Raises:
        InputError: it is neither, or the folder holds no model in safetensors format.
    """
    folder = Path(policy)
    if not os.path.isdir(folder):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(policy, allow_patterns=FILES))
        except (OSError, ValueError) as error:
            raise InputError(
                f"policy {policy!r} is neither a folder nor a model that the hub delivers ({first_line(error)}); "
                "give the path of a Hugging Face model folder or a hub name such as meta-llama/Meta-Llama-3-8B-Instruct"
            ) from error
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise InputError(
                f"policy {policy!r} holds no model: {pattern} is missing; expected a Hugging Face folder with "
                "config.json and weights in safetensors format"
            )
    if (folder / "adapter_config.json").exists():  # its base, from wherever it says, would be loaded instead
        raise InputError(f"policy {policy!r} holds adapters; merge them into their policy and name the result")
    for pattern in FILES:
        for path in folder.glob(pattern):
            check_file(path, f"policy {policy!r} needs it whole")
    for name in SETTINGS:
        _read_settings(folder / name, policy)
    shards = _read_settings(folder / "model.safetensors.index.json", policy).get("weight_map", {})
    if not isinstance(shards, dict) or any(os.path.basename(str(name)) != name for name in shards.values()):
        raise InputError(f"policy {policy!r}: model.safetensors.index.json must map tensors to files beside it")
    return folder


def _read_settings(path: Path, policy: str) -> dict[str, Any]:
    """What a JSON file of a policy says, nothing where there is none; the libraries pass over one that is broken."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"policy {policy!r}: {path.name} cannot be read as JSON ({first_line(error)})") from error
    if not isinstance(settings, dict):
        raise InputError(f"policy {policy!r}: {path.name} holds no JSON object but {type(settings).__name__}")
    return settings


def load_tokenizer(policy: str):
    """The tokenizer of a policy.

    Raises:
        InputError: there is none, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    folder, (vocabulary, _) = resolve_policy(policy), vocabulary_and_context(policy)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the library raise
        raise InputError(f"policy {policy!r} has no usable tokenizer: {first_line(error)}") from error
    if not tokenizer.eos_token or tokenizer.eos_token_id not in range(vocabulary):
        raise InputError(
            f"the tokenizer of policy {policy!r} has no end-of-sequence token among the {vocabulary} that the model "
            "knows; set eos_token in it"
        )
    return tokenizer


def render_prompt(prompt: str | list[dict[str, str]], tokenizer) -> str:
    """Text of a prompt: itself, or chat messages by the tokenizer's template.

    Raises:
        InputError: there is no template for the messages, or it refuses them.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise InputError(
            "the prompt is chat messages but the policy's tokenizer has no chat template; give the prompt as text or "
            "take the policy's instruct model"
        )
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs and raise what they like
        raise InputError(f"chat messages do not fit the tokenizer's chat template: {first_line(error)}") from error


def encode_prompt(prompt: str | list[dict[str, str]], tokenizer) -> tuple[str, list[int]]:
    """Text and token ids of a prompt, with special tokens unless a template has written them; see `render_prompt`."""
    text = render_prompt(prompt, tokenizer)
    rendered = text is not prompt or bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return text, encode(text, tokenizer, special=not rendered)


def encode(text: str, tokenizer, special: bool) -> list[int]:
    """Token ids of a text, with special tokens or without.

    Raises:
        InputError: the tokenizer fails at it.
    """
    try:
        return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    except Exception as error:  # whatever a broken tokenizer raises
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} fails at {text[:40]!r}: {first_line(error)}"
        ) from error


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
    model.response_log_probs = MethodType(response_log_probs, model)  # a method, which FSDP2 can wrap
    check_head(model, policy)
    return model


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
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except Exception as error:
        raise InputError(f"policy {policy!r} cannot be loaded as a causal model: {first_line(error)}") from error
    model.response_log_probs = MethodType(response_log_probs, model)
    return model


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


def stored_tensors(policy: str) -> dict[str, tuple[Path, str]]:
    """File and type, by safetensors' name, of every tensor of a policy."""
    from safetensors import safe_open

    tensors = {}
    for path in resolve_policy(policy).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: (path, file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    return tensors


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
def check_head(model: nn.Module, policy: str, bound: float = 1e-3) -> None:
    """Refuse a model whose own logits differ from what `response_log_probs` takes them to be (scaled heads, say)."""
    ids = torch.arange(4) % model.config.get_text_config().vocab_size
    tokens = pad([ids[:3].numpy()], [ids[3:].numpy()]).to(model.device)
    logits_V = model(ids[None, :3].to(model.device)).logits[0, -1]
    ours, _ = model.response_log_probs(tokens)
    difference = (logits_V.float().log_softmax(-1)[ids[3]] - ours[0]).abs().item()
    if not difference < bound:
        raise InputError(
            f"policy {policy!r} ({type(model).__name__}) does more to its logits than a projection and a soft cap: "
            f"log-probs differ by {difference:.1e}; choose a model with a plain output projection"
        )


def vocabulary_and_context(policy: str) -> tuple[int, int]:
    """Number of token ids that the model embeds, and the longest sequence it takes (if its config names none, 2^31)."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(resolve_policy(policy), trust_remote_code=False).get_text_config()
    except Exception as error:
        raise InputError(f"the config.json of policy {policy!r} cannot be used: {first_line(error)}") from error
    context = getattr(config, "max_position_embeddings", None)
    check_counts(f"policy {policy!r}, config.json: ", vocab_size=config.vocab_size, max_position_embeddings=context)
    return config.vocab_size, context or 2**31


def end_tokens(model: nn.Module, tokenizer) -> set[int]:
    """Ids that end a response: the tokenizer's EOS and those of the generation config (Llama 3 has two)."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return {tokenizer.eos_token_id, *configured} - {None}


def tokenizer_fingerprint(tokenizer) -> str:
    """Hash of all that decides token ids: the tokenizer's rules and vocabulary, special tokens, chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    rules = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}  # set by mere use
    parts = [rules, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def policy_fingerprint(policy: str) -> str:
    """Hash of a policy's weights: every tensor's name, shape and first and last rows in float32.

    An update of training moves nearly all weights, so a part of each tensor tells policies apart, in milliseconds for
    an 8B model; a change of middle rows alone goes unseen here and is left to the check of log mu. The same weights in
    another file layout or a wider dtype keep their fingerprint.
    """
    from safetensors import safe_open

    digest = hashlib.sha256()
    for name, (path, _) in sorted(stored_tensors(policy).items()):
        with safe_open(path, "pt") as file:
            rows = file.get_slice(name)
            shape = rows.get_shape()
            digest.update(f"{name}{shape}".encode())
            if shape:
                for part in (rows[:8], rows[max(0, shape[0] - 8) :]):
                    digest.update(part.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def provenance(policy: str, tokenizer, precision: str, **more) -> dict[str, Any]:
    """Metadata of a trajectory file whose log mu this policy scored; see `trajectories.METADATA_KEYS`."""
    fingerprints = {"tokenizer": tokenizer_fingerprint(tokenizer), "policy": policy_fingerprint(policy)}
    return {**fingerprints, "precision": precision, **more}


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
