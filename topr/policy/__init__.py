"""Policies: Hugging Face causal language models with their tokenizers, in and out, and their log-probs.

Not here: sampling, grading, training.
"""

from topr.policy.files import policy_fingerprint, resolve_policy, vocabulary_and_context
from topr.policy.logprobs import score
from topr.policy.model import LoRA, Policy, export_policy, load_policy, own_device
from topr.policy.tokenizer import encode_prompt, load_tokenizer, provenance, render_prompt, tokenizer_fingerprint
