"""Completions from OpenAI-compatible servers: bounded and repeated requests, and the token ids behind an answer."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from topr.io import InputError, check_counts, first_line

REPEATABLE = (408, 409, 429)  # and every status from 500 on: the server may do better next time
COUNT, CLOSED = "they were tokenised otherwise or cut", "the text does not tell its tokens"


class Servers:
    """Servers of one model that share the requests: each request goes to the one with the fewest under way.

    Args:
        urls: up to and with /v1.
        model: name under which the servers know the model; None asks each of them for the only one it has.
        concurrency: requests at once over all servers.
        timeout: seconds until a request counts as failed.
        retries: how often a failed request is sent again, to another server where there is one.

    Raises:
        InputError: a value lies outside its range.
    """

    def __init__(self, urls: list[str], model: str | None, concurrency: int, timeout: float, retries: int):
        check_counts("ServerSampler: ", concurrency=concurrency)
        check_counts("ServerSampler: ", least=0, retries=retries)
        if not timeout > 0:
            raise InputError(f"ServerSampler: timeout is {timeout}; it must be above 0 seconds")
        urls = [url.rstrip("/") for url in urls]
        wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
        if not urls or wrong or len(set(urls)) < len(urls):
            raise InputError(f"ServerSampler: url {wrong or urls} must name each server once, as http://host:8000/v1")
        self.urls, self.models = urls, dict.fromkeys(urls, model)
        self.concurrency, self.timeout, self.retries = concurrency, timeout, retries
        self.jitter = random.Random()  # its own: the process's generators are left as they were

    def complete(self, bodies: list[dict], read: Callable[[int, str, Any], Any]) -> list:
        """POST every body to /completions.

        Args:
            bodies: the requests, without `model`.
            read: called with the number of a request, the url of its server and its answer as soon as that is there.

        Returns:
            What `read` returned, in the order of the bodies.

        Raises:
            InputError: a server refuses a request, or fails as often as `retries` allows, or `read` raises one; the
                requests under way are given up.
        """
        return asyncio.run(self._complete(bodies, read))

    async def _complete(self, bodies: list[dict], read: Callable[[int, str, Any], Any]) -> list:
        import httpx2

        self.active, self.sent = Counter(), Counter()
        results, waiting = [None] * len(bodies), iter(enumerate(bodies))
        # the pool is as large as the number of requests at once, so none waits in it
        limits = httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        timeout = httpx2.Timeout(self.timeout, connect=min(self.timeout, 30.0))
        async with httpx2.AsyncClient(limits=limits, timeout=timeout) as client:

            async def work() -> None:
                for number, body in waiting:
                    results[number] = read(number, *await self._request(client, self.urls, body))

            for url in self.urls:
                self.models[url] = self.models[url] or await self._only_model(client, url)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.concurrency, len(bodies))):
                        group.create_task(work())
            except ExceptionGroup as failures:  # by now the others are cancelled
                raise failures.exceptions[0] from None
        return results

    async def _only_model(self, client, url: str) -> str:
        _, answer = await self._request(client, [url], None)
        try:
            names = [model["id"] for model in answer["data"]]
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{url}/models lists no models; is {url} the address of an OpenAI-compatible server?"
            ) from error
        if len(names) != 1:
            raise InputError(
                f"{url} serves {', '.join(names) or 'no model that it lists'}; name the policy's with "
                "model.sampler.init_args.model"
            )
        return names[0]

    async def _request(self, client, urls: list[str], body: dict | None) -> tuple[str, Any]:
        """The url that answered and its answer, to a completion or, without a body, to the list of models."""
        import httpx2

        failed, why = None, ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(30.0, 0.5 * 2 ** (attempt - 1)) * self.jitter.uniform(0.5, 1.5))
            url = min(urls, key=lambda url: (url == failed, self.active[url], self.sent[url]))
            self.active[url] += 1
            self.sent[url] += 1
            try:
                if body is None:
                    reply = await client.get(f"{url}/models")
                else:
                    reply = await client.post(f"{url}/completions", json={"model": self.models[url], **body})
                if reply.is_success:
                    return url, reply.json()
            except httpx2.TransportError as error:
                slow = isinstance(error, httpx2.TimeoutException)
                why = f"no answer within {self.timeout:g} s" if slow else f"{type(error).__name__}: {first_line(error)}"
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
                raise InputError(f"{url} gives no JSON ({first_line(error)}); check the sampler's url") from error
            else:
                why = f"status {reply.status_code}: {_message(reply)}"
                if reply.status_code not in REPEATABLE and reply.status_code < 500:
                    raise InputError(
                        f"{reply.url} refuses the request with {why}; check url, model and flavour of the sampler"
                    )
            finally:
                self.active[url] -= 1
            failed = url
        raise InputError(
            f"{failed} failed {self.retries + 1} times, at last with {why}; see whether the server runs, raise the "
            "sampler's timeout or retries, or lower its concurrency"
        )


def _message(reply) -> str:
    """The server's own words; each kind of server puts them elsewhere."""
    try:
        answer = reply.json()
        error = answer.get("error")
        found = (error.get("message") if isinstance(error, dict) else error) or answer.get("message")
        found = found or answer.get("detail")
    except (ValueError, AttributeError):
        found = None
    return " ".join(str(found or reply.text or reply.reason_phrase).split())[:300]


