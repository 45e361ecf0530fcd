"""TOPR's family against the paper's equations, computed without torch."""

import math

import numpy as np
import pytest
import torch

from topr.advantages import Baseline, PositiveShare, positive_share_of
from topr.io import InputError
from topr.losses import IS, KTO, REINFORCE, TIS, TOPR, LossOutput, PositivesOnly, rho
from topr.losses.base import check_output
from topr.losses.topr import log_limit

INFINITY = math.exp(20)
LIMITS = {  # a+, b+, a-, b-: the paper's Table 1, written here independently of the classes
    TOPR: (1, 1, 0, 1),
    REINFORCE: (1, 1, 1, 1),
    PositivesOnly: (1, 1, 0, 0),
    IS: (0, INFINITY, 0, INFINITY),
    TIS: (0, 1, 0, 1),
    lambda ratio: TOPR(0.2, 1.5, 0.1, 0.7, ratio): (0.2, 1.5, 0.1, 0.7),
}
RATIOS = ["sequence", "sequence_mean", "token"]


def batch(distance: float = 0.5):
    """Token log-probs of pi and mu for 40 trajectories, one array each, and advantages."""
    rng = np.random.default_rng(0)
    mu = [-rng.exponential(1, length) for length in rng.integers(1, 9, 40)]
    pi = [m + distance * rng.normal(size=len(m)) for m in mu]
    return pi, mu, rng.normal(size=40)


def evaluate(loss, pi, mu, advantage):
    """The loss's output, and its gradient at the log-probs, one array for each trajectory."""
    log_probs_N = torch.tensor(np.concatenate(pi), requires_grad=True)
    ref_log_probs_N = torch.tensor(np.concatenate(mu))
    length_B = torch.tensor([len(m) for m in mu])
    output = loss(log_probs_N, ref_log_probs_N, length_B, torch.tensor(advantage))
    output.loss_B.sum().backward()
    assert not any(value.requires_grad for value in output[1:])
    return output, [part.numpy() for part in log_probs_N.grad.split(length_B.tolist())]


def gradient_of(loss, pi, mu, advantage):
    return np.concatenate(evaluate(loss, pi, mu, advantage)[1])


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def taper(log_x: float, a: float, b: float) -> tuple[float, float]:
    """rho case by case, and the truncated ratio."""
    x = math.exp(log_x)
    truncated = min(max(x, a), b)
    if a <= x <= b:
        return x, truncated
    if truncated == 0:
        return 0.0, truncated
    return truncated * (1 + math.log(x / truncated)), truncated


def formula(d, A, limits, ratio: str):
    """A trajectory's loss and its derivative at each token, from the tokens' log-ratios d and A."""
    a, b = limits[:2] if A >= 0 else limits[2:]
    T = len(d)
    if ratio == "token":
        value, slope = np.transpose([taper(log_ratio, a, b) for log_ratio in d])
        return -A / T * sum(value), -A / T * slope
    if ratio == "sequence_mean":
        value, slope = taper(sum(d) / T, a, b)
        return -A * value, np.full(T, -A * slope / T)
    value, slope = taper(sum(d), a, b)
    return -A * value / T, np.full(T, -A * slope / T)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("distance", [0.0, 0.5, 1.5])
@pytest.mark.parametrize(("make", "limits"), LIMITS.items())
def test_value_and_gradient_equal_the_papers_equations(make, limits, distance, ratio):
    pi, mu, advantage = batch(distance)
    output, gradients = evaluate(make(ratio=ratio), pi, mu, advantage)
    for i, A in enumerate(advantage):
        value, slope = formula(pi[i] - mu[i], A, limits, ratio)
        same(output.loss_B[i].item(), value)
        same(gradients[i], slope)
        same(output.log_ratio_B[i], sum(pi[i] - mu[i]))
        same(output.weight_B[i], -sum(slope) / A)
        same(output.objective_B[i], -value * (len(slope) if ratio == "sequence" else 1))


def test_topr_equals_reinforce_on_policy():
    pi, mu, advantage = batch(distance=0)
    same(gradient_of(TOPR(), pi, mu, advantage), gradient_of(REINFORCE(), pi, mu, advantage))


def test_topr_at_baseline_minus_one_gives_twice_the_gradient_of_positives_only():
    pi, mu, advantage = batch()
    reward = np.sign(advantage)
    twice = gradient_of(TOPR(), pi, mu, Baseline(-1)(reward, None, None))
    same(twice, 2 * gradient_of(PositivesOnly(), pi, mu, reward))


def test_toprs_objective_is_bounded_above():
    """The paper's Proposition 3.2, trajectory by trajectory: log pi is at most 0."""
    _, mu, advantage = batch()
    log_mu = np.array([sum(m) for m in mu])
    for scale in (0, 1, 10, 1000):
        output, _ = evaluate(TOPR(), [m * scale for m in mu], mu, advantage)
        assert (output.objective_B.numpy() <= np.maximum(advantage, 0) * (1 - log_mu)).all()


def test_reinforce_gains_without_end_from_a_negative():
    one = torch.tensor([1])
    output = REINFORCE()(torch.tensor([-1e4]), torch.zeros(1), one, torch.tensor([-1.0]))
    assert output.objective_B.item() > 9e3


