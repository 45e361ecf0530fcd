"""Sampling on OpenAI-compatible servers, through the `openai` client."""

import asyncio
import warnings
from typing import Any, Literal

import numpy as np
import openai
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from topr.io import InputError, first_line
from topr.sampling.base import Response, Sampler, end_of_response


class ServerSampler(Sampler):
    """Samples on OpenAI-compatible servers, for `predict`.

    A server that serves another policy goes undetected. Each response is a request with its own
    seed. Responses whose token ids are uncertain are dropped, with a warning.

    Args:
        url: address up to and including /v1, or several addresses, which share the requests.
        flavour: `vllm` and `sglang` exchange token ids. `openai` exchanges text: it needs top_k 0,
            no stop strings and one end token, and drops responses whose number of tokens changes
            when they are tokenised again.
        model: the policy's name on the servers; by default the only one that a server lists.
        concurrency: requests at once over all servers, for each process.
        timeout: seconds until a request is sent again. It is never given up at once, because that
            would make long responses rarer.
        retries: how often a request is sent again, to the same server.
    """

    in_process = False

    def __init__(
        self,
        url: str | list[str],
        flavour: Literal["vllm", "sglang", "openai"] = "vllm",
        model: str | None = None,
        concurrency: PositiveInt = 64,
        timeout: PositiveFloat = 600.0,
        retries: NonNegativeInt = 6,
    ):
        self.urls = [url] if isinstance(url, str) else url
        self.exchanges_text = flavour == "openai"
        self.model = model
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self.any_usable = False  # among the responses so far

    def sample(self, policy, prompts, n, sampling, seed, prompt_indices=()) -> list[list[Response]]:
        if self.exchanges_text and (sampling.top_k or sampling.stop):
            raise InputError("flavour openai needs sampling.top_k 0 and stop []")
        requests = []
        for prompt, index in zip(prompts, prompt_indices or range(len(prompts)), strict=True):
            for word in np.random.SeedSequence((seed, index)).generate_state(n):
                requests.append((prompt, int(word) >> 1))  # servers take seeds of 31 bits
        try:
            responses = asyncio.run(self.request(policy, sampling, requests))
        except openai.APIError as error:
            why = error.body or first_line(error.__cause__ or error)
            raise InputError(f"{error.request.url} fails: {why}") from error

        self.report(responses.count(None), len(responses))
        certain = []
        for start in range(0, len(responses), n):
            certain.append([response for response in responses[start : start + n] if response])
        return certain

    def report(self, dropped, total):
        """Warn of dropped responses; raise an InputError if none has ever been usable."""
        self.any_usable |= dropped < total
        message = f"{dropped} of {total} responses dropped: cut by the server, or token ids unclear"
        if not self.any_usable:
            raise InputError(f"{message}; give room for prompt and max_new_tokens, or use vLLM")
        if dropped:
            warnings.warn(message, stacklevel=3)

    async def request(self, policy, sampling, requests) -> list[Response | None]:
        """A response to each prompt and seed; None if its token ids are uncertain."""
        slots: asyncio.Queue = asyncio.Queue()  # a server for each request that may run at once
        async with openai.DefaultAsyncHttpxClient() as http:
            servers = [await self.connect(url, http) for url in self.urls]
            for i in range(self.concurrency):
                slots.put_nowait(servers[i % len(servers)])
            return await asyncio.gather(
                *(self.respond(policy, sampling, slots, *request) for request in requests)
            )

    async def respond(self, policy, sampling, slots, prompt, seed):
        encoded = to_text(policy, prompt) if self.exchanges_text else prompt
        if encoded is None:
            return None
        server = await slots.get()
        client, model = server
        completion = await client.completions.create(
            model=model, prompt=encoded, seed=seed, **self.options(policy, sampling)
        )
        slots.put_nowait(server)
        ids = self.ids_of(policy, completion.choices[0])
        read = completion.usage.prompt_tokens, completion.usage.completion_tokens
        if not ids or read != (len(prompt), len(ids)):
            return None
        ended = end_of_response(policy, sampling)
        for length in range(1, len(ids) + 1):
            if ended(ids[:length]):
                return Response(ids[:length], ids[length - 1] in policy.end_tokens)

    def ids_of(self, policy, choice):
        """The token ids of a response; None if they are uncertain."""
        if not self.exchanges_text:
            return getattr(choice, "token_ids", None)
        ids = policy.tokenizer(choice.text, add_special_tokens=False)["input_ids"]
        if policy.tokenizer.decode(ids) != choice.text or policy.end_tokens & set(ids):
            return None
        # With "length" the last token may be a hidden end token; the numbers of tokens then differ.
        if choice.finish_reason == "stop":
            ids.append(policy.tokenizer.eos_token_id)
        return ids

    def options(self, policy, sampling):
        """Parameters of each request, also those whose defaults a server takes from the model."""
        options: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if not self.exchanges_text:
            options["stop"] = sampling.stop
            options["extra_body"] = {  # known to vLLM and SGLang only
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "skip_special_tokens": False,
                "return_token_ids": True,
                "stop_token_ids": sorted(policy.end_tokens),
            }
        return options

    async def connect(self, url, http):
        """A client of this server, and the name of its model."""
        client = openai.AsyncOpenAI(
            base_url=url,
            api_key="none",
            max_retries=self.retries,
            timeout=openai.Timeout(self.timeout, connect=30.0),
            http_client=http,
        )
        if self.model:
            return client, self.model
        names = [model.id async for model in client.models.list()]
        if len(names) != 1:
            raise InputError(f"{url} lists the models {names}; choose one by the sampler's model")
        return client, names[0]


def to_text(policy, prompt):
    """The text that a server's tokenizer turns into these ids; None if there is none."""
    added = len(policy.tokenizer("")["input_ids"])  # special tokens that it puts first
    text = policy.tokenizer.decode(prompt[added:])
    return text if policy.tokenizer(text)["input_ids"] == prompt else None
