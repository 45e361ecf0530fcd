"""Samples follow the policy's full distribution, end where they should, and can be repeated."""

import pytest
import torch
from conftest import make_policy

from topr.evaluation.pipeline import SamplingJob
from topr.io import InputError
from topr.io.commands import ArgumentParser
from topr.policy import Policy, load_policy
from topr.sampling import LocalSampler, Sampler, Sampling
from topr.sampling.base import Response
from topr.tasks import Arithmetic, Grade, Problem

PROMPTS = [[5, 6], [7], [8, 9, 10, 11]]
LOCAL = {"class_path": "topr.sampling.LocalSampler", "init_args": {"rows": 1}}
SERVER = {
    "class_path": "topr.sampling.ServerSampler",
    "init_args": {"url": "http://127.0.0.1:8000/v1"},
}


@pytest.fixture
def policy(tmp_path) -> Policy:
    return load_policy(str(make_policy(tmp_path / "base", scale=0.5)))


@pytest.mark.parametrize("ends", [{1}, {1, 4}])  # Llama 3 has two end tokens
def test_responses_end_with_their_first_end_token(policy, ends):
    policy.model.generation_config.eos_token_id = sorted(ends)
    for responses in LocalSampler().sample(policy, PROMPTS, 200, Sampling(1.0, 0, 1.0, 12), 0):
        assert {response.finished for response in responses} == {True, False}
        for ids, finished, _ in responses:
            assert not ends & set(ids[:-1])
            assert finished == (ids[-1] in ends)
            assert finished or len(ids) == 12


def test_a_stop_string_ends_a_response_when_it_is_complete(policy):
    tokenizer = policy.tokenizer
    prompts = [tokenizer("12+3")["input_ids"], [7]]  # the prompt's own text does not count
    stop = ["1", "+3"]
    sampling = Sampling(1.0, 0, 1.0, 12, stop)
    ended = 0
    for responses in LocalSampler(64).sample(policy, prompts, 200, sampling, 0):
        for ids, finished, _ in responses:
            text, before = tokenizer.decode(ids), tokenizer.decode(ids[:-1])
            assert not any(cut in before for cut in stop)
            stopped = any(cut in text for cut in stop)
            assert stopped or finished or len(ids) == 12
            ended += stopped and text.endswith("+3")
    assert ended > 0


@pytest.mark.parametrize("requires_end", [True, False])
def test_a_response_that_was_cut_off_is_invalid_where_the_task_requires_an_end(
    policy, requires_end
):
    task = Arithmetic()
    task.requires_end = requires_end
    problem = Problem("a", "3+4>", "7")
    job = SamplingJob(policy.name, task, [problem], 1, Sampling(max_new_tokens=9), 0)
    ids = policy.tokenizer.encode("3+4=7;#7")
    cut = job.grade(0, Response(ids, False))
    assert (cut.valid, cut.reward) == ((False, -1) if requires_end else (True, 1))
    ended = job.grade(0, Response([*ids, 1], True))
    assert (ended.valid, ended.reward, ended.response) == (True, 1, "3+4=7;#7")
    job.sampling.stop = [";#7"]
    task.grade = lambda response, gold: Grade(1.0, response == "3+4=7", None)
    stopped = job.grade(0, Response(ids, False))
    assert (stopped.valid, stopped.reward) == (True, 1)


def test_samples_repeat_and_leave_the_random_state_alone(policy):
    sampling = Sampling(1.0, 0, 1.0, 8)
    state = torch.get_rng_state()
    first = LocalSampler().sample(policy, PROMPTS, 5, sampling, 7)
    assert torch.equal(state, torch.get_rng_state())
    assert first == LocalSampler().sample(policy, PROMPTS, 5, sampling, 7)
    assert LocalSampler().sample(policy, [], 5, sampling, 7) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 1.1},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
        {"stop": [""]},
    ],
)
def test_a_value_outside_its_range_is_rejected(wrong):
    parser = ArgumentParser()
    parser.add_argument("sampling", type=Sampling)
    right = {"temperature": 0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 1, "stop": ["\n\n", " "]}
    args = parser.parse_object({"sampling": right})
    assert parser.instantiate(args).sampling == Sampling(**right)
    with pytest.raises(InputError, match=f"sampling.{next(iter(wrong))}"):
        parser.parse_object({"sampling": right | wrong})


@pytest.mark.parametrize(("sampler", "wrong"), [(LOCAL, {"rows": 0}), (SERVER, {"concurrency": 0})])
def test_a_sampler_takes_only_settings_within_their_ranges(sampler, wrong):
    parser = ArgumentParser()
    parser.add_argument("sampler", type=Sampler)
    parser.parse_object({"sampler": sampler})
    changed = sampler | {"init_args": sampler["init_args"] | wrong}
    with pytest.raises(InputError, match=next(iter(wrong))):
        parser.parse_object({"sampler": changed})