@pytest.mark.parametrize("make", LIMITS)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_nan_or_inf_for_log_ratios_up_to_ten_thousand(make, ratio, dtype):
    extremes = [0.0, 1e-8, -1e-8, 20, -20, 89, -104, 710, -745, 1e4, -1e4]
    log_pi_N = torch.tensor(extremes * 2, dtype=dtype, requires_grad=True)
    advantage_B = torch.ones(22, dtype=dtype)
    advantage_B[11:] = -1
    zero_N = torch.zeros(22, dtype=dtype)
    output = make(ratio=ratio)(log_pi_N, zero_N, torch.ones(22, dtype=int), advantage_B)
    output.loss_B.sum().backward()
    for values in (*output, log_pi_N.grad):
        assert torch.isfinite(values).all()


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 1), (0.5, 2), (0, math.inf), (0.3, 0.3)])
def test_rho_is_continuous_and_its_slope_is_the_truncated_ratio(a, b):
    h = torch.linspace(-30, 30, 6001, dtype=torch.float64, requires_grad=True)
    value = rho(h, log_limit(a), log_limit(b))
    (slope,) = torch.autograd.grad(value.sum(), h)
    truncated = h.detach().exp().clamp(a, min(b, INFINITY))
    torch.testing.assert_close(slope, truncated, rtol=1e-9, atol=1e-9)
    steps = value.detach().diff().abs()
    assert (steps <= 0.0101 * truncated[:-1].maximum(truncated[1:]) + 1e-12).all()


def test_truncation_is_reported():
    log_ratio_N = torch.tensor([0.5, 0.5, -3.0, 25.0, -1.0, 1e-6])
    length_B = torch.tensor([2, 1, 1, 1, 1])
    advantage_B = torch.tensor([1.0, -2.0, -1.0, 1.0, -1.0])
    arguments = (log_ratio_N, torch.zeros(6), length_B, advantage_B)
    assert TOPR()(*arguments).truncated_B.tolist() == [1, 0, 1, 0, 0]  # 1e-6 is rounding
    assert IS()(*arguments).truncated_B.tolist() == [0, 0, 1, 0, 0]  # e^25 exceeds e^20
    tokens = TOPR(ratio="token")(*arguments)
    assert tokens.truncated_B.tolist() == [1, 0, 1, 0, 0]


def test_an_advantage_of_zero_is_that_of_a_positive():
    one = torch.tensor([1])
    output = TOPR()(torch.tensor([-6.0]), torch.zeros(1), one, torch.zeros(1))
    assert output.weight_B.item() == 1
    losses = [
        KTO()(torch.tensor([-6.0]), torch.zeros(1), one, torch.tensor([a])) for a in (0.0, 1.0)
    ]
    assert losses[0].loss_B == losses[1].loss_B > 0.5


TRAINED = torch.zeros(2, requires_grad=True)


class Wrong(TOPR):
    """A loss that a user has got wrong."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B):
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2), "not Tensor"),
        (LossOutput(torch.zeros(()), *[torch.zeros(2)] * 4), "in loss_B"),
        (LossOutput(TRAINED, *[torch.zeros(2)] * 3, None), "in truncated_B"),
        (LossOutput(*[torch.zeros(2)] * 5), "see loss_B"),
        (LossOutput(TRAINED, TRAINED, *[torch.zeros(2)] * 3), "see objective_B"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(result, message):
    with pytest.raises(InputError, match=f"Wrong must return a LossOutput.* {message}"):
        check_output(Wrong(result))


def test_the_output_of_a_right_loss_is_accepted():
    check_output(Wrong(LossOutput(TRAINED, *[torch.zeros(2)] * 4)))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("c", [-0.9, -0.3, 0.0, 0.4, 0.8])
def test_share_and_baseline_invert_each_other(p, c):
    reward = np.repeat(np.float32([1, -1]), [round(100 * p), round(100 * (1 - p))])
    share = p * (1 - c) / (1 + c * (1 - 2 * p))  # the paper's, for rewards +-1
    same(positive_share_of(Baseline(c)(reward, None, None)), share)
    same(reward - PositiveShare(share)(reward, None, None), c)


@pytest.mark.parametrize("share", [0.02, 0.15, 0.5, 0.97])
def test_positive_share_of_real_rewards(share):
    reward = np.random.default_rng(0).normal(size=1000)
    advantage = PositiveShare(share)(reward, None, None)
    assert np.ptp(reward - advantage) < 1e-12  # one baseline for all
    same(advantage[advantage > 0].sum() / abs(advantage).sum(), share)
    same(positive_share_of(advantage), share)


def test_positive_share_of_no_signal_is_zero():
    assert positive_share_of(np.zeros(3)) == 0


def test_positive_share_needs_rewards_that_differ():
    with pytest.raises(InputError, match="all rewards are equal; .*Baseline"):
        PositiveShare(0.2)(np.ones(4), None, None)
    PositiveShare(0.2)(np.array([1, 1, 1, -1]), None, None)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"a_minus": 2.0}, {"a_minus": 1.0}),
        ({"a_plus": -1.0}, {"a_plus": 0.0}),
        ({"b_plus": math.nan}, {"b_plus": math.inf}),
    ],
)
def test_wrong_limits_are_refused_and_right_ones_are_not(wrong, right):
    with pytest.raises(InputError, match="0 <= a <= b"):
        TOPR(**wrong)
    TOPR(**right)
