"""Policies: Hugging Face causal language models with their tokenizers, in and out, and log-probs.
Not here: sampling, grading, training."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    files=["encode", "encode_prompt", "load_tokenizer", "render_prompt", "vocabulary_and_context"],
    model=["LoRA", "Policy", "export_policy", "load_policy", "own_device"],
)
