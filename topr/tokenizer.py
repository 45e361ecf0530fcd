"""Tokenizers: prompts to token ids, and what tells one tokenizer from another."""

import hashlib
import json
from typing import Any

from topr.io import InputError, first_line
from topr.policy_files import policy_fingerprint, resolve_policy, vocabulary_and_context


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


def tokenizer_fingerprint(tokenizer) -> str:
    """Hash of all that decides token ids: the tokenizer's rules and vocabulary, special tokens, chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    rules = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}  # set by mere use
    parts = [rules, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def provenance(policy: str, tokenizer, precision: str, **more) -> dict[str, Any]:
    """Metadata of a trajectory file whose log mu this policy scored; see `trajectories.METADATA_KEYS`."""
    fingerprints = {"tokenizer": tokenizer_fingerprint(tokenizer), "policy": policy_fingerprint(policy)}
    return {**fingerprints, "precision": precision, **more}
