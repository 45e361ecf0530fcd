"""Samplers: several responses to each prompt, as token ids."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from topr.io import InputError, check_counts
from topr.policy import end_tokens


@dataclass
class Sampling:
    """Parameters of sampling; the paper's by default.

    Args:
        temperature: 0 is greedy.
        top_k: sample from the k likeliest tokens only; 0 turns it off.
        top_p: sample from the likeliest tokens that hold this probability; 1 turns it off.
        max_new_tokens: longest response, its end token included.
        stop: texts that end a response; what follows one is neither sampled nor graded.

    Raises:
        InputError: a value lies outside its range.
    """

    temperature: float = 1.0
    top_k: int = 500
    top_p: float = 1.0
    max_new_tokens: int = 512
    stop: list[str] = field(default_factory=list)

    def __post_init__(self):
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and self.max_new_tokens >= 1):
            raise InputError(
                f"{self}: temperature and top_k must be at least 0, top_p above 0 and at most 1, max_new_tokens at "
                "least 1"
            )
        if not all(self.stop):
            raise InputError(f"{self}: an empty text in stop would end every response")


class Response(NamedTuple):
    """Sampled token ids; `finished` says that the last one is an end token."""

    ids: list[int]
    finished: bool


class Sampler(ABC):
    """Base of the samplers."""

    @abstractmethod
    def sample(
        self, model: nn.Module, tokenizer, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        """n responses to each prompt; the same arguments give the same responses.

        Args:
            model: the policy.
            tokenizer: its tokenizer.
            prompts: token ids of each prompt.
            n: responses per prompt.
            sampling: how to sample.
            seed: of the random numbers; the process's own generators are left as they were.
        """


class LocalSampler(Sampler):
    """In process, with transformers' `generate`.

    Args:
        rows: responses generated side by side; lower it when memory runs out.
    """

    def __init__(self, rows: int = 512):
        check_counts("LocalSampler: ", rows=rows)
        self.rows = rows

    def sample(
        self, model: nn.Module, tokenizer, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        from transformers import GenerationConfig

        ends = end_tokens(model, tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        config = GenerationConfig(
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=pad,
        )
        device = next(model.parameters()).device
        # prompts of one length stand together, so that little is padded
        order = sorted((i for i in range(len(prompts)) for _ in range(n)), key=lambda i: len(prompts[i]))
        responses: list[list[Response]] = [[] for _ in prompts]
        with _plain(model), torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            for start in range(0, len(order), self.rows):
                rows = order[start : start + self.rows]
                ids, mask = _pad_left([prompts[i] for i in rows], pad, device)
                criteria = [partial(_stopped, tokenizer, sampling.stop, ids.shape[1])] if sampling.stop else []
                output = model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=criteria)
                for i, sampled in zip(rows, output[:, ids.shape[1] :].tolist(), strict=True):
                    responses[i].append(_cut(sampled, ends, sampling.stop, tokenizer))
        return responses


@contextmanager
def _plain(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without the model's own generation config, which would fill in whatever a call leaves unset."""
    from transformers import GenerationConfig

    training, config = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.train(training)
        model.generation_config = config


def _pad_left(prompts: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def _stopped(tokenizer, stop: list[str], prompt: int, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
    """Whether each row's last tokens hold a stop text; transformers' own stop strings need a tokenizer with letters."""
    window = max(len(text.encode()) for text in stop) + 4  # a token may hold a single byte
    texts = tokenizer.batch_decode(ids_BT[:, max(prompt, ids_BT.shape[1] - window) :])
    return torch.tensor([any(text in found for text in stop) for found in texts], device=ids_BT.device)


def _cut(ids: list[int], ends: set[int], stop: list[str], tokenizer) -> Response:
    """The response up to its first end token or the token that completes a stop text; the rest was not sampled."""
    length = next((position + 1 for position, token in enumerate(ids) if token in ends), len(ids))
    if any(text in tokenizer.decode(ids[:length]) for text in stop):
        stopped = (n for n in range(1, length + 1) if any(text in tokenizer.decode(ids[:n]) for text in stop))
        length = next(stopped)
    return Response(ids[:length], ids[length - 1] in ends)
