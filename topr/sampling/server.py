"""Sampling on servers of vLLM or SGLang, through the `openai` client; token ids are exchanged."""

import asyncio
import warnings
from itertools import cycle
from typing import Any

import numpy as np
import openai
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt, restricted_string_type

from topr.io import InputError, first_line
from topr.sampling.base import Response, Sampler, end_of_response

Url: Any = restricted_string_type("Url", "https?://.+")


class ServerSampler(Sampler):
    """Samples on servers of vLLM or SGLang, for `predict`.

    A server that serves another policy goes undetected. Each response is a request with its own
    seed. Responses whose token ids are uncertain are dropped, with a warning.

    Args:
        url: address up to and including /v1, or several addresses, which share the requests.
        model: the policy's name on the servers; by default the one that they serve.
        concurrency: requests at once over all servers, for each process.
        timeout: seconds until a request is sent again. It is never given up at once, because that
            would make long responses rarer.
        retries: how often a request is sent again, to the same server.
    """

    in_process = False

    def __init__(
        self,
        url: Url | list[Url],
        model: str = "",
        concurrency: PositiveInt = 64,
        timeout: PositiveFloat = 600.0,
        retries: NonNegativeInt = 6,
    ):
        self.urls = [url] if isinstance(url, str) else url
        self.model = model
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries

    def sample(self, policy, prompts, n, sampling, seed, prompt_indices=()) -> list[list[Response]]:
        requests = []
        for prompt, index in zip(prompts, prompt_indices or range(len(prompts)), strict=True):
            for word in np.random.SeedSequence((seed, index)).generate_state(n):
                requests.append((prompt, int(word) >> 1))  # servers take seeds of 31 bits
        try:
            responses = asyncio.run(self.respond_to_all(policy, sampling, requests))
        except openai.APIError as error:
            why = error.body or first_line(error.__cause__ or error)
            raise InputError(f"{error.request.url} fails: {why}") from error

        if dropped := responses.count(None):
            message = f"{dropped} of {len(responses)} responses dropped: token ids unclear, or cut"
            warnings.warn(f"{message}; give room for prompt and max_new_tokens", stacklevel=2)
        certain = []
        for start in range(0, len(responses), n):
            certain.append([response for response in responses[start : start + n] if response])
        return certain

    async def respond_to_all(self, policy, sampling, requests) -> list[Response | None]:
        """A response to each prompt and seed; None if its token ids are uncertain."""
        slots = asyncio.Semaphore(self.concurrency)
        async with openai.DefaultAsyncHttpxClient() as http:
            clients = [self.client(url, http) for url in self.urls]
            responses = []
            for (prompt, seed), client in zip(requests, cycle(clients), strict=False):
                responses.append(self.respond(client, slots, policy, sampling, prompt, seed))
            return await asyncio.gather(*responses)

    def client(self, url, http):
        return openai.AsyncOpenAI(
            base_url=url,
            api_key="none",
            max_retries=self.retries,
            timeout=openai.Timeout(self.timeout, connect=30.0),
            http_client=http,
        )

    async def respond(self, client, slots, policy, sampling, prompt, seed) -> Response | None:
        async with slots:
            completion = await client.completions.create(
                model=self.model,
                prompt=prompt,
                seed=seed,
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop=sampling.stop,
                # With defaults, too, which a server would take from the model.
                extra_body={
                    "top_k": sampling.top_k or -1,
                    "min_p": 0.0,
                    "repetition_penalty": 1.0,
                    "skip_special_tokens": False,
                    "return_token_ids": True,
                    "stop_token_ids": sorted(policy.end_tokens),
                },
            )
        ids = getattr(completion.choices[0], "token_ids", None)
        read = completion.usage.prompt_tokens, completion.usage.completion_tokens
        if not ids or read != (len(prompt), len(ids)):
            return None
        ended = end_of_response(policy, sampling)
        for length in range(1, len(ids) + 1):
            if ended(ids[:length]):
                return Response(ids[:length], ids[length - 1] in policy.end_tokens)
        return None
