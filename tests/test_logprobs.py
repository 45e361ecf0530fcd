"""Chunked, padded, bucketed log-probs against one naive forward per trajectory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_policy

from topr import logprobs
from topr.logprobs import pad, partition, response_log_probs, score, token_log_probs
from topr.policy import load_policy


def naive(model, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """log pi of each response token from the model's own logits, one sequence, no padding."""
    ids = torch.from_numpy(np.concatenate((prompt, response)))
    log_probs = model(ids[None]).logits[0].double().log_softmax(-1)
    return torch.stack([log_probs[len(prompt) - 1 + t, token] for t, token in enumerate(ids[len(prompt) :])])


def sequences(seed: int = 0, count: int = 7):
    rng = np.random.default_rng(seed)
    draw = lambda low, high: [rng.integers(3, 20, rng.integers(low, high)) for _ in range(count)]  # noqa: E731
    return draw(1, 9), draw(1, 15)


def test_padded_log_probs_equal_one_forward_per_trajectory(policy):
    model = load_policy(str(policy)).double()
    prompts, responses = sequences()
    log_probs_N, hidden_ND = response_log_probs(model, pad(prompts, responses))
    expected = torch.cat([naive(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(log_probs_N, expected, rtol=0, atol=1e-6)  # the model's own norms are float32
    assert hidden_ND.shape == (len(expected), 16)
    weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    ours = torch.autograd.grad((weights * log_probs_N).sum(), list(model.parameters()))
    theirs = torch.autograd.grad((weights * expected).sum(), list(model.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("positions", [1, 511, 512, 1300])
@pytest.mark.parametrize("operator", ["torch", "fallback"])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_head_equals_the_naive_one(monkeypatch, positions, operator, bias):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 0)  # chunks of 512, so that 1300 leaves an uneven tail
    if operator == "fallback":
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    torch.manual_seed(0)
    hidden = torch.randn(positions, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 12, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    target = torch.randint(37, (positions,))
    expected = F.linear(hidden, weight, offset).log_softmax(-1).gather(1, target[:, None])[:, 0]
    found = token_log_probs(hidden, weight, target, offset)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    scale = torch.randn(positions, dtype=torch.float64)
    inputs = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    for mine, other in zip(
        torch.autograd.grad((scale * found).sum(), inputs),
        torch.autograd.grad((scale * expected).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_soft_cap_of_the_logits_is_honoured(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    prompts, responses = sequences()
    found, _ = response_log_probs(model, pad(prompts, responses))
    expected = torch.cat([naive(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-5)


def test_autocast_keeps_log_probs_in_float32(policy):
    model = load_policy(str(policy))
    tokens = pad(*sequences())
    exact, _ = response_log_probs(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = response_log_probs(model, tokens)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.1


def test_score_keeps_the_order_and_equals_the_training_forward(policy):
    model = load_policy(str(policy))
    prompts, responses = sequences(count=23)
    together, _ = response_log_probs(model, pad(prompts, responses))
    for tokens in (40, 100, 10_000):
        np.testing.assert_allclose(
            np.concatenate(score(model, prompts, responses, tokens)), together.detach().numpy(), rtol=0, atol=2e-6
        )


@pytest.mark.parametrize("unit", [1, 2])
def test_partition_covers_everything_within_the_bound(unit):
    rng = np.random.default_rng(0)
    for _ in range(100):
        length = rng.integers(1, 60, unit * rng.integers(1, 16))
        bound = int(max(unit * length.max(), 200))
        runs = partition(length, bound, unit=unit)
        assert sorted(np.concatenate(runs)) == list(range(len(length)))
        assert all(len(run) * length[run].max() <= bound for run in runs)
        for run in runs:  # units stay whole
            assert np.array_equal(run // unit, np.repeat(run[::unit] // unit, unit))
        for parts in (len(runs), len(runs) + 1, 40):  # at least as many as the bound needs: it still holds
            balanced = partition(length, parts=parts, unit=unit)
            assert len(balanced) == parts and sorted(np.concatenate(balanced)) == list(range(len(length)))
            assert all(len(run) * length[run].max() <= bound for run in balanced if len(run))


def test_partition_balances():
    assert [len(run) for run in partition(np.array([10] * 12), parts=4)] == [3, 3, 3, 3]
    assert [len(run) for run in partition(np.array([90, 10, 10, 10, 10, 10, 10, 10, 10, 10]), parts=2)] == [1, 9]


def test_dropout_is_off_in_training_mode(tmp_path):
    folder = make_policy(tmp_path / "dropout", attention_dropout=0.5)
    model, tokens = load_policy(str(folder)).train(), pad(*sequences())
    assert torch.equal(response_log_probs(model, tokens)[0], response_log_probs(model, tokens)[0])
