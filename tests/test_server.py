"""Sampling on servers: a fake one for requests, failures and dropped responses; a slow real one."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import make_policy

from topr.io import InputError
from topr.policy import load_policy
from topr.sampling import Response, Sampling, ServerSampler

END = 1  # of the arithmetic tokenizer
PROMPTS = [[5, 6], [7], [8, 9, 10, 11]]
SAMPLING = Sampling(temperature=0.7, top_k=9, top_p=0.8, max_new_tokens=6)
OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=6)


@pytest.fixture(scope="module")
def loaded(policy):
    return load_policy(str(policy))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.send(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        assert self.path == "/v1/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = len(self.server.bodies)
        self.server.bodies.append(body)
        self.send(*self.server.reply(body, number))

    def send(self, status, payload):
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After-Ms", "1")
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """`reply(body, number)` gives status and JSON of a completion."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, reply, models):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.models = models
        self.bodies: list[dict] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def serve():
    started = []

    def serve(reply, models=("policy",)) -> Server:
        server = Server(reply, models)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        started.append(server)
        return server

    yield serve
    for server in started:
        server.shutdown()
        server.server_close()


def answer(body, ids, count=None, **choice):
    """What vLLM returns: the end token stays in the ids and is counted."""
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count or len(ids)}
    reason = "stop" if END in ids else "length"
    choice = {"text": "", "finish_reason": reason, "token_ids": ids} | choice
    return 200, {"choices": [choice], "usage": usage}


def vllm(body, number):
    return answer(body, drawn(body))


def drawn(body) -> list[int]:
    """Ids that depend on the request's seed and prompt; about half of them end early."""
    rng = random.Random(f"{body['seed']} {body['prompt']}")
    ids = []
    while len(ids) < body["max_tokens"] and END not in ids:
        ids.append(rng.choice([END, 3, 3, 3, 4, 5, 6, 7]))
    return ids


def sample(servers, policy, prompts, n, sampling=OPEN, seed=0, **options):
    urls = [server.url for server in servers]
    return ServerSampler(urls, **options).sample(policy, prompts, n, sampling, seed)


@pytest.mark.filterwarnings("error::UserWarning")
def test_responses_are_the_ids_that_the_server_sampled(serve, loaded):
    server = serve(vllm)
    responses = sample([server], loaded, PROMPTS, 8, SAMPLING, 3, concurrency=5)
    for prompt, found in zip(PROMPTS, responses, strict=True):
        sent = [drawn(body) for body in server.bodies if body["prompt"] == prompt]
        assert sorted(found) == [Response(ids, END in ids) for ids in sorted(sent)]
        assert len(found) == 8
    assert len({body["seed"] for body in server.bodies}) == 24
    assert max(body["seed"] for body in server.bodies) < 2**31
    assert responses == sample([server], loaded, PROMPTS, 8, SAMPLING, 3, flavour="sglang")
    assert responses != sample([server], loaded, PROMPTS, 8, SAMPLING, 4)
    odd = ServerSampler(server.url).sample(loaded, PROMPTS[1:], 8, SAMPLING, 3, [1, 2])
    assert odd == responses[1:]


def test_no_parameter_is_left_to_the_servers_defaults(serve, loaded):
    server = serve(lambda body, number: answer(body, [3] * 6))
    sampling = Sampling(temperature=0.7, top_k=0, top_p=0.8, max_new_tokens=6, stop=["\n\n"])
    sample([server], loaded, [[5, 6]], 1, sampling)
    sample([server], loaded, [[5, 6]], 1, SAMPLING, model="mine")
    for body in server.bodies:
        del body["seed"]
    expected = {
        "model": "policy", "prompt": [5, 6], "max_tokens": 6, "temperature": 0.7, "top_p": 0.8,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": ["\n\n"],
        "stop_token_ids": [END], "skip_special_tokens": False, "return_token_ids": True,
    }  # fmt: skip
    assert server.bodies == [expected, expected | {"model": "mine", "top_k": 9, "stop": []}]


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_response_ends_at_its_first_end_token_or_with_its_stop_string(serve, loaded):
    ids = loaded.tokenizer("12=3;")["input_ids"]
    server = serve(lambda body, number: answer(body, ids))
    for stop, length in (("3;", 5), ("2=", 3)):  # whole tokens, the rest came after the end
        sampling = Sampling(1.0, 0, 1.0, 6, stop=[stop])
        assert sample([server], loaded, [[5]], 1, sampling) == [[Response(ids[:length], False)]]
    beyond = serve(lambda body, number: answer(body, [3, END, 4]))
    assert sample([beyond], loaded, [[5]], 1) == [[Response([3, END], True)]]


@pytest.mark.filterwarnings("error::UserWarning")
def test_failures_that_may_pass_are_retried_and_no_response_is_dropped(serve, loaded):
    seeds = set()

    def reply(body, number):
        if body["seed"] in seeds:
            return vllm(body, number)
        seeds.add(body["seed"])
        if number % 2:
            time.sleep(2.0)  # longer than the client waits
        return 503, {"error": {"message": "busy"}}

    responses = sample([serve(reply)], loaded, PROMPTS, 3, timeout=1.0, retries=3)
    assert [len(found) for found in responses] == [3, 3, 3]


def test_a_rejected_request_ends_at_once_in_one_sentence_with_the_servers_words(serve, loaded):
    server = serve(lambda body, number: (400, {"error": {"message": "prompt is too long"}}))
    with pytest.raises(InputError, match=f"{server.url}/completions fails: .*prompt is too long"):
        sample([server], loaded, [[5]], 1)
    assert len(server.bodies) == 1


