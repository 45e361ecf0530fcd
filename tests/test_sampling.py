"""Samples follow the policy's full distribution, are cut rightly and can be repeated."""

from collections import Counter

import numpy as np
import pytest
import torch
from conftest import make_policy

from topr.policy import load_policy
from topr.sampling import LocalSampler, Response, Sampling
from topr.tokenizer import load_tokenizer

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=1)
PROMPTS = [[5, 6], [7], [8, 9, 10, 11]]


def first_token(model, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1).numpy()


def load(tmp_path, **changes):
    policy = str(make_policy(tmp_path / "base", scale=0.5, **changes))
    return load_policy(policy), load_tokenizer(policy)


@pytest.mark.parametrize("pad", ["<pad>", None])  # without a pad token the end token fills up
def test_counts_follow_the_policy_whatever_its_generation_config_says(tmp_path, pad):
    model, tokenizer = load(tmp_path)
    tokenizer.pad_token = pad
    model.generation_config.update(
        top_k=1, temperature=0.1, top_p=0.2, min_p=0.9, typical_p=0.1, epsilon_cutoff=0.1, repetition_penalty=3.0,
        no_repeat_ngram_size=1, suppress_tokens=[3, 4, 5], min_new_tokens=1, do_sample=True,
    )  # fmt: skip
    n = 4000
    for prompt, responses in zip(
        PROMPTS, LocalSampler(700).sample(model, tokenizer, PROMPTS, n, PLAIN, 0), strict=True
    ):
        probability = first_token(model, prompt)
        counts = Counter(response.ids[0] for response in responses)
        found = np.array([counts[i] for i in range(len(probability))]) / n
        # pads and end tokens included: every token keeps its probability
        assert np.abs(found - probability).max() < 4.5 * np.sqrt(0.25 / n)


def test_temperature_top_k_and_greedy(tmp_path):
    model, tokenizer = load(tmp_path)
    probability = first_token(model, PROMPTS[0])
    best = np.argsort(-probability)
    (cut,) = LocalSampler().sample(model, tokenizer, PROMPTS[:1], 500, Sampling(1.0, 2, 1.0, 1), 0)
    assert {response.ids[0] for response in cut} == set(best[:2].tolist())
    (greedy,) = LocalSampler().sample(model, tokenizer, PROMPTS[:1], 20, Sampling(0.0, 0, 1.0, 1), 0)
    assert {response.ids[0] for response in greedy} == {best[0]}


def test_responses_end_with_their_first_end_token(tmp_path):
    model, tokenizer = load(tmp_path)
    sampling = Sampling(1.0, 0, 1.0, 12)
    for responses in LocalSampler().sample(model, tokenizer, PROMPTS, 200, sampling, 0):
        assert {response.finished for response in responses} == {True, False}
        for ids, finished in responses:
            assert (1 in ids) == finished and 1 not in ids[:-1]
            assert finished or len(ids) == 12
    model.generation_config.eos_token_id = [1, 4]  # several end tokens, as Llama 3 has
    for responses in LocalSampler().sample(model, tokenizer, PROMPTS, 50, sampling, 0):
        assert all(not {1, 4} & set(ids[:-1]) for ids, _ in responses)


def test_stop_texts_end_a_response_where_they_are_complete(tmp_path):
    model, tokenizer = load(tmp_path)
    prompts, stop = [tokenizer("12+3")["input_ids"], [7]], ["1", "+3"]  # the prompt's own text does not count
    ended = 0
    for responses in LocalSampler(300).sample(model, tokenizer, prompts, 300, Sampling(1.0, 0, 1.0, 12, stop), 0):
        for ids, finished in responses:
            text, before = tokenizer.decode(ids), tokenizer.decode(ids[:-1])
            assert not any(cut in before for cut in stop)
            stopped = any(cut in text for cut in stop)
            assert stopped or finished or len(ids) == 12
            ended += stopped and text.endswith("+3")
    assert ended > 0


def test_samples_repeat_and_leave_the_random_state_alone(tmp_path):
    model, tokenizer = load(tmp_path)
    sampling = Sampling(1.0, 0, 1.0, 8)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = LocalSampler().sample(model, tokenizer, PROMPTS, 5, sampling, 7)
    assert torch.equal(state, torch.get_rng_state())
    assert first == LocalSampler().sample(model, tokenizer, PROMPTS, 5, sampling, 7)
    assert first != LocalSampler().sample(model, tokenizer, PROMPTS, 5, sampling, 8)
    assert isinstance(first[0][0], Response)
