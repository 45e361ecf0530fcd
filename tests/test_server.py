"""Sampling on servers: a fake one shows how requests, failures and uncertain responses end; a real one is slow."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_policy

from topr.io import InputError
from topr.policy import load_policy
from topr.sampling import LocalSampler, Response, Sampling, ServerSampler

END = 1  # of the arithmetic tokenizer
PROMPTS = [[5, 6], [7], [8, 9, 10, 11]]
SAMPLING = Sampling(temperature=0.7, top_k=9, top_p=0.8, max_new_tokens=6)
OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=6)


@pytest.fixture(scope="module")
def loaded(policy):
    return load_policy(str(policy))


@pytest.fixture
def serve():
    """Start servers: `reply(body, number)` gives the status and JSON of a completion, or raises a ConnectionError."""
    started = []

    def serve(reply, models=("policy",)) -> SimpleNamespace:
        fake, lock = SimpleNamespace(bodies=[], active=0, most=0), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.send(200, {"data": [{"id": name} for name in models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions"
                with lock:
                    number = len(fake.bodies)
                    fake.bodies.append(body)
                    fake.active += 1
                    fake.most = max(fake.most, fake.active)
                try:
                    answer = reply(body, number)
                except ConnectionError:
                    self.close_connection = True
                    return
                finally:
                    with lock:
                        fake.active -= 1
                self.send(*answer)

            def send(self, status, payload):
                data = json.dumps(payload).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.send_header("Retry-After-Ms", "1")
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client has left
                    self.close_connection = True

        class Server(ThreadingHTTPServer):
            request_queue_size, daemon_threads = 256, True

        started.append(Server(("127.0.0.1", 0), Handler))
        fake.url = f"http://127.0.0.1:{started[-1].server_port}/v1"
        threading.Thread(target=started[-1].serve_forever, args=(0.05,), daemon=True).start()
        return fake

    yield serve
    for server in started:
        server.shutdown()
        server.server_close()


def answer(body, ids, count=None, **choice):
    """What vLLM returns: the end token stays in the ids and is counted."""
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": len(ids) if count is None else count,
    }
    reason = "stop" if END in ids else "length"
    return 200, {
        "choices": [{"text": "", "finish_reason": reason, "token_ids": ids} | choice],
        "usage": usage,
    }


def drawn(body) -> list[int]:
    """Ids that depend on the request's seed and prompt; about half of them end early."""
    rng = random.Random(f"{body['seed']} {body['prompt']}")
    ids = [
        rng.choice([END, *range(3, 12)]) if rng.random() < 0.5 else 3
        for _ in range(body["max_tokens"])
    ]
    return ids[: ids.index(END) + 1] if END in ids else ids


def vllm(body, number):
    return answer(body, drawn(body))


def sampler_of(*servers, **options) -> ServerSampler:
    return ServerSampler([server.url for server in servers], **options)


