"""A policy's folder: found, read with care, told apart from others; no model is built here."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from topr.io import InputError, check_counts, check_file, first_line

SETTINGS = ["config.json", "generation_config.json", "tokenizer_config.json"]
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


def stored_tensors(policy: str) -> dict[str, tuple[Path, str]]:
    """File and type, by safetensors' name, of every tensor of a policy."""
    from safetensors import safe_open

    tensors = {}
    for path in resolve_policy(policy).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: (path, file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    return tensors


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
