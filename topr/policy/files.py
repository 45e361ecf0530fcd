"""A policy's folder: where it is, what its files say, its tokenizer. No model is built here."""

from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from topr.io import InputError, explained

# never pickled weights, never code
FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
Messages = list[dict[str, str]]


@lru_cache(maxsize=16)  # the hub is asked once
def resolve_policy(name: str) -> Path:
    """The local folder of a policy: the path itself, or the snapshot of a hub name.

    Raises:
        InputError: there is none, or it holds no model.
    """
    folder = Path(name)
    if not folder.is_dir():
        with explained(
            f"policy {name!r} is neither a folder nor a model that the hub delivers",
            (OSError, ValueError),
            "give the path of a Hugging Face folder or a name on the hub",
        ):
            folder = Path(snapshot_download(name, allow_patterns=FILES))
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise InputError(
                f"policy {name!r} holds no model: {pattern} is missing",
                "give a Hugging Face folder",
            )
    # transformers would load their base instead, from wherever they say
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"policy {name!r} holds adapters", "merge them into their policy and name the result"
        )
    return folder


def load_config(name: str):
    """A model's configuration with dropout and other noise off."""
    with explained(f"the config.json of policy {name!r} cannot be used"):
        config = AutoConfig.from_pretrained(resolve_policy(name), trust_remote_code=False)
    # log mu and log pi must come from one deterministic function, whatever mode the trainer sets
    for key, value in vars(config).items():
        if ("drop" in key or "jitter" in key) and isinstance(value, int | float):
            setattr(config, key, 0.0)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"policy {name!r} is quantised; take the weights that it was made from")
    return config


def load_generation_config(name: str) -> GenerationConfig:
    """The generation config of a policy, by default what follows from its config."""
    folder = resolve_policy(name)
    if (folder / "generation_config.json").is_file():
        with explained(f"the generation_config.json of policy {name!r} cannot be used"):
            return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(load_config(name))


@lru_cache(maxsize=16)
def vocabulary_and_context(name: str) -> tuple[int, int]:
    """Number of token ids that the model embeds; the longest sequence it takes (2^31 if its config
    names none).

    With longrope (Phi-3) it is the original length: beyond it, the positions of all sequences of a
    forward depend on the longest one, and so would log-probs."""
    config = load_config(name).get_text_config()
    context = getattr(config, "max_position_embeddings", None) or 2**31
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        context = min(context, rope["original_max_position_embeddings"])
    return config.vocab_size, context


@lru_cache(maxsize=16)
def load_tokenizer(name: str):
    """The tokenizer of a policy.

    Raises:
        InputError: there is none, or none with an end-of-sequence token.
    """
    vocabulary, _ = vocabulary_and_context(name)
    with explained(f"policy {name!r} has no usable tokenizer", remedy="save one in its folder"):
        tokenizer = AutoTokenizer.from_pretrained(resolve_policy(name), trust_remote_code=False)
    if not tokenizer.eos_token or tokenizer.eos_token_id not in range(vocabulary):
        raise InputError(
            f"the tokenizer of policy {name!r} has no end-of-sequence token among the "
            f"{vocabulary} of its model",
            "set its eos_token",
        )
    return tokenizer


def render_prompt(prompt: str | Messages, tokenizer, answered: bool = False) -> str:
    """A text as it is; chat messages by the tokenizer's template, with the head of the answer
    unless `answered`."""
    if isinstance(prompt, str):
        return prompt
    # a template is a program that raises what it likes
    with explained(
        "chat messages do not fit the tokenizer's chat template", remedy="give a text as prompt"
    ):
        return tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=not answered
        )


def encode_prompt(prompt: str | Messages, tokenizer) -> tuple[str, list[int]]:
    """Text and token ids of a prompt, with special tokens unless a template has written them."""
    text = render_prompt(prompt, tokenizer)
    bos = tokenizer.bos_token
    rendered = text is not prompt or bool(bos) and text.startswith(bos)
    return text, encode(text, tokenizer, special=not rendered)


def encode(text: str, tokenizer, special: bool) -> list[int]:
    """Token ids of a text, with special tokens or without."""
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
