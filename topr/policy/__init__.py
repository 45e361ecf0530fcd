"""Policies: Hugging Face causal language models with their tokenizers, in and out, and their log-probs.
Not here: sampling, grading, training."""

from topr.policy.files import encode, encode_prompt, load_tokenizer, policy_fingerprint, provenance
from topr.policy.files import (
    render_prompt,
    resolve_policy,
    tokenizer_fingerprint,
    vocabulary_and_context,
)
from topr.policy.logprobs import score
from topr.policy.model import LoRA, Policy, export_policy, load_policy, own_device
