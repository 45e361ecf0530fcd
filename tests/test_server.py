"""Sampling on servers: a real one gives the policy's distribution, and a stub shows how failures end."""

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
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, make_policy
from transformers.utils.import_utils import is_serve_available

import train
from topr.evaluation import per_problem
from topr.io import InputError
from topr.logprobs import score
from topr.module import PolicyModule
from topr.policy import load_policy
from topr.sampling import LocalSampler, Response, Sampling, ServerSampler
from topr.tokenizer import load_tokenizer
from topr.trajectories import Trajectory, read_trajectories

END = 1  # of the arithmetic tokenizer
PROMPTS = [[5, 6], [7], [8, 9, 10, 11]]
SAMPLING = Sampling(temperature=0.7, top_k=9, top_p=0.8, max_new_tokens=6)
OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=6)


@pytest.fixture(scope="module")
def loaded(policy):
    return load_policy(str(policy)), load_tokenizer(str(policy))


class Stub:
    """A server whose answers `reply(body, number)` decides: (status, JSON or bytes) or an exception, a reset."""

    def __init__(self, reply, models=("policy",)):
        self.reply, self.models, self.bodies, self.times = reply, models, [], []
        self.active = self.most = 0
        self.lock, stub = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.send(200, {"data": [{"id": name} for name in stub.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions"
                with stub.lock:
                    number = len(stub.bodies)
                    stub.bodies.append(body)
                    stub.times.append(time.monotonic())
                    stub.active += 1
                    stub.most = max(stub.most, stub.active)
                try:
                    answer = stub.reply(body, number)
                except ConnectionError:
                    # closing with this option set sends a reset
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    self.close_connection = True
                    return
                finally:
                    with stub.lock:
                        stub.active -= 1
                self.send(*answer)

            def send(self, status, payload):
                data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client gave up
                    self.close_connection = True

        class Server(ThreadingHTTPServer):
            request_queue_size, daemon_threads = 256, True

            def handle_error(self, request, client_address):
                """Clients may leave as they please."""

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def serve():
    stubs = []

    def serve(*arguments, **options) -> Stub:
        stubs.append(Stub(*arguments, **options))
        return stubs[-1]

    yield serve
    for stub in stubs:
        stub.http.shutdown()
        stub.http.server_close()


def drawn(body) -> list[int]:
    """Ids that hang on the request's seed and prompt; about half of them end early."""
    rng = random.Random(f"{body['seed']} {body['prompt']}")
    ids = [rng.choice([END, *range(3, 12)]) if rng.random() < 0.5 else 3 for _ in range(body["max_tokens"])]
    return ids[: ids.index(END) + 1] if END in ids else ids


def answer(body, ids, prompt_tokens=None, count=None, **choice):
    """vLLM: the end token stays in the ids and is counted."""
    usage = {"prompt_tokens": len(body["prompt"]) if prompt_tokens is None else prompt_tokens}
    usage["completion_tokens"] = len(ids) if count is None else count
    reason = "stop" if END in ids else "length"
    return 200, {"choices": [{"text": "", "finish_reason": reason, "token_ids": ids} | choice], "usage": usage}


def vllm(body, number):
    return answer(body, drawn(body))


def sglang(body, number):
    """A field of its own, and "length" for an end token in the last place."""
    ids = drawn(body)
    return answer(body, ids, matched_stop=END if END in ids else None, finish_reason="length")


def sampler_of(*stubs, **options) -> ServerSampler:
    """A sampler that does not wait between attempts."""
    sampler = ServerSampler([stub.url for stub in stubs], **options)
    sampler.servers.jitter = SimpleNamespace(uniform=lambda low, high: 0.0)
    return sampler


@contextmanager
def nothing_dropped():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize("flavour, reply", [("vllm", vllm), ("sglang", sglang)])
def test_responses_are_the_ids_that_the_server_sampled(serve, loaded, flavour, reply):
    stub = serve(reply)
    sampler = sampler_of(stub, flavour=flavour, concurrency=5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with nothing_dropped():
        responses = sampler.sample(*loaded, PROMPTS, 20, SAMPLING, 3)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    for prompt, found in zip(PROMPTS, responses, strict=True):
        expected = [drawn(body) for body in stub.bodies if body["prompt"] == prompt]
        assert sorted(found) == sorted(Response(ids, END in ids) for ids in expected) and len(found) == 20
    assert {response.finished for found in responses for response in found} == {True, False}
    assert any(len(r.ids) == 6 and r.finished for found in responses for r in found)  # an end in the last place
    assert len({body["seed"] for body in stub.bodies}) == 60
    assert responses == sampler.sample(*loaded, PROMPTS, 20, SAMPLING, 3)
    assert responses != sampler.sample(*loaded, PROMPTS, 20, SAMPLING, 4)


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_no_parameter_is_left_to_the_servers_defaults(serve, loaded, flavour):
    stub = serve(lambda body, number: answer(body, [3] * 6))
    sampling = Sampling(temperature=0.7, top_k=0, top_p=0.8, max_new_tokens=6, stop=["\n\n"])
    sampler_of(stub, flavour=flavour).sample(*loaded, [[5, 6]], 1, sampling, 0)
    sampler_of(stub, flavour=flavour, model="mine").sample(*loaded, [[5, 6]], 1, SAMPLING, 0)
    seeds = [body.pop("seed") for body in stub.bodies]
    assert all(0 <= seed < 2**31 for seed in seeds)
    expected = {
        "model": "policy", "prompt": [5, 6], "max_tokens": 6, "temperature": 0.7, "top_p": 0.8, "top_k": -1,
        "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0,
        "ignore_eos": False, "stop": ["\n\n"], "stop_token_ids": [END], "skip_special_tokens": False,
        "return_token_ids": True,
    }  # fmt: skip
    assert stub.bodies == [expected, expected | {"model": "mine", "top_k": 9, "stop": []}]


def test_a_stop_text_ends_a_response_with_whole_tokens(serve, loaded):
    tokenizer = loaded[1]
    ids = tokenizer("12=3;")["input_ids"]
    stub = serve(lambda body, number: answer(body, ids, text="12="))
    sampling = Sampling(1.0, 0, 1.0, 6, stop=["3;"])
    with nothing_dropped():
        assert sampler_of(stub).sample(*loaded, PROMPTS[:1], 1, sampling, 0) == [[Response(ids, False)]]


def test_a_request_that_fails_for_the_moment_is_sent_again_and_none_is_dropped(serve, loaded):
    seen = Counter()

    def reply(body, number):
        seen[body["seed"]] += 1
        kind = body["seed"] % 7 if seen[body["seed"]] <= 2 else None
        if kind == 5:
            raise ConnectionResetError
        if kind == 6:
            time.sleep(3.0)  # beyond the client's patience
        if kind is not None and kind < 5:
            return [408, 409, 429, 500, 503][kind], b"busy"
        return vllm(body, number)

    stub = serve(reply)
    with nothing_dropped():
        responses = sampler_of(stub, timeout=2.0, retries=2).sample(*loaded, PROMPTS, 10, SAMPLING, 0)
    assert [len(found) for found in responses] == [10, 10, 10]
    assert {seed % 7 for seed in seen} == set(range(7)) and set(seen.values()) == {3}


@pytest.mark.parametrize(
    "status, payload",
    [
        (400, {"error": {"message": "prompt is\ntoo long"}}),  # vLLM
        (401, {"error": "prompt is too long"}),
        (404, {"object": "error", "message": "prompt is too long"}),  # SGLang
        (422, {"detail": "prompt is too long"}),  # FastAPI
        (413, b"prompt is too long"),
    ],
)
def test_a_refusal_ends_at_once_with_the_servers_own_words(serve, loaded, status, payload):
    def reply(body, number):
        if number == 3:
            return status, payload
        time.sleep(4.0)
        return vllm(body, number)

    stub = serve(reply)
    start = time.monotonic()
    with pytest.raises(InputError) as error:
        sampler_of(stub, concurrency=4).sample(*loaded, PROMPTS, 10, SAMPLING, 0)
    assert time.monotonic() - start < 2.0  # the three under way were given up
    assert f"{stub.url}/completions" in str(error.value) and f"status {status}: prompt is too long" in str(error.value)
    assert len(stub.bodies) == 4


def test_a_server_that_keeps_failing_ends_as_an_input_error_after_growing_pauses(serve, loaded):
    stub, state = serve(lambda body, number: (503, {"error": {"message": "loading"}})), random.getstate()
    with pytest.raises(InputError, match=f"{stub.url} failed 3 times, .*503: loading.*retries"):
        ServerSampler(stub.url, retries=2).sample(*loaded, PROMPTS[:1], 1, SAMPLING, 0)
    assert random.getstate() == state
    first, second = np.diff(stub.times)
    assert 0.25 <= first <= 0.95 and 0.5 <= second <= 1.7
    free = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    free.close()
    with pytest.raises(InputError, match=f"{url} failed 1 times, .*Connect"):
        ServerSampler(url, retries=0).sample(*loaded, PROMPTS[:1], 1, SAMPLING, 0)


def test_servers_share_the_requests_and_their_number_at_once_is_bounded(serve, loaded):
    def together(full: threading.Barrier):
        def reply(body, number):
            if number < 3:  # a busy machine may take its time to fill the server
                full.wait(30)
            time.sleep(0.02)
            return vllm(body, number)

        return reply

    stubs = [serve(together(threading.Barrier(3))) for _ in range(2)]
    sampler_of(*stubs, concurrency=6).sample(*loaded, PROMPTS, 20, SAMPLING, 0)
    assert [stub.most for stub in stubs] == [3, 3]
    assert sum(len(stub.bodies) for stub in stubs) == 60 and abs(len(stubs[0].bodies) - 30) <= 6


def test_another_server_takes_over_from_a_dead_one(serve, loaded):
    dead, alive = serve(lambda body, number: (500, b"gone")), serve(vllm)
    with nothing_dropped():
        responses = sampler_of(dead, alive, retries=1).sample(*loaded, PROMPTS, 10, SAMPLING, 0)
    assert [len(found) for found in responses] == [10, 10, 10] and len(alive.bodies) == 30


def test_uncertain_responses_are_dropped_counted_and_told(serve, loaded):
    def reply(body, number):
        kinds = {
            1: answer(body, [3, 4, END], count=4),
            2: answer(body, [3, 4, 5]),  # neither ended nor as long as asked for
            3: answer(body, [3, 4, END], prompt_tokens=9),
            4: answer(body, [3, 4, END], token_ids=None),
            5: answer(body, []),
        }
        return kinds.get(number, answer(body, [3, 4, END]))

    stub = serve(reply)
    with pytest.warns(UserWarning) as told:
        responses = sampler_of(stub, concurrency=1).sample(*loaded, PROMPTS, 3, SAMPLING, 0)
    assert [len(found) for found in responses] == [1, 0, 3]
    (message,) = [str(warning.message) for warning in told]
    assert f"{stub.url}: 5 of 9 responses dropped: 2 (cut off by the server)" in message
    assert all(f"1 ({reason})" in message for reason in ("they were tokenised otherwise or cut", "without token ids"))


def test_a_server_that_gives_nothing_usable_is_refused(serve, loaded):
    without = serve(lambda body, number: answer(body, [3, END], token_ids=None))
    with pytest.raises(InputError, match=f"{without.url} returns no token ids.*flavour openai"):
        sampler_of(without).sample(*loaded, PROMPTS, 3, SAMPLING, 0)
    wrong = serve(lambda body, number: answer(body, [3, END], count=7))
    with pytest.raises(InputError, match="9 of 9 responses dropped: 9 .*serve the very policy"):
        sampler_of(wrong).sample(*loaded, PROMPTS, 3, SAMPLING, 0)
    for payload in (b"<html>", {"choices": []}, [], {"choices": [{"token_ids": [3]}]}):
        odd = serve(lambda body, number, payload=payload: (200, payload))
        with pytest.raises(InputError, match=odd.url):
            sampler_of(odd).sample(*loaded, PROMPTS, 1, SAMPLING, 0)
    # but the last batch of a long run may be unlucky
    turns = serve(lambda body, number: answer(body, [3, END], count=2 + number))
    sampler = sampler_of(turns)
    assert sampler.sample(*loaded, PROMPTS[:1], 1, SAMPLING, 0) == [[Response([3, END], True)]]
    with pytest.warns(UserWarning, match="1 of 1"):
        assert sampler.sample(*loaded, PROMPTS[:1], 1, SAMPLING, 0) == [[]]


@pytest.mark.parametrize("models, told", [(("a", "b"), "serves a, b; name"), ((), "no model that it lists; name")])
def test_the_model_must_be_clear(serve, loaded, models, told):
    stub = serve(vllm, models=models)
    with pytest.raises(InputError, match=told):
        sampler_of(stub).sample(*loaded, PROMPTS, 1, SAMPLING, 0)
    assert sampler_of(stub, model="b").sample(*loaded, PROMPTS, 1, SAMPLING, 0)
    assert {body["model"] for body in stub.bodies} == {"b"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "127.0.0.1:8000"}, {"url": []}, {"url": ["http://a/v1", "http://a/v1/"]}, {"flavour": "tgi"},
        {"concurrency": 0}, {"timeout": 0.0}, {"timeout": float("nan")}, {"retries": -1},
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(InputError, match="ServerSampler"):
        ServerSampler(**{"url": "http://127.0.0.1:8000/v1"} | wrong)


def texts(tokenizer, ids, reason):
    """A server of texts, which leaves special tokens out of them."""

    def reply(body, number):
        usage = {"prompt_tokens": len(tokenizer(body["prompt"])["input_ids"]), "completion_tokens": len(ids)}
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return 200, {"choices": [{"text": text, "finish_reason": reason}], "usage": usage}

    return reply


@pytest.mark.parametrize(
    "ids, reason, kept",
    [
        ([3, 4, END], "stop", True),
        ([3, 4, 5, 6, 7, 8], "length", True),
        ([END], "stop", True),
        ([3, 4, 5, 6, 7, END], "length", False),  # the end token may as well be another hidden one elsewhere
        ([3, 0, 4, END], "stop", False),
        ([3, 4], "length", False),
    ],
)
def test_texts_become_ids_only_where_that_is_certain(serve, loaded, ids, reason, kept):
    stub = serve(texts(loaded[1], ids, reason))
    sampler = sampler_of(stub, flavour="openai")
    sampler.delivered = True
    with warnings.catch_warnings(record=True) as told:
        found = sampler.sample(*loaded, PROMPTS[:1], 1, OPEN, 0)
    assert (found, len(told)) == (([[Response(ids, END in ids)]], 0) if kept else ([[]], 1))
    (body,) = stub.bodies  # nothing that such servers refuse
    assert set(body) == {
        "model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"
    }  # fmt: skip


def test_a_spelt_end_token_ends_nothing(serve, loaded):
    spelt = serve(lambda body, number: (200, {"choices": [{"text": "1<eos>2345", "finish_reason": "length"}],
                  "usage": {"prompt_tokens": 2, "completion_tokens": 6}}))  # fmt: skip
    with pytest.raises(InputError, match="does not tell its tokens"):  # no end token: it would not be in the text
        sampler_of(spelt, flavour="openai").sample(*loaded, PROMPTS[:1], 1, OPEN, 0)


def test_prompts_reach_servers_of_texts_as_the_same_ids(serve, loaded, policy):
    tokenizer = load_tokenizer(str(policy))
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    stub = serve(texts(tokenizer, [3, END], "stop"))
    with pytest.warns(UserWarning, match="2 of 4 .*2 .no text is tokenised"):  # 2 is the unknown token
        found = sampler_of(stub, flavour="openai").sample(loaded[0], tokenizer, [[END, 5, 6], [5, 2]], 2, OPEN, 0)
    assert [len(responses) for responses in found] == [2, 0]
    assert {body["prompt"] for body in stub.bodies} == {"23"}
    other = serve(texts(loaded[1], [3, END], "stop"))  # it adds nothing, hence reads another prompt
    with pytest.raises(InputError, match="read another prompt"):
        sampler_of(other, flavour="openai").sample(loaded[0], tokenizer, [[END, 5, 6]], 1, OPEN, 0)


def test_servers_of_texts_take_neither_top_k_nor_stop():
    for sampling in (Sampling(top_k=5), Sampling(top_k=0, stop=["x"])):
        with pytest.raises(InputError, match="vllm or sglang"):
            model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=1))
            sampler = ServerSampler("http://127.0.0.1:9/v1", flavour="openai")
            sampler.sample(model, SimpleNamespace(eos_token_id=1), PROMPTS, 1, sampling, 0)


def test_training_is_measured_in_process_whatever_samples_for_predict(run, policy):
    problems = run.folder / "problems.jsonl"
    problems.write_text('{"prompt": "1+1>", "gold": "2"}\n')
    common = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}", f"--data.test={problems}"]
    server = ["--model.sampler=topr.sampling.ServerSampler", "--model.sampler.init_args.url=[http://127.0.0.1:9/v1]"]
    code, out, err = run(train.main, "test", *common, *server)  # nothing listens there
    assert code == 0 and "test/pass@1" in out, err
    samplers = [LocalSampler(7), ServerSampler("http://127.0.0.1:9/v1")]
    local, server = (PolicyModule("", task=None, loss=None, optimizer=None, sampler=sampler) for sampler in samplers)
    assert (local.sampler, local.evaluator, server.sampler) == (samplers[0], samplers[0], samplers[1])


def test_metrics_of_uneven_problems_share_the_fewest_responses():
    graded = [("a", 1.0, "1"), ("a", -1.0, "2"), ("a", 1.0, "1"), ("b", -1.0, "1"), ("b", 1.0, "2")]
    rows = [Trajectory(name, name, "", [3], "", [3], [], reward, True, True, said) for name, reward, said in graded]
    values = per_problem(rows)
    assert set(values) == {"pass@1", "pass@2", "maj@2", "invalid", "length"}
    np.testing.assert_allclose(values["pass@1"], [2 / 3, 1 / 2])
    np.testing.assert_allclose(values["pass@2"], [1.0, 1.0])
    np.testing.assert_allclose(values["maj@2"], [0.5, 0.5])


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """`transformers serve` with a tiny policy: the policy's folder and the server's url."""
    if not is_serve_available():
        pytest.skip("transformers[serving] is not installed")
    folder = tmp_path_factory.mktemp("serve")
    policy = make_policy(folder / "base", scale=0.35)
    settings = policy / "generation_config.json"  # without these two it is greedy, or keeps to 50 tokens
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_sample": True, "top_k": 0}))
    (folder / "home" / "hub").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
    command = [Path(sys.executable).with_name("transformers"), "serve", policy, "--host", "127.0.0.1"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [*map(str, command), "--port", str(port), "--device", "cpu"], env=environment, stdout=log, stderr=log
        )
    try:
        while process.poll() is None:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.1)
        assert process.poll() is None, (folder / "log").read_text()
        yield policy, f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.filterwarnings("ignore:.*tokenised otherwise")
