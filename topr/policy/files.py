"""A policy's folder: where it is, what its files say, its tokenizer, fingerprints. No model is built here."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from topr.io import InputError, explained

SETTINGS = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
]
FILES = [
    "*.safetensors",
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
]  # never pickled weights, never code
Messages = list[dict[str, str]]


@lru_cache(maxsize=16)  # the hub is asked once
def resolve_policy(name: str) -> Path:
    """The local folder of a policy: the path itself, or the snapshot of a hub name; raises InputError without one."""
    folder = Path(name)
    if not folder.is_dir():
        remedy = "give the path of a Hugging Face folder or a name on the hub"
        what = f"policy {name!r} is neither a folder nor a model that the hub delivers"
        with explained(what, (OSError, ValueError), remedy):
            folder = Path(snapshot_download(name, allow_patterns=FILES))
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise InputError(
                f"policy {name!r} holds no model: {pattern} is missing; give a Hugging Face folder"
            )
    if (
        folder / "adapter_config.json"
    ).exists():  # its base would be loaded instead, from wherever it says
        raise InputError(
            f"policy {name!r} holds adapters; merge them into their policy and name the result"
        )
    for path in (folder / setting for setting in SETTINGS):  # the libraries ignore a broken one
        with explained(f"policy {name!r}: {path.name} cannot be read as JSON"):
            json.loads(path.read_text(encoding="utf-8") if path.exists() else "{}")
    return folder


@lru_cache(maxsize=16)
def vocabulary_and_context(name: str) -> tuple[int, int]:
    """Number of token ids that the model embeds; the longest sequence it takes (2^31 if its config names none)."""
    with explained(f"the config.json of policy {name!r} cannot be used"):
        config = AutoConfig.from_pretrained(
            resolve_policy(name), trust_remote_code=False
        ).get_text_config()
    return config.vocab_size, getattr(config, "max_position_embeddings", None) or 2**31


def stored_tensors(name: str) -> dict[str, Path]:
    """The file of every tensor of a policy, by its name; raises InputError for a damaged file."""
    tensors: dict[str, Path] = {}
    for path in resolve_policy(name).glob("*.safetensors"):
        with (
            explained(f"policy {name!r}: {path.name} cannot be read"),
            safe_open(path, "pt") as file,
        ):
            tensors |= dict.fromkeys(file.keys(), path)
    return tensors


@lru_cache(maxsize=16)
def policy_fingerprint(name: str) -> str:
    """Hash of a policy's weights: every tensor's name, shape and first and last rows in float32. Training moves nearly
    all weights, so a part of each tells policies apart, in milliseconds for an 8B model. The same weights in another
    file layout or a wider dtype keep their fingerprint."""
    digest = hashlib.sha256()
    for key, path in sorted(stored_tensors(name).items()):
        with safe_open(path, "pt") as file:
            rows = file.get_slice(key)
            shape = rows.get_shape()
            digest.update(f"{key}{shape}".encode())
            if shape:
                for part in (rows[:8], rows[max(0, shape[0] - 8) :]):
                    digest.update(part.float().numpy().tobytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=16)
def load_tokenizer(name: str) -> Any:
    """The tokenizer of a policy; raises InputError if there is none, or none with an end-of-sequence token."""
    folder, (vocabulary, _) = resolve_policy(name), vocabulary_and_context(name)
    with explained(f"policy {name!r} has no usable tokenizer", remedy="save one in its folder"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.eos_token or tokenizer.eos_token_id not in range(vocabulary):
        message = f"the tokenizer of policy {name!r} has no end-of-sequence token among the {vocabulary} of its model"
        raise InputError(f"{message}; set its eos_token")
    return tokenizer


def render_prompt(prompt: str | Messages, tokenizer: Any, answered: bool = False) -> str:
    """A text as it is; chat messages by the tokenizer's template, with the head of the answer unless `answered`."""
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise InputError(
            "the prompt is chat messages but the tokenizer has no chat template; give a text as prompt"
        )
    with explained(
        "chat messages do not fit the tokenizer's chat template"
    ):  # a program that raises what it likes
        return tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=not answered
        )


def encode_prompt(prompt: str | Messages, tokenizer: Any) -> tuple[str, list[int]]:
    """Text and token ids of a prompt, with special tokens unless a template has written them; see `render_prompt`."""
    text = render_prompt(prompt, tokenizer)
    rendered = (
        text is not prompt or bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    )
    return text, encode(text, tokenizer, special=not rendered)


def encode(text: str, tokenizer: Any, special: bool) -> list[int]:
    """Token ids of a text, with special tokens or without."""
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides token ids: the tokenizer's rules and vocabulary, special tokens, chat template."""
    rules = (
        json.loads(tokenizer.backend_tokenizer.to_str())
        if tokenizer.is_fast
        else tokenizer.get_vocab()
    )
    rules = {
        key: value for key, value in rules.items() if key not in ("padding", "truncation")
    }  # set by mere use
    parts = [rules, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def provenance(name: str, precision: str, **more: Any) -> dict[str, Any]:
    """Metadata of a trajectory file whose log mu this policy scored; see `trajectories.file.METADATA_KEYS`."""
    fingerprints = {
        "tokenizer": tokenizer_fingerprint(load_tokenizer(name)),
        "policy": policy_fingerprint(name),
    }
    return {**fingerprints, "precision": precision, **more}
