"""Base policies of the embedded task: a small language model of single characters, taught by imitation."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", *"+-*=;#>"]


def make_tokenizer(extra: Sequence[str] = ()):
    """A tokenizer of one token a character, of SYMBOLS and the extra ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate([*SYMBOLS, *extra])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def make_model(tokenizer):
    """A random Llama of 160k parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from topr.policy import check_forward, equip

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    equip(model)
    check_forward(model, "the base policy")  # lets it compute without padding
    return model


def imitate(
    model,
    tokenizer,
    demonstrations: Iterator[tuple[str, tuple[str, bool]]],
    steps: int,
    lr: float = 3e-3,
    batch_size: int = 96,
) -> None:
    """Supervised training on (prompt, (text, whether it ends)), in place.

    AdamW, stopped after `steps` of a cosine three times as long: good enough to be right sometimes, bad enough to
    leave reinforcement learning something to do.
    """
    import torch

    from topr.logprobs import response_log_probs
    from topr.packing import pack

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * steps)
    for step in range(steps):
        prompts, shown = zip(*islice(demonstrations, batch_size), strict=True)
        ids = (tokenizer(list(texts))["input_ids"] for texts in (prompts, [text for text, _ in shown]))
        ends = [[tokenizer.eos_token_id] * finished for _, finished in shown]
        prompt_ids, response_ids = ([np.array(row) for row in rows] for rows in ids)
        response_ids = [np.r_[row, end].astype(int) for row, end in zip(response_ids, ends, strict=True)]
        loss = -response_log_probs(model, pack(prompt_ids, response_ids))[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"base policy: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
