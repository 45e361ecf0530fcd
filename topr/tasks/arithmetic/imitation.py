"""Base policies of the embedded task: a small language model of single characters, trained by imitation."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from topr.batching import pack
from topr.policy.model import Policy, check_forward

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", *"+-*=;#>"]
Demonstrations = Iterator[tuple[str, str, bool]]  # prompt, response, whether it ends


def make_tokenizer(extra: str = "") -> Any:
    """A tokenizer of one token per character, for `SYMBOLS` and the extra characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(dict.fromkeys([*SYMBOLS, *extra]))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def make_policy(tokenizer: Any) -> Policy:
    """A randomly initialised Llama with 160k parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    policy = Policy(LlamaForCausalLM(config), tokenizer, "the base policy")
    check_forward(policy)  # enables rows without padding
    return policy


def imitate(policy: Policy, demonstrations: Demonstrations, steps: int, lr: float = 3e-3, batch_size: int = 96) -> None:
    """Supervised training in place; only the first third of a cosine schedule, so that there is room to improve."""
    tokenizer = policy.tokenizer
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * steps)
    for step in range(1, steps + 1):
        prompts, responses, finished = zip(*islice(demonstrations, batch_size), strict=True)
        prompt_ids = [np.array(ids) for ids in tokenizer(list(prompts))["input_ids"]]
        ids, end = tokenizer(list(responses))["input_ids"], [tokenizer.eos_token_id]
        response_ids = [np.array(row + end * ends, dtype=int) for row, ends in zip(ids, finished, strict=True)]
        loss = -policy(pack(prompt_ids, response_ids))[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"base policy: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
