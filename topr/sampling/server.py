"""Sampling on servers of vLLM or SGLang, through the `openai` client; token ids are exchanged."""

import asyncio
import threading
import warnings
from functools import cached_property

import numpy as np
import openai
from jsonargparse.typing import PositiveInt

from topr.io import InputError, explained
from topr.sampling.base import Response, Sampler
from topr.sampling.local import end_of_response

RETRIES = 6  # of a request that fails, or has no reply within the client's ten minutes


class ServerSampler(Sampler):
    """Samples on servers of vLLM or SGLang, for `predict` and evaluate.py.

    Each response is a request with its own seed. A server that does not answer is left out while
    another one does. `trajectories.scoring.score` compares the log-probs of the servers with those
    of the policy.

    Args:
        url: address up to and including /v1, or a list of them.
        concurrency: requests at once, for each process.
    """

    in_process = False

    def __init__(self, url: str | list[str], concurrency: PositiveInt = 64):
        self.urls = [url] if isinstance(url, str) else url
        self.concurrency = concurrency

    def sample(self, *arguments) -> list[list[Response]]:
        return self.begin(*arguments)()

    def begin(self, policy, prompts, n, sampling, seed, prompt_indices=()):
        requests = []
        for prompt, index in zip(prompts, prompt_indices or range(len(prompts)), strict=True):
            for word in np.random.SeedSequence((seed, index)).generate_state(n):
                requests.append((prompt, int(word) >> 1))  # servers take seeds of 31 bits
        begun = asyncio.run_coroutine_threadsafe(
            self.respond_to_all(policy, sampling, requests), self.loop
        )

        def finish():
            responses = begun.result()
            return [responses[start : start + n] for start in range(0, len(responses), n)]

        return finish

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Runs in a thread of its own, which ends with the process."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self.slots = asyncio.Semaphore(self.concurrency)
        self.clients = [
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=RETRIES)
            for url in self.urls
        ]
        return loop

    async def respond_to_all(self, policy, sampling, requests) -> list[Response]:
        """A response to each prompt and seed."""
        return await asyncio.gather(*[self.respond(policy, sampling, *one) for one in requests])

    async def respond(self, policy, sampling, prompt, seed) -> Response:
        """A response by one of the servers that answer."""
        async with self.slots:
            while True:
                client = self.clients[seed % len(self.clients)]
                with explained(
                    f"sampling on {client.base_url} fails",
                    remedy="see to the server, then start again",
                ):
                    try:
                        return await self.request(client, policy, sampling, prompt, seed)
                    except openai.APIConnectionError:
                        if self.clients == [client]:
                            raise
                        if client in self.clients:
                            self.clients.remove(client)
                            warnings.warn(
                                f"{client.base_url} does not answer and is left out", stacklevel=1
                            )

    async def request(self, client, policy, sampling, prompt, seed) -> Response:
        """A response by one server."""
        completion = await client.completions.create(
            model="",  # the one that it serves
            prompt=prompt,
            seed=seed,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=sampling.stop,
            logprobs=1,
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
        (choice,) = completion.choices
        ids = getattr(choice, "token_ids", None) or []
        log_probs = choice.logprobs.token_logprobs if choice.logprobs else []
        read = completion.usage.prompt_tokens, completion.usage.completion_tokens
        ended = end_of_response(policy, sampling)
        for length in range(1, len(ids) + 1):
            if ended(ids[:length]) and read == (len(prompt), len(ids)):
                finished = ids[length - 1] in policy.end_tokens
                return Response(ids[:length], finished, tuple(log_probs[:length]))
        raise InputError(
            f"{client.base_url} returns no token ids, or cuts a response off",
            "give it room for the prompt and max_new_tokens",
        )
