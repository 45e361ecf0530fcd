"""Sampling on OpenAI-compatible servers, through the `openai` client."""

import asyncio
import warnings
from typing import Any, Literal

import numpy as np
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from topr.io import InputError, first_line
from topr.policy import Policy
from topr.sampling.base import Ids, Response, Sampler, Sampling, end_of_response, first_end


class ServerSampler(Sampler):
    """Samples on OpenAI-compatible servers, for `predict`; a server that serves another policy goes undetected.

    Each response is a request with its own seed. Responses whose token ids are not certain are dropped, with a warning.

    Args:
        url: address up to and including /v1, or several addresses, which share the requests.
        flavour: `vllm` and `sglang` exchange token ids; `openai`, text (top_k 0, no stop, one end token), so that it
            drops responses whose number of tokens changes when they are tokenised again.
        model: the policy's name on the servers; by default the only one that a server lists.
        concurrency: requests at once over all servers, for each process.
        timeout: seconds until a request is sent again; to drop it would make long responses rarer.
        retries: how often a request is sent again, to the same server.
    """

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
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise InputError(
                f"ServerSampler: url {url!r}, expected addresses like http://host:8000/v1"
            )
        self.model, self.concurrency, self.timeout, self.retries = (
            model,
            concurrency,
            timeout,
            retries,
        )
        self.exchanges_text = flavour == "openai"
        self.usable = False  # whether any response was usable

    def sample(self, policy, prompts, n, sampling, seed, numbers=()) -> list[list[Response]]:
        import openai  # not at the top: it takes half a second

        if self.exchanges_text and (sampling.top_k or sampling.stop):
            raise InputError(
                "flavour openai needs data.sampling.top_k 0 and stop []; set them, or use vllm or sglang"
            )
        numbers = numbers or range(len(prompts))
        words = [
            np.random.SeedSequence((seed, number)).generate_state(n) >> 1 for number in numbers
        ]  # 31 bits
        requests = [
            (prompt, int(word)) for prompt, row in zip(prompts, words, strict=True) for word in row
        ]
        try:
            results = asyncio.run(self._request(policy, requests, sampling))
        except openai.APIError as error:
            why = first_line(error.__cause__) if error.__cause__ else error.body or error
            remedy = "check that the server runs and the sampler's url, model and flavour; or raise timeout or retries"
            raise InputError(f"{error.request.url} fails: {why}; {remedy}") from error
        dropped = results.count(None)
        self.usable = self.usable or dropped < len(results)
        if dropped:
            remedy = "give it room for prompt and max_new_tokens, or use vLLM or SGLang"
            reason = "the server cut them, or their text has no certain tokens"
            message = f"{dropped} of {len(results)} responses of {', '.join(self.urls)} dropped: {reason}; {remedy}"
            if not self.usable:
                raise InputError(message)
            warnings.warn(message, stacklevel=2)
        return [
            [found for found in results[i * n : (i + 1) * n] if found] for i in range(len(prompts))
        ]

    async def _request(
        self, policy: Policy, requests: list, sampling: Sampling
    ) -> list[Response | None]:
        """A response to each (prompt, seed); None if its token ids are not certain."""
        import openai

        options: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
        }
        options |= {"top_p": sampling.top_p, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if (
            not self.exchanges_text
        ):  # fields of vLLM and SGLang, whose defaults may come from the model
            body = {
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "min_tokens": 0,
            }
            body |= {"ignore_eos": False, "skip_special_tokens": False, "return_token_ids": True}
            options["extra_body"] = body | {"stop_token_ids": sorted(policy.end_tokens)}
            options["stop"] = sampling.stop
        ended = end_of_response(policy, sampling)
        slots: asyncio.Queue = asyncio.Queue()  # a server for each request at once

        async def respond(prompt: Ids, seed: int) -> Response | None:
            if (encoded := _to_text(policy, prompt) if self.exchanges_text else prompt) is None:
                return None
            client, model = await slots.get()
            completion = await client.completions.create(
                model=model, prompt=encoded, seed=seed, **options
            )
            slots.put_nowait((client, model))
            try:
                choice, usage = completion.choices[0], completion.usage
                ids: Any = _from_text(policy, choice) if self.exchanges_text else choice.token_ids
                certain = ids and (usage.prompt_tokens, usage.completion_tokens) == (
                    len(prompt),
                    len(ids),
                )
            except (AttributeError, IndexError, TypeError) as error:
                remedy = "use vLLM, SGLang or flavour openai"
                raise InputError(
                    f"{client.base_url} answers without choices, usage or token ids; {remedy}"
                ) from error
            length = first_end(ids, ended) if certain else None
            self.progress.advance(1, length or 0)
            return Response(ids[:length], ids[length - 1] in policy.end_tokens) if length else None

        async with openai.DefaultAsyncHttpxClient() as http:
            timeout, servers = openai.Timeout(self.timeout, connect=30.0), []
            settings: Any = {
                "api_key": "none",
                "max_retries": self.retries,
                "timeout": timeout,
                "http_client": http,
            }
            for url in self.urls:
                client = openai.AsyncOpenAI(base_url=url, **settings)
                names = (
                    [self.model]
                    if self.model
                    else [model.id async for model in client.models.list()]
                )
                if len(names) != 1:
                    raise InputError(
                        f"{url} lists the models {names}; choose one by model.sampler.init_args.model"
                    )
                servers.append((client, names[0]))
            for k in range(self.concurrency):
                slots.put_nowait(servers[k % len(servers)])
            return await asyncio.gather(*(respond(prompt, seed) for prompt, seed in requests))


def _to_text(policy: Policy, prompt: Ids) -> str | None:
    """The text that a server's tokenizer turns into these ids; None if there is none."""
    text = policy.tokenizer.decode(
        prompt[len(policy.tokenizer("")["input_ids"]) :]
    )  # without special tokens
    return text if policy.tokenizer(text)["input_ids"] == prompt else None


def _from_text(policy: Policy, choice: Any) -> Ids | None:
    """The token ids of a response; None if they are not certain."""
    ids = policy.tokenizer(choice.text, add_special_tokens=False)["input_ids"]
    if policy.tokenizer.decode(ids) != choice.text or policy.end_tokens & set(ids):
        return None
    # "length" can hide an end token in the last place; the number of tokens then differs
    return ids + [policy.tokenizer.eos_token_id] * (choice.finish_reason == "stop")
