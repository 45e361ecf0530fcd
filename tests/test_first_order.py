"""The first-order account of the effective share: against exact expectations, simulated noise and single gradients."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import ROOT

from topr import experiments
from topr.first_order import cosine, gain, length_ratio, quietest_share
from topr.losses.shares import baseline_for_share
from topr.policy import load_policy
from topr.regimes import REGIMES
from topr.trajectories import read_trajectories

GOOD = np.array([True, False, False, True, False])  # responses of a softmax policy


@pytest.fixture
def policy() -> np.ndarray:
    """Logits of responses of length 1."""
    return np.random.default_rng(0).normal(size=len(GOOD))


def found(logits: np.ndarray) -> tuple[dict, np.ndarray, np.ndarray]:
    """Exact products and variances, and the mean gradients by sign."""
    pi = np.exp(logits) / np.exp(logits).sum()
    gradient = np.eye(len(pi)) - pi  # of log π, a row for each response
    p, means, variances = pi[GOOD].sum(), [], []
    for chosen in (GOOD, ~GOOD):
        weight = pi[chosen] / pi[chosen].sum()
        means.append(weight @ gradient[chosen])
        variances.append(float(weight @ (gradient[chosen] ** 2).sum(1) - means[-1] @ means[-1]))
    plus, minus = means
    products = [float(plus @ plus), float(minus @ minus), float(plus @ minus)]
    return {"products": products, "variances": variances, "positive_share": float(p)}, plus, minus


def test_on_policy_negatives_point_away_from_positives_and_are_p_over_1_minus_p_as_long(policy):
    exact, *_ = found(policy)
    assert cosine(exact) == pytest.approx(-1, abs=1e-12)
    p = exact["positive_share"]
    assert length_ratio(exact) == pytest.approx(p / (1 - p), rel=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("share", [0.05, 0.15, 0.5, 0.9])
def test_the_gain_is_what_a_small_step_gains(policy, p, share):
    """Against the chance of a good response after a step of 1e-6, in exact expectation."""
    exact, plus, minus = found(policy)
    c, step = baseline_for_share(p, share), 1e-6
    direction = p * (1 - c) * plus - (1 - p) * (1 + c) * minus
    ends = [np.exp(policy + sign * step * direction) for sign in (1, -1)]
    chance = [end[GOOD].sum() / end.sum() for end in ends]
    # its gradient is own p E+, of which own p E+ - (1 - own p) E- is twice, as the difference of both steps is
    assert gain(exact, p, share) == pytest.approx((chance[0] - chance[1]) / step, rel=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_quietest_share_has_the_most_signal_for_its_noise(policy, p):
    exact, plus, minus = found(policy)
    grid = np.linspace(0.01, 0.99, 981)

    def quality(share: float) -> float:
        c = baseline_for_share(p, share)
        noise = p * (1 - c) ** 2 * exact["variances"][0] + (1 - p) * (1 + c) ** 2 * exact["variances"][1]
        return gain(exact, p, share) / math.sqrt(noise)

    assert quietest_share(exact, p) == pytest.approx(grid[np.argmax([quality(share) for share in grid])], abs=2e-3)


def test_products_and_variances_are_those_of_single_gradients(tmp_path):
    """Against transformers' own forward, one response after the other, and products pair by pair."""
    place = experiments.home(tmp_path, "standard", 1)
    REGIMES["standard"].make(place, 1, {"samples": 3})
    rows = read_trajectories(place / "train.parquet")
    result = experiments.gradients(tmp_path, tmp_path, "standard", 1, count=100)
    rng = np.random.default_rng(1)
    model, matrices, orders = load_policy(str(ROOT / "data/arithmetic/base")).eval(), [], []
    model.config._attn_implementation = "eager"
    for sign in (1, -1):
        order = rng.permutation([i for i, t in enumerate(rows) if t.reward * sign > 0])[:100]
        orders.append(order)
        gradients = []
        for t in (rows[i] for i in order):
            ids = torch.tensor([[*t.prompt_ids, *t.response_ids]])
            log_probs = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].log_softmax(-1)
            model.zero_grad()
            log_probs.gather(1, torch.tensor(t.response_ids)[:, None]).mean().backward()
            gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]).double().numpy())
        matrices.append(np.array(gradients))
    lengths = [np.array([[len(rows[i].response_ids)] for i in order]) for order in orders]
    whole = [length * matrix for length, matrix in zip(lengths, matrices, strict=True)]

    def product(of: list[np.ndarray], one: int, two: int) -> float:
        """The mean over all pairs of responses to different prompts."""
        prompts = [np.array([rows[i].prompt_id for i in orders[sign]]) for sign in (one, two)]
        different = prompts[0][:, None] != prompts[1]
        return float((of[one] @ of[two].T)[different].mean())

    pairs = [(0, 0), (1, 1), (0, 1)]
    assert result["products"] == pytest.approx([product(matrices, *pair) for pair in pairs], rel=1e-3)
    assert result["whole"] == pytest.approx([product(whole, *pair) for pair in pairs], rel=1e-3)
    for sign, matrix in enumerate(matrices):
        assert result["variances"][sign] == pytest.approx(
            (matrix**2).sum(1).mean() - result["products"][sign], rel=1e-4
        )
    json.dumps(result)
