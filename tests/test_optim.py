"""Adafactor against transformers'; a schedule."""

import torch
from transformers.optimization import Adafactor as TransformersAdafactor

from topr.optim import Adafactor


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((7,), (5, 3), (2, 4, 6), (1, 1))]


def train(weights: list, optimizer: torch.optim.Optimizer, seed: int = 1) -> list:
    """The weights after 20 steps on gradients of very different sizes."""
    torch.manual_seed(seed)
    for _ in range(20):
        for weight in weights:
            weight.grad = torch.randn_like(weight) * 10.0 ** torch.randint(-3, 2, weight.shape)
        optimizer.step()
    return weights


def test_adafactor_equals_that_of_transformers():
    weights = parameters()
    found = train(weights, Adafactor(weights, lr=1e-2))
    absolute = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    weights = parameters()
    theirs = TransformersAdafactor(weights, lr=1e-2, **absolute)
    torch.testing.assert_close(found, train(weights, theirs), rtol=0, atol=1e-5)


def test_second_moments_are_factored_and_survive_a_checkpoint():
    weights = parameters()
    optimizer = Adafactor(weights, lr=1e-2)
    train(weights, optimizer)
    shapes = {name: tuple(value.shape) for name, value in optimizer.state[weights[2]].items()}
    assert shapes == {"step": (), "row": (2, 4), "column": (2, 6)}
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    other = Adafactor(copies, lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    train(weights, optimizer, seed=2)
    assert all(map(torch.equal, train(copies, other, seed=2), weights))