def test_a_real_server_samples_from_the_policys_distribution(real):
    policy, url = real
    model, tokenizer = load_policy(str(policy)), load_tokenizer(str(policy))
    sampling, n = Sampling(2.0, 0, 1.0, 1), 300  # flat, so that a forgotten temperature or a cut tail would show
    with torch.no_grad():
        probability = (model(torch.tensor(PROMPTS[:1])).logits[0, -1].double() / 2).softmax(-1).numpy()
    visible = np.arange(3, len(probability))  # texts hide the special tokens, of which a single one is never certain
    # one at a time: the server draws from one generator, and then its seeds repeat
    server = ServerSampler(url, flavour="openai", model=str(policy), concurrency=1)
    with pytest.warns(UserWarning, match="tokenised otherwise"):
        ((*sampled,),) = server.sample(model, tokenizer, PROMPTS[:1], n, sampling, 0)
    hidden = 1 - probability[visible].sum()
    assert abs(n - len(sampled) - n * hidden) < 4.5 * np.sqrt(n * hidden * (1 - hidden))
    ((*local,),) = LocalSampler(2000).sample(model, tokenizer, PROMPTS[:1], 2000, sampling, 0)
    for responses in (sampled, [response for response in local if response.ids[0] in visible]):
        counts = Counter(response.ids[0] for response in responses)
        expected = probability[visible] / probability[visible].sum() * len(responses)
        statistic = sum((counts[i] - mean) ** 2 / mean for i, mean in zip(visible, expected, strict=True))
        freedom = len(visible) - 1
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    ((*likely,),) = server.sample(model, tokenizer, PROMPTS[:1], 20, Sampling(2.0, 0, 0.3, 1), 0)
    assert {response.ids[0] for response in likely} < set(np.argsort(-probability)[:5])
    again = [server.sample(model, tokenizer, PROMPTS[:1], 8, Sampling(1.0, 0, 1.0, 4), 5) for _ in range(2)]
    assert again[0] == again[1]


