"""Sampling on a fake server: requests, failures and responses whose ids are uncertain."""

import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import make_policy, rejected, slow

import evaluate
import train
from topr.evaluation.pipeline import SamplingJob
from topr.io import InputError
from topr.policy import load_policy
from topr.sampling import LocalSampler, Response, Sampling, ServerSampler
from topr.sampling import server as server_module
from topr.tasks import Arithmetic, Problem
from topr.trajectories import read_trajectories

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

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.bodies: list[dict] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def serve():
    started = []

    def serve(reply) -> Server:
        server = Server(reply)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        started.append(server)
        return server

    yield serve
    for server in started:
        server.shutdown()
        server.server_close()


def answer(body, ids, count=None):
    """What vLLM returns: the end token stays in the ids and is counted."""
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": len(ids) if count is None else count,
    }
    return 200, {"choices": [{"text": "", "token_ids": ids}], "usage": usage}


def vllm(body, number):
    return answer(body, drawn(body))


def drawn(body) -> list[int]:
    """Ids that depend on the request's seed and prompt; about half of them end early."""
    rng = random.Random(f"{body['seed']} {body['prompt']}")
    ids = []
    while len(ids) < body["max_tokens"] and END not in ids:
        ids.append(rng.choice([END, 3, 3, 3, 4, 5, 6, 7]))
    return ids


def sample(server, policy, prompts, n, sampling=OPEN, seed=0, **options):
    return ServerSampler(server.url, **options).sample(policy, prompts, n, sampling, seed)


@pytest.mark.filterwarnings("error::UserWarning")
def test_responses_are_the_ids_that_the_server_sampled(serve, loaded):
    server = serve(vllm)
    responses = sample(server, loaded, PROMPTS, 8, SAMPLING, 3, concurrency=5)
    for prompt, found in zip(PROMPTS, responses, strict=True):
        sent = [drawn(body) for body in server.bodies if body["prompt"] == prompt]
        assert sorted(found) == [Response(ids, END in ids) for ids in sorted(sent)]
        assert len(found) == 8
    assert len({body["seed"] for body in server.bodies}) == 24
    assert max(body["seed"] for body in server.bodies) < 2**31
    assert responses != sample(server, loaded, PROMPTS, 8, SAMPLING, 4)
    odd = ServerSampler(server.url).sample(loaded, PROMPTS[1:], 8, SAMPLING, 3, [1, 2])
    assert odd == responses[1:]


def test_no_parameter_is_left_to_the_servers_defaults(serve, loaded):
    server = serve(lambda body, number: answer(body, [3] * 6))
    sampling = Sampling(temperature=0.7, top_k=0, top_p=0.8, max_new_tokens=6, stop=["\n\n"])
    sample(server, loaded, [[5, 6]], 1, sampling)
    sample(server, loaded, [[5, 6]], 1, SAMPLING)
    for body in server.bodies:
        del body["seed"]
    expected = {
        "model": "", "prompt": [5, 6], "max_tokens": 6, "temperature": 0.7, "top_p": 0.8,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": ["\n\n"],
        "stop_token_ids": [END], "skip_special_tokens": False, "return_token_ids": True,
        "logprobs": 1,
    }  # fmt: skip
    assert server.bodies == [expected, expected | {"top_k": 9, "stop": []}]


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_response_ends_at_its_first_end_token_or_with_its_stop_string(serve, loaded):
    ids = loaded.tokenizer("12=3;")["input_ids"]
    server = serve(lambda body, number: answer(body, ids))
    for stop, length in (("3;", 5), ("2=", 3)):  # whole tokens, the rest came after the end
        sampling = Sampling(1.0, 0, 1.0, 6, stop=[stop])
        assert sample(server, loaded, [[5]], 1, sampling) == [[Response(ids[:length], False)]]
    beyond = serve(lambda body, number: answer(body, [3, END, 4]))
    assert sample(beyond, loaded, [[5]], 1) == [[Response([3, END], True)]]


@pytest.mark.filterwarnings("error::UserWarning")
def test_failures_that_may_pass_are_retried_and_no_response_is_dropped(serve, loaded):
    seeds = set()

    def reply(body, number):
        if body["seed"] in seeds:
            return vllm(body, number)
        seeds.add(body["seed"])
        return 503, {"error": {"message": "busy"}}

    responses = sample(serve(reply), loaded, PROMPTS, 3)
    assert [len(found) for found in responses] == [3, 3, 3]


def test_a_rejected_request_ends_at_once_in_one_sentence_with_the_servers_words(serve, loaded):
    server = serve(lambda body, number: (400, {"error": {"message": "prompt is too long"}}))
    with pytest.raises(InputError, match=f"{server.url}/ fails .*prompt is too long"):
        sample(server, loaded, [[5]], 1)
    assert len(server.bodies) == 1


def test_a_server_that_keeps_failing_or_is_absent_ends_in_one_sentence(serve, loaded, monkeypatch):
    server = serve(lambda body, number: (503, {"error": {"message": "loading"}}))
    with pytest.raises(InputError, match="fails .*loading"):
        sample(server, loaded, [[5]], 1)
    assert len(server.bodies) == 7
    monkeypatch.setattr(server_module, "RETRIES", 0)
    url = "http://127.0.0.1:1/v1"
    with pytest.raises(InputError, match=f"{url}/ fails .*Connection error"):
        ServerSampler(url).sample(loaded, [[5]], 1, OPEN, 0)


