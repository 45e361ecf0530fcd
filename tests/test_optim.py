"""Adafactor against transformers' and torch's."""

import pytest
import torch
from transformers.optimization import Adafactor as TransformersAdafactor

from topr.optim import Adafactor


def parameters(seed: int = 0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((7,), (5, 3), (2, 4, 6), (1, 1))]


def run(make, steps: int = 20):
    """Parameters after steps on gradients of very different sizes."""
    weights = parameters()
    optimizer = make(weights)
    torch.manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight) * 10.0 ** torch.randint(-3, 2, weight.shape)
        optimizer.step()
    return weights


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_transformers_with_an_absolute_learning_rate(weight_decay):
    theirs = run(
        lambda p: TransformersAdafactor(
            p,
            lr=1e-2,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
            weight_decay=weight_decay,
        )
    )
    for mine, other in zip(
        run(lambda p: Adafactor(p, 1e-2, False, weight_decay)), theirs, strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_equals_torch_when_parameters_scale_the_rate():
    theirs = run(lambda p: torch.optim.Adafactor(p, lr=0.3))
    for mine, other in zip(
        run(lambda p: Adafactor(p, 0.3, scale_parameter=True)), theirs, strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_second_moments_are_factored_and_survive_a_checkpoint():
    weights = parameters()
    optimizer = Adafactor(weights, lr=1e-2)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert {name: tuple(value.shape) for name, value in optimizer.state[weights[2]].items()} == {
        "step": (), "row": (2, 4), "column": (2, 6),
    }  # fmt: skip
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    other = Adafactor(copies, lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    for optimizer_, group in ((optimizer, weights), (other, copies)):
        for weight in group:
            weight.grad = torch.full_like(weight, 2.0)
        optimizer_.step()
    for mine, copy in zip(weights, copies, strict=True):
        assert torch.equal(mine, copy)


def test_negative_settings_are_rejected():
    for settings in ({"lr": -1}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="must not be negative"):
            Adafactor(parameters(), **settings)
    Adafactor(parameters(), lr=0, weight_decay=0)


def test_the_learning_rate_is_absolute():
    """The first step on gradients of one size moves every weight by the rate, however large the weights are."""
    weights = [torch.nn.Parameter(torch.full((3, 4), size)) for size in (1e-3, 1.0, 1e3)]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, 5.0)
    Adafactor(weights, lr=0.25).step()
    for weight, old in zip(weights, before, strict=True):
        torch.testing.assert_close(
            old - weight, torch.full_like(weight, 0.25), rtol=1e-3, atol=1e-6
        )