def test_a_server_that_keeps_failing_or_is_absent_ends_in_one_sentence(serve, loaded):
    server = serve(lambda body, number: (503, {"error": {"message": "loading"}}))
    with pytest.raises(InputError, match="fails: .*loading"):
        sample([server], loaded, [[5]], 1, retries=2)
    assert len(server.bodies) == 3
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(InputError, match=f"{url}/models fails: .*connection attempts failed"):
        ServerSampler(url, retries=0).sample(loaded, [[5]], 1, OPEN, 0)


def test_servers_share_the_requests_and_their_number_at_once_is_bounded(serve, loaded):
    active, most = [], []

    def reply(body, number):
        active.append(number)
        most.append(len(active))
        time.sleep(0.1)
        active.pop()
        return vllm(body, number)

    servers = [serve(reply), serve(reply)]
    sample(servers, loaded, PROMPTS, 8, concurrency=6)
    assert 3 < max(most) <= 6
    assert min(len(server.bodies) for server in servers) >= 8


def test_uncertain_responses_are_dropped_and_counted(serve, loaded):
    def reply(body, number):
        odd = {
            1: answer(body, [3, 4, END], count=4),
            2: answer(body, [3, 4, 5]),  # neither ended nor as long as requested
            3: answer(body, []),
            4: answer(body, [3, 4, END], token_ids=None),
        }
        return odd.get(number, answer(body, [3, 4, END]))

    with pytest.warns(UserWarning, match="4 of 9 responses dropped"):
        responses = sample([serve(reply)], loaded, PROMPTS, 3, concurrency=1)
    assert [len(found) for found in responses] == [1, 1, 3]


def test_a_server_that_never_returns_a_usable_response_is_an_error(serve, loaded):
    cut = serve(lambda body, number: answer(body, [3, 4]))
    with pytest.raises(InputError, match="9 of 9 responses .*room for prompt and max_new_tokens"):
        sample([cut], loaded, PROMPTS, 3)


def test_the_model_must_be_clear(serve, loaded):
    server = serve(vllm, ("a", "b"))
    with pytest.raises(InputError, match="lists the models .*; choose one by"):
        sample([server], loaded, PROMPTS, 1)
    assert sample([server], loaded, PROMPTS, 1, model="b")
    assert {body["model"] for body in server.bodies} == {"b"}


def texts(tokenizer, ids, reason):
    """A server of text, which leaves special tokens out of it."""
    text = tokenizer.decode(ids, skip_special_tokens=True)

    def reply(body, number):
        prompt = tokenizer(body["prompt"])["input_ids"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return 200, {"choices": [{"text": text, "finish_reason": reason}], "usage": usage}

    return reply


@pytest.mark.parametrize(
    ("ids", "reason", "kept"),
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
    if kept:
        found = sample([server], loaded, [[5, 6]], 1, flavour="openai")
        assert found == [[Response(ids, END in ids)]]
    else:
        with pytest.raises(InputError, match="1 of 1"):
            sample([server], loaded, [[5, 6]], 1, flavour="openai")
    (body,) = server.bodies  # no field that such servers reject
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "top_p", "seed"}


def test_prompts_reach_servers_of_text_as_the_same_ids(serve, loaded, tmp_path):
    from tokenizers.processors import TemplateProcessing

    # This tokenizer, and the server's, put an end token first.
    special = load_policy(str(make_policy(tmp_path / "base")))
    template = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    special.tokenizer.backend_tokenizer.post_processor = template
    server = serve(texts(special.tokenizer, [3, END], "stop"))
    with pytest.warns(UserWarning, match="2 of 4"):  # no text has the ids of the second prompt
        found = sample([server], special, [[END, 5, 6], [5, 6]], 2, flavour="openai")
    assert [len(responses) for responses in found] == [2, 0]
    assert {body["prompt"] for body in server.bodies} == {"23"}


@pytest.mark.parametrize("wrong", [Sampling(top_k=5), Sampling(top_k=0, stop=["x"])])
def test_servers_of_text_take_neither_top_k_nor_stop(loaded, wrong):
    with pytest.raises(InputError, match="needs sampling.top_k 0"):
        ServerSampler("http://127.0.0.1/v1", "openai").sample(loaded, [[5, 6]], 1, wrong, 0)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """`transformers serve` with a tiny policy: the policy's folder and the server's url."""
    folder = tmp_path_factory.mktemp("serve")
    policy = make_policy(folder / "base", scale=0.35)
    # Without these two it is greedy, or keeps to 50 tokens.
    settings = policy / "generation_config.json"
    changed = json.loads(settings.read_text()) | {"do_sample": True, "top_k": 0}
    settings.write_text(json.dumps(changed))
    (folder / "hub").mkdir()  # an empty cache
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
    program = Path(sys.executable).with_name("transformers")
    command = f"{program} serve {policy} --host 127.0.0.1 --port {port} --device cpu"
    process = subprocess.Popen(command.split(), env=os.environ | own)
    try:
        while True:
            assert process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield policy, f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_real_server_samples_and_explains_its_refusals(real):
    folder, url = real
    policy = load_policy(str(folder))
    # One at a time: the server draws from one generator, and then its seeds repeat.
    server = ServerSampler(url, flavour="openai", model=str(folder), concurrency=1)
    found = server.sample(policy, PROMPTS[:1], 20, OPEN, 5)
    assert len({tuple(ids) for ids, _ in found[0]}) > 3
    assert found == server.sample(policy, PROMPTS[:1], 20, OPEN, 5)
    with pytest.raises(InputError, match="Unexpected fields in the request"):
        ServerSampler(url, model=str(folder)).sample(policy, PROMPTS[:1], 1, OPEN, 0)
