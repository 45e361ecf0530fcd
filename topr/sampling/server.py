"""Sampling on a server of vLLM or SGLang, through the `openai` client; token ids are exchanged."""

import asyncio

import numpy as np
import openai
from jsonargparse.typing import PositiveInt

from topr.io import InputError, first_line
from topr.sampling.base import Response, Sampler
from topr.sampling.local import end_of_response

RETRIES = 6  # of a request that fails, or has no reply within the client's ten minutes


class ServerSampler(Sampler):
    """Samples on a server of vLLM or SGLang, for `predict`.

    A server that serves another policy goes undetected. Each response is a request with its own
    seed.

    Args:
        url: address up to and including /v1.
        concurrency: requests at once, for each process.
    """

    in_process = False

    def __init__(self, url: str, concurrency: PositiveInt = 64):
        self.url = url
        self.concurrency = concurrency

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
        return [responses[start : start + n] for start in range(0, len(responses), n)]

    async def respond_to_all(self, policy, sampling, requests) -> list[Response]:
        """A response to each prompt and seed."""
        slots = asyncio.Semaphore(self.concurrency)
        client = openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=RETRIES)
        async with client:
            calls = [self.respond(client, slots, policy, sampling, *one) for one in requests]
            return await asyncio.gather(*calls)

    async def respond(self, client, slots, policy, sampling, prompt, seed) -> Response:
        async with slots:
            completion = await client.completions.create(
                model="",  # the one that it serves
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
        ids = getattr(completion.choices[0], "token_ids", None) or []
        read = completion.usage.prompt_tokens, completion.usage.completion_tokens
        ended = end_of_response(policy, sampling)
        for length in range(1, len(ids) + 1):
            if ended(ids[:length]) and read == (len(prompt), len(ids)):
                return Response(ids[:length], ids[length - 1] in policy.end_tokens)
        raise InputError(
            f"{self.url} returns no token ids, or cuts a response off",
            "give it room for the prompt and max_new_tokens",
        )