@pytest.mark.parametrize(
    "reply",
    [{"content": "no choices"}, {"choices": [{"text": "4"}]}, "<html>", {"object": "error"}],
)
def test_what_is_no_completion_ends_in_one_sentence(serve, loaded, reply):
    server = serve(lambda body, number: (200, reply))
    with pytest.raises(InputError, match=f"{server.url}/ fails "):
        sample(server, loaded, [[5]], 1)


def test_the_number_of_requests_at_once_is_bounded(serve, loaded):
    active, most = [], []

    def reply(body, number):
        active.append(number)
        most.append(len(active))
        time.sleep(0.1)
        active.pop()
        return vllm(body, number)

    sample(serve(reply), loaded, PROMPTS, 8, concurrency=6)
    assert 3 < max(most) <= 6


@pytest.mark.parametrize(
    ("ids", "count"),
    [([3, 4, END], 4), ([3, 4, 5], 3), ([], 0), (None, 3)],  # the second neither ended nor full
)
def test_responses_whose_ids_are_uncertain_end_in_one_sentence(serve, loaded, ids, count):
    server = serve(lambda body, number: answer(body, ids, count))
    with pytest.raises(InputError, match="returns no token ids, or cuts a response off"):
        sample(server, loaded, [[5]], 1)


def test_a_server_that_does_not_answer_is_left_out(serve, loaded, monkeypatch):
    monkeypatch.setattr(server_module, "RETRIES", 0)
    server = serve(vllm)
    absent = "http://127.0.0.1:1/v1"
    with pytest.warns(UserWarning, match=f"{absent}/ does not answer and is left out"):
        responses = ServerSampler([absent, server.url]).sample(loaded, PROMPTS, 8, OPEN, 3)
    assert responses == sample(server, loaded, PROMPTS, 8, seed=3)
    second = serve(vllm)
    ServerSampler([server.url, second.url]).sample(loaded, PROMPTS, 8, OPEN, 3)
    assert 0 < len(second.bodies) < 24


def test_a_server_samples_the_next_part_while_one_is_scored(serve, policy, loaded):
    server = serve(vllm)
    problems = [Problem(str(number), f"{number}+1>", "2") for number in range(6)]
    job = SamplingJob(str(policy), Arithmetic(), problems, 2, OPEN, 0)
    parts = job.sample_parts([[0, 1], [2, 3], [4, 5]], ServerSampler(server.url), loaded)
    first = next(parts)
    for _ in range(200):
        if len(server.bodies) == 8:
            break
        time.sleep(0.02)
    assert len(server.bodies) == 8  # of two parts
    (whole,) = job.sample_parts([[*range(6)]], ServerSampler(server.url), loaded)
    assert [*first, *next(parts), *next(parts)] == whole


def faithful(policy, temperature: float = 1.0):
    """The replies of a server that samples from a policy, whatever temperature it is asked for,
    with the log-probs of what it samples from."""

    def reply(body, number):
        prompt = body["prompt"]
        how = Sampling(temperature, 0, 1.0, body["max_tokens"])
        ((response,),) = LocalSampler().sample(policy, [prompt], 1, how, body["seed"])
        logits = policy.logits(torch.tensor([prompt + response.ids]))[0, len(prompt) - 1 : -1]
        log_probs = (logits / temperature).log_softmax(-1).detach()
        chosen = log_probs[torch.arange(len(response.ids)), response.ids]
        status, payload = answer(body, response.ids)
        payload["choices"][0]["logprobs"] = {"token_logprobs": chosen.tolist()}
        return status, payload

    return reply


@pytest.mark.parametrize("wrong", [None, slow("temperature"), "policy"])
def test_a_server_that_samples_from_another_distribution_is_noticed(serve, run, tiny, wrong):
    policy, arguments = tiny
    other = make_policy(Path("other"), seed=1, scale=0.5) if wrong == "policy" else policy
    server = serve(faithful(load_policy(str(other)), 0.3 if wrong == "temperature" else 1.0))
    command = ["predict", *arguments, "--data.out=out", "--model.sampler=ServerSampler"]
    command += [f"--model.sampler.url={server.url}"]
    if wrong:
        rejected(run, "the server samples from another distribution than policy", *command)
        assert not list(Path("out").glob("*.parquet"))
        # then its log-probs may be those of temperature 1 or of another one: nothing is compared
        command.append("--data.sampling.temperature=0.3")
    code, out, error = run(train.main, *command)
    assert code == 0, error
    assert ("exceed the policy's by 0.0000 a token" in out) == (wrong is None)


def test_an_evaluation_samples_on_a_server(serve, run, tiny, monkeypatch):
    policy, _ = tiny
    server = serve(faithful(load_policy(str(policy))))
    command = ["--policy", policy, "--benchmark", "arithmetic=problems.jsonl", "--samples", 4]
    command += ["--max_new_tokens", 8, "--server", server.url, "--out", "out"]
    with monkeypatch.context() as patch:
        patch.delattr(evaluate, "load_policy")  # its weights are not needed
        code, _, error = run(evaluate.main, *command)
    assert code == 0, error
    rows = read_trajectories("out/responses.parquet")
    assert len(server.bodies) == len(rows) == 20 and not any(row.ref_logprobs for row in rows)
    code, out, error = run(evaluate.main, *command, "--out", "scored", "--log_probs", "true")
    assert code == 0 and "exceed the policy's by 0.0000 a token" in out, error
    assert all(row.ref_logprobs for row in read_trajectories("scored/responses.parquet"))
    rejected(
        run, "--server serves one policy", *command, "--policy", policy, policy, main=evaluate.main
    )
