"""Samplers: several responses to each prompt, as token ids."""

import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from topr.io import InputError, check_counts
from topr.policy import end_tokens
from topr.server import COUNT, FLAVOURS, Servers


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
        warm = self.temperature == 0 or 1e-4 <= self.temperature <= 1e4  # else logits overflow
        if not (warm and self.top_k >= 0 and 0 < self.top_p <= 1 and self.max_new_tokens >= 1):
            raise InputError(
                f"{self}: temperature must be 0 or from 1e-4 to 1e4, top_k at least 0, top_p above 0 and at most 1, "
                "max_new_tokens at least 1"
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

        A sampler that cannot vouch for a response leaves it out, so that a prompt has fewer, and warns.

        Args:
            model: the policy.
            tokenizer: its tokenizer.
            prompts: token ids of each prompt.
            n: responses per prompt.
            sampling: how to sample.
            seed: of the random numbers; the process's own generators are left as they were.
        """


class LocalSampler(Sampler):
    """In process; a response that ends leaves its row to the next one at once.

    Args:
        rows: responses generated side by side; lower it when memory runs out.
    """

    def __init__(self, rows: int = 512):
        check_counts("LocalSampler: ", rows=rows)
        self.rows = rows
        self.interrupted: Callable[[], bool] = lambda: False  # asked at each token; once true, what is there returns

    def sample(
        self, model: nn.Module, tokenizer, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        from topr.generation import generate, sample_tokens

        ends, stop = end_tokens(model, tokenizer), sampling.stop
        window = max((len(text.encode()) for text in stop), default=0) + 4  # a token may hold a single byte

        def ended(ids: list[int]) -> bool:
            if ids[-1] in ends or len(ids) == sampling.max_new_tokens:
                return True
            # the whole text decides, but is looked at only where its end holds a stop text
            return bool(stop) and all(
                any(text in tokenizer.decode(part) for text in stop) for part in (ids[-window:], ids)
            )

        draw = partial(sample_tokens, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        device = next(model.parameters()).device
        with _plain(model), torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            how = draw, ended, self.interrupted, sampling.max_new_tokens
            sampled = generate(model, prompts, n, self.rows, *how)
        return [[Response(ids, ids[-1] in ends) for ids in responses] for responses in sampled]


class ServerSampler(Sampler):
    """On OpenAI-compatible servers, for `predict`; log mu is scored here, so they must serve the very policy.

    Each response is a request with a seed of its own, so that samples repeat as far as the server is deterministic.
    Answers whose token ids are not certain are dropped, counted and warned about.

    Args:
        url: address up to and with /v1, or several, which share the requests.
        flavour: vllm or sglang exchange token ids. openai, for any other server, exchanges text and drops responses
            whose number of tokens differs when tokenised again: exact only where a text has one tokenisation. It
            takes the tokenizer's end token for whichever ended a response, and neither top_k nor stop.
        model: name of the policy on the servers; by default the only one that they list.
        concurrency: requests at once over all servers, of each process.
        timeout: seconds to wait for a response; one that takes longer is asked for again, never dropped, which would
            thin out long responses.
        retries: how often a request is repeated after a time-out, a broken connection or a busy or failing server.

    Raises:
        InputError: a value lies outside its range.
    """

    def __init__(
        self,
        url: str | list[str],
        flavour: Literal["vllm", "sglang", "openai"] = "vllm",
        model: str | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 6,
    ):
        if flavour not in FLAVOURS:
            raise InputError(f"ServerSampler: flavour is {flavour!r}; choose from {', '.join(FLAVOURS)}")
        urls = [url] if isinstance(url, str) else url
        self.flavour, self.servers = FLAVOURS[flavour], Servers(urls, model, concurrency, timeout, retries)
        self.exact: set[str] = set()  # servers that have returned token ids
        self.delivered = False

    def sample(
        self, model: nn.Module, tokenizer, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> list[list[Response]]:
        ends = end_tokens(model, tokenizer)
        flavour = self.flavour(tokenizer, ends, sampling.top_k, sampling.stop)
        common = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
        common |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        asked, bodies = [], []  # the prompt's number for each request
        dropped: Counter[str] = Counter()
        for i, prompt in enumerate(prompts):
            request = flavour.request(prompt)
            if request is None:
                dropped["no text is tokenised to the prompt's ids"] += n
                continue
            asked += [i] * n
            for word in np.random.SeedSequence((seed, i)).generate_state(n):
                bodies.append(common | request | {"seed": int(word >> 1)})  # 31 bits, which every server takes

        def read(number: int, url: str, answer: Any) -> Response | str:
            try:
                choice, usage = answer["choices"][0], answer["usage"]
                ids, counts = flavour.ids(choice), (usage["prompt_tokens"], usage["completion_tokens"])
            except (KeyError, IndexError, TypeError) as error:
                raise InputError(
                    f"{url} answers without choices or usage, as no OpenAI-compatible server does"
                ) from error
            if ids is None and url not in self.exact:
                raise InputError(f"{url} returns no token ids; use a newer vLLM or SGLang, or flavour openai")
            self.exact.add(url)
            if ids is None or isinstance(ids, str):
                return ids or "without token ids"
            if counts[0] != len(prompts[asked[number]]):
                return "the server read another prompt"
            if counts[1] != len(ids):
                return COUNT
            response = _cut(ids, ends, sampling.stop, tokenizer) if ids else Response([], False)
            stopped = response.finished or any(text in tokenizer.decode(response.ids) for text in sampling.stop)
            if not stopped and len(ids) != sampling.max_new_tokens:
                return "cut off by the server"
            return response

        responses: list[list[Response]] = [[] for _ in prompts]
        for i, result in zip(asked, self.servers.complete(bodies, read), strict=True):
            if isinstance(result, Response):
                responses[i].append(result)
            else:
                dropped[result] += 1
        self._tell(dropped, n * len(prompts), flavour.remedy)
        return responses

    def _tell(self, dropped: Counter[str], total: int, remedy: str) -> None:
        """Warn about dropped responses; refuse to go on with servers that have never given a usable one."""
        self.delivered = self.delivered or dropped.total() < total
        if dropped:
            reasons = ", ".join(f"{count} ({reason})" for reason, count in dropped.most_common())
            told = f"{' and '.join(self.servers.urls)}: {dropped.total()} of {total} responses dropped: {reasons}"
            if not self.delivered:
                raise InputError(f"{told}; {remedy}")
            warnings.warn(told, stacklevel=3)


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


def _cut(ids: list[int], ends: set[int], stop: list[str], tokenizer) -> Response:
    """The response up to its first end token or the token that completes a stop text; the rest was not sampled."""
    length = next((position + 1 for position, token in enumerate(ids) if token in ends), len(ids))

    def stopped(n: int) -> bool:
        return any(text in tokenizer.decode(ids[:n]) for text in stop)

    if stop and stopped(length):
        length = bisect_left(range(length), True, key=stopped)
    return Response(ids[:length], ids[length - 1] in ends)