@contextmanager
def complete():
    """No response is dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_responses_are_the_ids_that_the_server_sampled(serve, loaded):
    server = serve(vllm)
    sampler = sampler_of(server, concurrency=5)
    state = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with complete():
        responses = sampler.sample(loaded, PROMPTS, 8, SAMPLING, 3)
    assert state == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    for prompt, found in zip(PROMPTS, responses, strict=True):
        expected = [drawn(body) for body in server.bodies if body["prompt"] == prompt]
        assert (
            sorted(found) == sorted(Response(ids, END in ids) for ids in expected)
            and len(found) == 8
        )
    assert {response.finished for found in responses for response in found} == {True, False}
    assert len({body["seed"] for body in server.bodies}) == 24
    sglang = sampler_of(server, flavour="sglang")
    assert responses == sglang.sample(loaded, PROMPTS, 8, SAMPLING, 3)
    assert responses != sglang.sample(loaded, PROMPTS, 8, SAMPLING, 4)


def test_no_parameter_is_left_to_the_servers_defaults(serve, loaded):
    server = serve(lambda body, number: answer(body, [3] * 6))
    sampling = Sampling(temperature=0.7, top_k=0, top_p=0.8, max_new_tokens=6, stop=["\n\n"])
    sampler_of(server).sample(loaded, [[5, 6]], 1, sampling, 0)
    sampler_of(server, model="mine").sample(loaded, [[5, 6]], 1, SAMPLING, 0)
    seeds = [body.pop("seed") for body in server.bodies]
    assert all(0 <= seed < 2**31 for seed in seeds)
    expected = {
        "model": "policy", "prompt": [5, 6], "max_tokens": 6, "temperature": 0.7, "top_p": 0.8, "top_k": -1,
        "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0,
        "ignore_eos": False, "stop": ["\n\n"], "stop_token_ids": [END], "skip_special_tokens": False,
        "return_token_ids": True,
    }  # fmt: skip
    assert server.bodies == [expected, expected | {"model": "mine", "top_k": 9, "stop": []}]


def test_a_response_ends_at_its_first_end_token_or_with_its_stop_string(serve, loaded):
    ids = loaded.tokenizer("12=3;")["input_ids"]
    stopped, beyond = (
        serve(lambda body, number: answer(body, ids, text="12=")),
        serve(lambda body, number: answer(body, [3, END, 4])),
    )
    sampling = Sampling(1.0, 0, 1.0, 6, stop=["3;"])
    with complete():
        assert sampler_of(stopped).sample(loaded, PROMPTS[:1], 1, sampling, 0) == [
            [Response(ids, False)]
        ]
        sampling.stop = ["2="]  # whole tokens, the rest was sampled after the end
        assert sampler_of(stopped).sample(loaded, PROMPTS[:1], 1, sampling, 0) == [
            [Response(ids[:3], False)]
        ]
        assert sampler_of(beyond).sample(loaded, PROMPTS[:1], 1, OPEN, 0) == [
            [Response([3, END], True)]
        ]


def test_failures_that_may_pass_are_retried_and_no_response_is_dropped(serve, loaded):
    seen = Counter()

    def reply(body, number):
        seen[body["seed"]] += 1
        if seen[body["seed"]] == 1:
            kind = body["seed"] % 4
            if kind == 0:
                raise ConnectionResetError
            if kind == 1:
                time.sleep(2.0)  # longer than the client waits
            if kind == 2:
                return 503, {"error": {"message": "busy"}}
        return vllm(body, number)

    server = serve(reply)
    with complete():
        responses = sampler_of(server, timeout=1.0, retries=3).sample(
            loaded, PROMPTS, 7, SAMPLING, 0
        )
    assert [len(found) for found in responses] == [7, 7, 7]
    assert {seed % 4 for seed in seen} == set(range(4))
    assert all(count >= 2 for seed, count in seen.items() if seed % 4 < 3)


def test_a_rejected_request_ends_at_once_in_one_sentence_with_the_servers_words(serve, loaded):
    def reply(body, number):
        if number == 3:
            return 400, {"error": {"message": "prompt is too long"}}
        time.sleep(20.0)
        return vllm(body, number)

    server, start = serve(reply), time.monotonic()
    with pytest.raises(InputError) as error:
        sampler_of(server, concurrency=4).sample(loaded, PROMPTS, 10, SAMPLING, 0)
    assert (
        time.monotonic() - start < 10.0 and len(server.bodies) < 10
    )  # those under way are cancelled
    message = str(error.value)
    assert f"{server.url}/completions fails: " in message and "prompt is too long" in message
    assert "check that the server runs and the sampler's url, model and flavour" in message


def test_a_server_that_keeps_failing_or_is_absent_ends_in_one_sentence(serve, loaded):
    server = serve(lambda body, number: (503, {"error": {"message": "loading"}}))
    with pytest.raises(InputError, match="fails: .*loading.*raise timeout or retries"):
        sampler_of(server, retries=2).sample(loaded, PROMPTS[:1], 1, SAMPLING, 0)
    assert len(server.bodies) == 3
    slow = serve(lambda body, number: time.sleep(0.5) or vllm(body, number))
    with pytest.raises(InputError, match=f"{slow.url}/completions fails: ReadTimeout; check"):
        sampler_of(slow, retries=0, timeout=0.2).sample(loaded, PROMPTS[:1], 1, SAMPLING, 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(InputError, match=f"{url}/completions fails: .*connection attempts failed"):
        ServerSampler(url, retries=0, model="policy").sample(loaded, PROMPTS[:1], 1, SAMPLING, 0)


def test_servers_share_the_requests_and_their_number_at_once_is_bounded(serve, loaded):
    def together(full: threading.Barrier):
        def reply(body, number):
            if number < 3:  # a busy machine may take its time to fill the server
                full.wait(30)
            time.sleep(0.02)
            return vllm(body, number)

        return reply

    servers = [serve(together(threading.Barrier(3))) for _ in range(2)]
    sampler_of(*servers, concurrency=6).sample(loaded, PROMPTS, 10, SAMPLING, 0)
    assert [server.most for server in servers] == [3, 3]
    assert sum(len(server.bodies) for server in servers) == 30 and all(
        len(server.bodies) >= 8 for server in servers
    )


def test_uncertain_responses_are_dropped_and_counted(serve, loaded):
    def reply(body, number):
        kinds = {
            1: answer(body, [3, 4, END], count=4),
            2: answer(body, [3, 4, 5]),  # neither ended nor as long as requested
            3: answer(body, []),
            4: answer(body, [3, 4, END], token_ids=None),
        }
        return kinds.get(number, answer(body, [3, 4, END]))

    server = serve(reply)
    sampler = sampler_of(server, concurrency=1)
    with pytest.warns(UserWarning, match=f"4 of 9 responses of {server.url} dropped") as caught:
        responses = sampler.sample(loaded, PROMPTS, 3, SAMPLING, 0)
    assert [len(found) for found in responses] == [1, 1, 3] and len(caught) == 1


def test_a_server_that_never_returns_a_usable_response_is_an_error(serve, loaded):
    cut = serve(lambda body, number: answer(body, [3, 4]))
    with pytest.raises(
        InputError, match="9 of 9 responses .*give it room for prompt and max_new_tokens"
    ):
        sampler_of(cut).sample(loaded, PROMPTS, 3, SAMPLING, 0)
    for payload in ({"choices": [{"text": "12"}], "usage": {}}, {"choices": []}, [], "<html>"):
        odd = serve(lambda body, number, payload=payload: (200, payload))
        with pytest.raises(
            InputError, match=f"{odd.url}/ answers without choices, usage or token ids; use vLLM"
        ):
            sampler_of(odd).sample(loaded, PROMPTS, 1, SAMPLING, 0)
    # but the last batch of a long run may be unlucky
    turns = serve(lambda body, number: answer(body, [3, END], count=2 + number))
    sampler = sampler_of(turns)
    assert sampler.sample(loaded, PROMPTS[:1], 1, SAMPLING, 0) == [[Response([3, END], True)]]
    with pytest.warns(UserWarning, match="1 of 1"):
        assert sampler.sample(loaded, PROMPTS[:1], 1, SAMPLING, 0) == [[]]


@pytest.mark.parametrize("models", [("a", "b"), ()])
def test_the_model_must_be_clear(serve, loaded, models):
    server = serve(vllm, models=models)
    with pytest.raises(
        InputError, match=r"lists the models \[.*\]; choose one by model.sampler.init_args.model"
    ):
        sampler_of(server).sample(loaded, PROMPTS, 1, SAMPLING, 0)
    assert sampler_of(server, model="b").sample(loaded, PROMPTS, 1, SAMPLING, 0)
    assert {body["model"] for body in server.bodies} == {"b"}


@pytest.mark.parametrize("wrong", ["127.0.0.1:8000", []])
def test_wrong_addresses_are_rejected(wrong):
    ServerSampler(["http://127.0.0.1:8000/v1"])
    with pytest.raises(InputError, match="expected addresses like"):
        ServerSampler(wrong)


def texts(tokenizer, ids, reason):
    """A server of text, which leaves special tokens out of it."""

    def reply(body, number):
        usage = {
            "prompt_tokens": len(tokenizer(body["prompt"])["input_ids"]),
            "completion_tokens": len(ids),
        }
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return 200, {"choices": [{"text": text, "finish_reason": reason}], "usage": usage}

    return reply


@pytest.mark.parametrize(
    "ids, reason, kept",
    [
        ([3, 4, END], "stop", True),
        ([3, 4, 5, 6, 7, 8], "length", True),
        ([3, 4, 5, 6, 7, END], "length", False),  # the last token may be any hidden one
        ([3, 0, 4, END], "stop", False),
        ([3, 4], "length", False),
    ],
)
def test_text_becomes_ids_only_where_that_is_certain(serve, loaded, ids, reason, kept):
    server = serve(texts(loaded.tokenizer, ids, reason))
    sampler = sampler_of(server, flavour="openai")
    sampler.usable = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = sampler.sample(loaded, PROMPTS[:1], 1, OPEN, 0)
    assert (found, len(caught)) == (([[Response(ids, END in ids)]], 0) if kept else ([[]], 1))
    (body,) = server.bodies  # no field that such servers reject
    assert set(body) == {
        "model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"
    }  # fmt: skip


def test_a_spelled_end_token_ends_no_response(serve, loaded):
    spelled = serve(
        lambda body, number: (
            200,
            {
                "choices": [{"text": "1<eos>2345", "finish_reason": "length"}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 6},
            },
        )
    )
    with pytest.raises(InputError, match="their text has no certain tokens"):
        sampler_of(spelled, flavour="openai").sample(loaded, PROMPTS[:1], 1, OPEN, 0)


def test_prompts_reach_servers_of_text_as_the_same_ids(serve, loaded, tmp_path):
    from tokenizers.processors import TemplateProcessing

    special = load_policy(
        str(make_policy(tmp_path / "base"))
    )  # its tokenizer, and the server's, add an end token
    template = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    special.tokenizer.backend_tokenizer.post_processor = template
    server = serve(texts(special.tokenizer, [3, END], "stop"))
    with pytest.warns(UserWarning, match="2 of 4"):  # no text has the ids of the second prompt
        found = sampler_of(server, flavour="openai").sample(
            special, [[END, 5, 6], [5, 6]], 2, OPEN, 0
        )
    assert [len(responses) for responses in found] == [2, 0] and {
        body["prompt"] for body in server.bodies
    } == {"23"}
    other = serve(
        texts(loaded.tokenizer, [3, END], "stop")
    )  # it adds no token, hence reads another prompt
    with pytest.raises(InputError, match="1 of 1"):
        sampler_of(other, flavour="openai").sample(special, [[END, 5, 6]], 1, OPEN, 0)
    assert sampler_of(other, flavour="openai").sample(loaded, [[5, 6]], 1, OPEN, 0) == [
        [Response([3, END], True)]
    ]


@pytest.mark.parametrize("wrong", [{"top_k": 5}, {"stop": ["x"]}])
def test_servers_of_text_take_neither_top_k_nor_stop(serve, loaded, wrong):
    sampler = sampler_of(serve(texts(loaded.tokenizer, [3, END], "stop")), flavour="openai")
    right = {"top_k": 0, "max_new_tokens": 6}
    assert sampler.sample(loaded, PROMPTS[:1], 1, Sampling(**right), 0)
    with pytest.raises(InputError, match="vllm or sglang"):
        sampler.sample(loaded, PROMPTS[:1], 1, Sampling(**right | wrong), 0)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """`transformers serve` with a tiny policy: the policy's folder and the server's url."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("transformers[serving] is not installed")
    folder = tmp_path_factory.mktemp("serve")
    policy = make_policy(folder / "base", scale=0.35)
    settings = (
        policy / "generation_config.json"
    )  # without these two it is greedy, or keeps to 50 tokens
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"do_sample": True, "top_k": 0})
    )
    (folder / "home" / "hub").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "home"),
    }
    command = [
        Path(sys.executable).with_name("transformers"),
        "serve",
        policy,
        "--host",
        "127.0.0.1",
    ]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [*map(str, command), "--port", str(port), "--device", "cpu"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        while process.poll() is None:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                    f"http://127.0.0.1:{port}/health"
                )
                break
            except OSError:
                time.sleep(0.1)
        assert process.poll() is None, (folder / "log").read_text()
        yield policy, f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_real_server_samples_from_the_policys_distribution(real):
    folder, url = real
    policy = load_policy(str(folder))
    sampling, n = (
        Sampling(2.0, 0, 1.0, 1),
        300,
    )  # flat: a forgotten temperature or a cut tail would show
    with torch.no_grad():
        probability = (
            (policy.logits(torch.tensor(PROMPTS[:1]))[0, -1].double() / 2).softmax(-1).numpy()
        )
    visible = np.arange(
        3, len(probability)
    )  # text hides the special tokens, of which a single one is never certain
    # one at a time: the server draws from one generator, and then its seeds repeat
    server = ServerSampler(url, flavour="openai", model=str(folder), concurrency=1)
    ((*sampled,),) = server.sample(policy, PROMPTS[:1], n, sampling, 0)
    hidden = 1 - probability[visible].sum()
    assert abs(n - len(sampled) - n * hidden) < 4.5 * np.sqrt(n * hidden * (1 - hidden))
    ((*local,),) = LocalSampler(2000).sample(policy, PROMPTS[:1], 2000, sampling, 0)
    for responses in (sampled, [response for response in local if response.ids[0] in visible]):
        counts = Counter(response.ids[0] for response in responses)
        expected = probability[visible] / probability[visible].sum() * len(responses)
        statistic = sum(
            (counts[i] - mean) ** 2 / mean for i, mean in zip(visible, expected, strict=True)
        )
        freedom = len(visible) - 1
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    ((*likely,),) = server.sample(policy, PROMPTS[:1], 20, Sampling(2.0, 0, 0.3, 1), 0)
    assert {response.ids[0] for response in likely} < set(np.argsort(-probability)[:5])
    again = [server.sample(policy, PROMPTS[:1], 8, Sampling(1.0, 0, 1.0, 4), 5) for _ in range(2)]
    assert again[0] == again[1]
    for options, reason in (
        ({"flavour": "openai", "model": "other"}, "Server is pinned to"),
        ({"model": str(folder)}, "Unexpected fields in the request"),
        ({"flavour": "openai"}, "lists the models"),
    ):
        with pytest.raises(InputError, match=reason):
            ServerSampler(url, **options).sample(policy, PROMPTS[:1], 1, OPEN, 0)
