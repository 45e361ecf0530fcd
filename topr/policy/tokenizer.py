"""Tokenizers: prompts to token ids, and the fingerprint that tells tokenizers apart."""

import hashlib
import json
from functools import lru_cache
from typing import Any

from topr.io import InputError, first_line
from topr.policy.files import policy_fingerprint, resolve_policy, vocabulary_and_context

Messages = list[dict[str, str]]


@lru_cache(maxsize=16)
def load_tokenizer(name: str) -> Any:
    """The tokenizer of a policy; raises InputError if there is none, or none with an end-of-sequence token."""
    from transformers import AutoTokenizer

    folder, (vocabulary, _) = resolve_policy(name), vocabulary_and_context(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the library raise
        raise InputError(f"policy {name!r} has no usable tokenizer: {first_line(error)}") from error
    if not tokenizer.eos_token or tokenizer.eos_token_id not in range(vocabulary):
        message = f"the tokenizer of policy {name!r} has no end-of-sequence token among the {vocabulary} of its model"
        raise InputError(f"{message}; set its eos_token")
    return tokenizer


def render_prompt(prompt: str | Messages, tokenizer: Any) -> str:
    """The text of a prompt: itself, or chat messages rendered by the tokenizer's template."""
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise InputError("the prompt is chat messages but the tokenizer has no chat template; give a text as prompt")
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs and raise what they like
        raise InputError(f"chat messages do not fit the tokenizer's chat template: {first_line(error)}") from error


def encode_prompt(prompt: str | Messages, tokenizer: Any) -> tuple[str, list[int]]:
    """Text and token ids of a prompt, with special tokens unless a template has written them; see `render_prompt`."""
    text = render_prompt(prompt, tokenizer)
    rendered = text is not prompt or bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return text, encode(text, tokenizer, special=not rendered)


def encode(text: str, tokenizer: Any, special: bool) -> list[int]:
    """Token ids of a text, with special tokens or without."""
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides token ids: the tokenizer's rules and vocabulary, special tokens, chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    rules = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}  # set by mere use
    parts = [rules, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def provenance(name: str, precision: str, **more: Any) -> dict[str, Any]:
    """Metadata of a trajectory file whose log mu this policy scored; see `trajectories.METADATA_KEYS`."""
    fingerprints = {"tokenizer": tokenizer_fingerprint(load_tokenizer(name)), "policy": policy_fingerprint(name)}
    return {**fingerprints, "precision": precision, **more}
