"""Make base policies: small language models that imitate demonstrations."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from topr.batching import pack
from topr.policy import Policy
from topr.policy.model import choose_forward

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", *"+-*=;#>"]


def make_tokenizer(extra: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character, for `SYMBOLS` and the extra characters."""
    symbols = dict.fromkeys([*SYMBOLS, *extra])
    vocabulary = dict(zip(symbols, range(len(symbols)), strict=True))
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=128,
    )


def make_policy(tokenizer: PreTrainedTokenizerFast, heads: int = 4) -> Policy:
    """A randomly initialised Llama with 160k parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    policy = Policy(LlamaForCausalLM(config), tokenizer, "arithmetic")
    choose_forward(policy)  # it shares prompts, as a policy that is loaded does
    return policy


def imitate(
    policy: Policy,
    demonstrations: Iterator[tuple[str, str]],
    steps: int,
    lr: float = 3e-3,
    batch_size: int = 96,
):
    """Train a policy in place on prompts and responses, which hold the end token.

    It stops after the first third of a cosine schedule, so that there is room to improve.
    """
    tokenizer = policy.tokenizer
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * steps)
    for _ in range(steps):
        prompt_ids = []
        response_ids = []
        for prompt, response in islice(demonstrations, batch_size):
            prompt_ids.append(np.array(tokenizer.encode(prompt)))
            response_ids.append(np.array(tokenizer.encode(response)))
        loss = -policy.log_probs(pack(prompt_ids, response_ids)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