class TokenIds:
    """vLLM and SGLang: token ids go out and come back, so that nothing is tokenised twice."""

    remedy = "serve the very policy, with room for its prompts and max_new_tokens in the server's context"

    def __init__(self, tokenizer, ends: set[int], top_k: int, stop: list[str]):
        # everything that a server could fill in with a default, or with the model's generation config
        self.fields = {
            "top_k": top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "ignore_eos": False,
            "stop": stop,
            "stop_token_ids": sorted(ends),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def request(self, prompt: list[int]) -> dict[str, Any] | None:
        """The fields of a request that depend on the flavour; None if the prompt cannot be sent."""
        return {"prompt": prompt, **self.fields}

    def ids(self, choice: dict[str, Any]) -> list[int] | str | None:
        """The sampled ids; a text says why they cannot be told; None: the server left them out."""
        return choice.get("token_ids")


class Text:
    """Any OpenAI-compatible server: texts go out and come back, and whatever is not certain about ids is dropped."""

    remedy = "serve the very policy; where its texts do not tell their tokens, use vLLM or SGLang, which return ids"

    def __init__(self, tokenizer, ends: set[int], top_k: int, stop: list[str]):
        if top_k or stop:
            name, off = ("top_k", "0") if top_k else ("stop", "[]")
            raise InputError(
                f"flavour openai cannot sample with data.sampling.{name}, which these servers ignore or apply unseen; "
                f"set data.sampling.{name} to {off}, or use flavour vllm or sglang with such a server"
            )
        self.tokenizer, self.ends = tokenizer, ends

    def request(self, prompt: list[int]) -> dict[str, Any] | None:
        added = self.tokenizer("")["input_ids"]  # the server's tokenizer will add them by itself
        for start in (len(added), 0) if added and prompt[: len(added)] == added else (0,):
            text = self.tokenizer.decode(prompt[start:])
            if self.tokenizer(text)["input_ids"] == prompt:
                return {"prompt": text}
        return None

    def ids(self, choice: dict[str, Any]) -> list[int] | str | None:
        text = choice["text"]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.decode(ids) != text or self.ends & set(ids):
            return CLOSED
        # "length" can hide an end token in the last place, or another special one: their number then gives it away
        return ids + [self.tokenizer.eos_token_id] if choice["finish_reason"] == "stop" else ids


FLAVOURS = {"vllm": TokenIds, "sglang": TokenIds, "openai": Text}