def test_predict_writes_the_same_file_from_a_server_as_in_process(real, run):
    policy, url = real
    problems = run.folder / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(5)))
    common = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}", "--data.samples=20"]
    common += [f"--data.problems={problems}", "--data.sampling.max_new_tokens=4", "--trainer.enable_progress_bar=false"]
    server = ["--model.sampler=topr.sampling.ServerSampler", f"--model.sampler.init_args.url={url}"]
    server += ["--model.sampler.init_args.flavour=openai", f"--model.sampler.init_args.model={policy}"]
    schemas = []
    for name, more in (("served", server), ("local", [])):
        code, out, err = run(train.main, "predict", *common, *more, f"--data.out={run.folder / name}")
        assert code == 0, err
        schemas.append(pq.read_schema(run.folder / name / "part-00000.parquet"))
    assert schemas[0].equals(schemas[1], check_metadata=True)
    rows = read_trajectories(run.folder / "served" / "part-00000.parquet")
    assert {row.prompt_id for row in rows} == set("01234") and 50 <= len(rows) <= 100
    assert all(row.finished == (row.response_ids[-1] == END) for row in rows)
    assert {row.finished for row in rows} == {True, False}
    prompts, responses = ([np.array(getattr(row, name)) for row in rows] for name in ("prompt_ids", "response_ids"))
    fresh = np.concatenate(score(load_policy(str(policy)), prompts, responses, 16384))
    np.testing.assert_allclose(np.concatenate([row.ref_logprobs for row in rows]), fresh, atol=1e-4)


def test_predict_tells_a_refusal_in_one_sentence(real, run):
    policy, url = real
    problems = run.folder / "problems.jsonl"
    problems.write_text('{"prompt": "1+1>", "gold": "2"}\n')
    common = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}", f"--data.out={run.folder}"]
    common += [f"--data.problems={problems}", "--model.sampler=topr.sampling.ServerSampler"]
    for options, told in (
        ([f"url={url}", "flavour=openai", "model=other"], "status 400: Server is pinned to"),
        ([f"url={url}", f"model={policy}"], "status 422: Unexpected fields in the request"),
        ([f"url={url}", "flavour=openai"], "no model that it lists"),
        ([f"url={url}", "concurrency=0"], "concurrency is 0"),
    ):
        arguments = [f"--model.sampler.init_args.{option}" for option in options]
        code, out, err = run(train.main, "predict", *common, *arguments)
        assert code == 2 and told in err and err.count("error:") == 1 and "Traceback" not in err
