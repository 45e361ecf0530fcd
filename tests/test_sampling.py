"""Samples follow the policy's full distribution, end where they should, and can be repeated."""

from collections import Counter

import numpy as np
import pytest
import torch
from conftest import make_policy

from topr.io import ArgumentParser, InputError
from topr.policy import Policy, load_policy
from topr.sampling import LocalSampler, Response, Sampler, Sampling

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=1)
PROMPTS = [[5, 6], [7], [8, 9, 10, 11]]


def first_token(policy: Policy, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        return policy.logits(torch.tensor([prompt]))[0, -1].double().softmax(-1).numpy()


@pytest.fixture
def policy(tmp_path) -> Policy:
    return load_policy(str(make_policy(tmp_path / "base", scale=0.5)))


def test_counts_follow_the_policy_whatever_its_generation_config_says(policy):
    policy.model.generation_config.update(
        top_k=1, temperature=0.1, top_p=0.2, min_p=0.9, typical_p=0.1, epsilon_cutoff=0.1, repetition_penalty=3.0,
        no_repeat_ngram_size=1, suppress_tokens=[3, 4, 5], min_new_tokens=1, do_sample=True,
    )  # fmt: skip
    n = 4000
    for prompt, responses in zip(
        PROMPTS, LocalSampler(700).sample(policy, PROMPTS, n, PLAIN, 0), strict=True
    ):
        probability = first_token(policy, prompt)
        counts = Counter(response.ids[0] for response in responses)
        found = np.array([counts[i] for i in range(len(probability))]) / n
        # padding and end tokens included: every token keeps its probability
        assert np.abs(found - probability).max() < 4.5 * np.sqrt(0.25 / n)


def test_top_k_and_greedy(policy):
    best = np.argsort(-first_token(policy, PROMPTS[0]))
    (cut,) = LocalSampler().sample(policy, PROMPTS[:1], 500, Sampling(1.0, 2, 1.0, 1), 0)
    assert {response.ids[0] for response in cut} == set(best[:2].tolist())
    (greedy,) = LocalSampler().sample(policy, PROMPTS[:1], 20, Sampling(0.0, 0, 1.0, 1), 0)
    assert {response.ids[0] for response in greedy} == {best[0]}


def test_responses_end_with_their_first_end_token(policy):
    sampling = Sampling(1.0, 0, 1.0, 12)
    for responses in LocalSampler().sample(policy, PROMPTS, 200, sampling, 0):
        assert {response.finished for response in responses} == {True, False}
        for ids, finished in responses:
            assert (1 in ids) == finished and 1 not in ids[:-1]
            assert finished or len(ids) == 12
    policy.model.generation_config.eos_token_id = [1, 4]  # several end tokens, as Llama 3 has
    for responses in LocalSampler().sample(policy, PROMPTS, 50, sampling, 0):
        assert all(
            not {1, 4} & set(ids[:-1]) and finished == (ids[-1] in (1, 4))
            for ids, finished in responses
        )


def test_a_stop_string_ends_a_response_when_it_is_complete(policy):
    tokenizer = policy.tokenizer
    prompts, stop = (
        [tokenizer("12+3")["input_ids"], [7]],
        ["1", "+3"],
    )  # the prompt's own text does not count
    ended = 0
    for responses in LocalSampler(64).sample(
        policy, prompts, 200, Sampling(1.0, 0, 1.0, 12, stop), 0
    ):
        assert len(responses) == 200
        for ids, finished in responses:
            text, before = tokenizer.decode(ids), tokenizer.decode(ids[:-1])
            assert not any(cut in before for cut in stop)
            stopped = any(cut in text for cut in stop)
            assert stopped or finished or len(ids) == 12
            ended += stopped and text.endswith("+3")
    assert ended > 0


def test_samples_repeat_and_leave_random_state_and_mode_alone(policy):
    sampling = Sampling(1.0, 0, 1.0, 8)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    policy.model.train()
    first = LocalSampler().sample(policy, PROMPTS, 5, sampling, 7)
    assert torch.equal(state, torch.get_rng_state()) and policy.model.training
    policy.model.eval()
    assert (
        first == LocalSampler().sample(policy, PROMPTS, 5, sampling, 7)
        and not policy.model.training
    )
    assert first != LocalSampler().sample(policy, PROMPTS, 5, sampling, 8)
    assert (
        isinstance(first[0][0], Response)
        and LocalSampler().sample(policy, [], 5, sampling, 7) == []
    )


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 1e-5}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}]
    + [{"top_p": 0.0}, {"top_p": 1.1}, {"max_new_tokens": 0}, {"stop": ["a", ""]}],
)
def test_a_value_outside_its_range_is_rejected(wrong):
    parser = ArgumentParser()
    parser.add_argument("sampling", type=Sampling)
    bounds = {
        "temperature": 1e-4,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 1,
        "stop": ["\n\n\n", "a\n\nb", " "],
    }
    for right in (bounds, bounds | {"temperature": 0}):
        args = parser.parse_object({"sampling": right})
        assert parser.instantiate(args).sampling == Sampling(**right)
    with pytest.raises(InputError, match=f"sampling.{next(iter(wrong))}"):
        parser.parse_object({"sampling": bounds | wrong})


def test_a_sampler_takes_only_settings_within_their_ranges():
    parser = ArgumentParser()
    parser.add_argument("sampler", type=Sampler)
    for name, right, wrong in (
        ("LocalSampler", {"rows": 1}, [{"rows": 0}]),
        (
            "ServerSampler",
            {"url": ["http://127.0.0.1:8000/v1"]},
            [{"flavour": "tgi"}, {"concurrency": 0}, {"timeout": 0.0}, {"retries": -1}],
        ),
    ):
        given = {"class_path": f"topr.sampling.{name}", "init_args": right}
        parser.parse_object({"sampler": given})
        for change in wrong:
            with pytest.raises(InputError, match=next(iter(change))):
                parser.parse_object({"sampler": given | {"init_args": right | change}})
