"""The losses against the paper's equations on a policy small enough to enumerate every trajectory."""

import itertools
import math

import numpy as np
import pytest
import torch

from topr.io import InputError
from topr.losses import (
    IS,
    REINFORCE,
    TIS,
    TOPR,
    LossOutput,
    PositivesOnly,
    advantage_share,
    baseline_for_rewards,
    rho,
)
from topr.module import PolicyModule
from topr.tasks import Arithmetic

END = 2
INFINITY = math.exp(20)
LIMITS = {  # a+, b+, a-, b-: the paper's Table 1, written here independently of the classes
    TOPR: (1, 1, 0, 1),
    REINFORCE: (1, 1, 1, 1),
    PositivesOnly: (1, 1, 0, 0),
    IS: (0, INFINITY, 0, INFINITY),
    TIS: (0, 1, 0, 1),
}
LOSSES = [*LIMITS, lambda **k: TOPR(0.2, 1.5, 0.1, 0.7, **k)]
ROWS = [*LIMITS.values(), (0.2, 1.5, 0.1, 0.7)]


def trajectories() -> list[tuple[int, ...]]:
    """Every response over {0, 1, end} of at most three tokens: 2 + 4 + 8 that end or are cut, and the end alone."""
    ended = [(*head, END) for n in range(3) for head in itertools.product((0, 1), repeat=n)]
    return ended + list(itertools.product((0, 1), repeat=3))


STATES = [
    head for n in range(3) for head in itertools.product((0, 1), repeat=n)
]  # prefixes that are continued


def log_softmax(theta: np.ndarray) -> np.ndarray:
    return theta - np.log(np.exp(theta).sum(axis=-1, keepdims=True))


def token_log_probs(theta: np.ndarray, tau: tuple[int, ...]) -> np.ndarray:
    return np.array(
        [log_softmax(theta)[STATES.index(tau[:t])][token] for t, token in enumerate(tau)]
    )


def grad_log_prob(theta: np.ndarray, tau: tuple[int, ...]) -> np.ndarray:
    """The gradient of log pi(tau) in closed form: indicator minus probability, state by state."""
    gradient = np.zeros_like(theta)
    for t, token in enumerate(tau):
        state = STATES.index(tau[:t])
        gradient[state] -= np.exp(log_softmax(theta)[state])
        gradient[state, token] += 1
    return gradient


def setting(seed: int = 0, distance: float = 1.5):
    """Logits of pi and mu, [states, 3], and a real-valued reward for each trajectory."""
    rng = np.random.default_rng(seed)
    mu = rng.normal(size=(len(STATES), 3))
    return mu + distance * rng.normal(size=mu.shape), mu, rng.normal(size=len(trajectories()))


def loss_terms(loss, theta: torch.Tensor, mu: np.ndarray, reward: np.ndarray):
    """`loss` on all trajectories at once, each one's term, and mu(tau) by which the expectation weighs it."""
    taus = trajectories()
    log_pi = torch.log_softmax(theta, dim=-1)
    log_pi_N = torch.stack(
        [log_pi[STATES.index(tau[:t]), token] for tau in taus for t, token in enumerate(tau)]
    )
    log_mu_N = torch.from_numpy(np.concatenate([token_log_probs(mu, tau) for tau in taus]))
    advantage = loss.advantages(reward, np.zeros(len(taus), dtype=int)).astype(np.float64)
    length_B = torch.tensor([len(tau) for tau in taus])
    output = loss(log_pi_N, log_mu_N, length_B, torch.from_numpy(advantage))
    return output, torch.tensor(
        [math.exp(token_log_probs(mu, tau).sum()) for tau in taus], dtype=torch.float64
    )


def autograd(loss, theta: np.ndarray, mu: np.ndarray, reward: np.ndarray) -> np.ndarray:
    parameter = torch.tensor(theta, requires_grad=True)
    output, mu_B = loss_terms(loss, parameter, mu, reward)
    (gradient,) = torch.autograd.grad((mu_B * output.loss_B).sum(), parameter)
    return gradient.numpy()


def test_the_enumerated_trajectories_have_probability_one():
    theta, mu, _ = setting()
    assert sum(math.exp(token_log_probs(mu, tau).sum()) for tau in trajectories()) == pytest.approx(
        1, abs=1e-12
    )


@pytest.mark.parametrize("baseline", [0.0, 0.3])
@pytest.mark.parametrize(("make", "limits"), zip(LOSSES, ROWS, strict=True))
def test_gradient_equals_the_papers_equation(make, limits, baseline):
    theta, mu, reward = setting()
    a_plus, b_plus, a_minus, b_minus = limits
    expected = np.zeros_like(theta)
    for tau, R in zip(trajectories(), reward, strict=True):
        advantage = float(np.float32(R - baseline))  # the data module stores advantages in float32
        ratio = math.exp(token_log_probs(theta, tau).sum() - token_log_probs(mu, tau).sum())
        low, high = (a_plus, b_plus) if advantage >= 0 else (a_minus, b_minus)
        weight = math.exp(token_log_probs(mu, tau).sum()) * min(max(ratio, low), high)
        expected -= weight * advantage * grad_log_prob(theta, tau) / len(tau)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(
        autograd(make(baseline=baseline), theta, mu, reward), expected, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(("make", "limits"), zip(LOSSES, ROWS, strict=True))
def test_comparison_ratios_follow_their_definitions(make, limits):
    theta, mu, reward = setting()
    a_plus, b_plus, a_minus, b_minus = limits
    sequence_mean, token = np.zeros_like(theta), np.zeros_like(theta)
    for tau, R in zip(trajectories(), reward, strict=True):
        advantage, T = float(np.float32(R)), len(tau)
        low, high = (a_plus, b_plus) if advantage >= 0 else (a_minus, b_minus)
        probability = math.exp(token_log_probs(mu, tau).sum())
        log_ratio = token_log_probs(theta, tau) - token_log_probs(mu, tau)
        weight = min(max(math.exp(log_ratio.mean()), low), high)
        sequence_mean -= probability * advantage * weight * grad_log_prob(theta, tau) / T
        for t, symbol in enumerate(tau):
            state = STATES.index(tau[:t])
            gradient = np.zeros_like(theta)
            gradient[state] -= np.exp(log_softmax(theta)[state])
            gradient[state, symbol] += 1
            token -= (
                probability * advantage / T * min(max(math.exp(log_ratio[t]), low), high) * gradient
            )
    for ratio, expected in (("sequence_mean", sequence_mean), ("token", token)):
        np.testing.assert_allclose(
            autograd(make(ratio=ratio), theta, mu, reward), expected, rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("make", LOSSES)
@pytest.mark.parametrize("ratio", ["sequence", "sequence_mean", "token"])
def test_finite_differences_agree_with_autograd(make, ratio):
    theta, mu, reward = setting(seed=3)
    loss, gradient, step = make(ratio=ratio), autograd(make(ratio=ratio), theta, mu, reward), 1e-6

    def value(logits: np.ndarray) -> float:
        output, mu_B = loss_terms(loss, torch.from_numpy(logits), mu, reward)
        return float((mu_B * output.loss_B).sum())

    for index in np.ndindex(theta.shape):
        moved = np.zeros_like(theta)
        moved[index] = step
        assert (value(theta + moved) - value(theta - moved)) / (2 * step) == pytest.approx(
            gradient[index], abs=1e-7
        )


def test_topr_equals_reinforce_on_policy():
    _, mu, reward = setting()
    np.testing.assert_allclose(
        autograd(TOPR(), mu, mu, reward), autograd(REINFORCE(), mu, mu, reward), rtol=0, atol=1e-14
    )


@pytest.mark.filterwarnings("ignore:no trajectory has a negative advantage")
def test_topr_at_baseline_minus_one_gives_twice_the_gradient_of_positives_only():
    theta, mu, reward = setting()
    reward = np.where(reward > 0, 1.0, -1.0)
    twice = autograd(TOPR(baseline=-1), theta, mu, reward)
    np.testing.assert_allclose(
        twice, 2 * autograd(PositivesOnly(), theta, mu, reward), rtol=0, atol=1e-14
    )


def test_objective_is_bounded_above_with_a_minus_zero_and_not_for_reinforce():
    _, mu, reward = setting()
    log_mu = np.array([token_log_probs(mu, tau).sum() for tau in trajectories()])
    bound = sum(math.exp(m) * A * (1 - m) for m, A in zip(log_mu, reward, strict=True) if A > 0)
    rng, objectives = np.random.default_rng(1), {TOPR: [], REINFORCE: []}
    for scale in (1, 10, 100, 1000):
        theta = torch.from_numpy(scale * rng.normal(size=mu.shape))
        for make, values in objectives.items():
            output, mu_B = loss_terms(make(), theta, mu, reward)
            values.append(float((mu_B * output.objective_B).sum()))
    assert max(objectives[TOPR]) <= bound
    # the worst trajectory alone, driven away: REINFORCE gains without end
    worst = trajectories()[int(reward.argmin())]
    gains = {TOPR: [], REINFORCE: []}
    for push in (0, 1e2, 1e3, 1e4):
        log_ratio = torch.full((len(worst),), -push / len(worst), dtype=torch.float64)
        for make, values in gains.items():
            output = make()(
                log_ratio,
                torch.zeros_like(log_ratio),
                torch.tensor([len(worst)]),
                torch.tensor([-1.0]),
            )
            values.append(float(output.objective_B))
    assert max(gains[TOPR]) <= 0
    assert gains[REINFORCE][-1] > 9e3


@pytest.mark.parametrize("make", LOSSES)
@pytest.mark.parametrize("ratio", ["sequence", "sequence_mean", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_nan_or_inf_for_log_ratios_up_to_ten_thousand(make, ratio, dtype):
    log_ratio_N = torch.tensor(
        [0.0, 1e-8, -1e-8, 20, -20, 89, -104, 710, -745, 1e4, -1e4] * 2, dtype=dtype
    )
    log_pi_N = log_ratio_N.requires_grad_()
    count = len(log_ratio_N)
    advantage_B = torch.tensor([1.0] * (count // 2) + [-1.0] * (count // 2), dtype=dtype)
    output = make(ratio=ratio)(
        log_pi_N, torch.zeros(count, dtype=dtype), torch.ones(count, dtype=int), advantage_B
    )
    output.loss_B.sum().backward()
    for values in (*output, log_pi_N.grad):
        assert torch.isfinite(values).all()


def test_rho_is_continuous_and_its_slope_is_the_truncated_ratio():
    h = torch.linspace(-30, 30, 6001, dtype=torch.float64, requires_grad=True)
    for a, b in [(0, 0), (0, 1), (1, 1), (0.5, 2), (0, math.inf), (0.3, 0.3)]:
        (slope,) = torch.autograd.grad(rho(h, a, b).sum(), h)
        expected = h.detach().exp().clamp(a, min(b, INFINITY))
        torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-9)
        value = rho(h, a, b).detach()
        limit = expected[:-1].maximum(expected[1:]) * 0.0101
        assert (value.diff().abs() <= limit + 1e-12).all()


def test_statistics_report_log_ratio_weight_and_truncation():
    log_ratio_N = torch.tensor([0.5, 0.5, -3.0, -3.0, 25.0, -1.0])
    length_B, advantage_B = torch.tensor([2, 2, 1, 1]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    topr = TOPR()(log_ratio_N, torch.zeros(6), length_B, advantage_B)
    torch.testing.assert_close(topr.log_ratio_B, torch.tensor([1.0, -6.0, 25.0, -1.0]))
    torch.testing.assert_close(topr.weight_B, torch.tensor([1.0, math.exp(-6), 1.0, 1.0]))
    torch.testing.assert_close(topr.truncated_B, torch.tensor([1.0, 0.0, 1.0, 0.0]))
    importance = IS()(log_ratio_N, torch.zeros(6), length_B, advantage_B)
    assert importance.truncated_B.tolist() == [
        0,
        0,
        1,
        0,
    ]  # hits of e^20, which stands for infinity


class Sum(TOPR):
    """A loss that a user has got wrong."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B):
        outputs = {0: log_probs_N.sum(), 0.5: LossOutput(log_probs_N.sum(), *[log_probs_N] * 4)}
        return outputs.get(self.baseline, LossOutput(*[advantage_B] * 5))


@pytest.mark.parametrize(
    ("baseline", "found"),
    [
        (0, "gave Tensor"),
        (0.5, r"gave loss_B \[\], objective_B \[4\]"),
        (1, "gave a loss_B without"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(baseline, found):
    with pytest.raises(InputError, match=f"Sum must return LossOutput\\(loss_B, .* but {found}"):
        PolicyModule("nowhere", Arithmetic(), Sum(baseline=baseline), torch.optim.SGD)


def test_an_advantage_of_zero_is_that_of_a_positive():
    length_B, zero = torch.tensor([2]), torch.zeros(2)
    assert TOPR()(zero - 3, zero, length_B, torch.tensor([0.0])).weight_B.item() == 1
    assert TOPR()(zero - 3, zero, length_B, torch.tensor([-1.0])).weight_B.item() == pytest.approx(
        math.exp(-6)
    )


def test_share_and_baseline_invert_each_other():
    for p, c in itertools.product((0.05, 0.1, 0.5, 0.9), (-0.9, -0.3, 0.0, 0.4, 0.8)):
        reward = np.array([1.0] * round(100 * p) + [-1.0] * round(100 * (1 - p)))
        share = p * (1 - c) / (1 + c * (1 - 2 * p))  # the paper's, for rewards +-1
        assert advantage_share(reward - c) == pytest.approx(share, abs=1e-12)
        assert baseline_for_rewards(reward, share) == pytest.approx(c, abs=1e-9)


def test_share_of_real_rewards_by_bisection():
    reward = np.random.default_rng(0).normal(size=1000)
    for share in (0.02, 0.15, 0.5, 0.97):
        advantage = TOPR(positive_share=share).advantages(reward, np.zeros(1000, dtype=int))
        assert advantage_share(advantage) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words", "correction"),
    [
        ({"a_minus": 2.0}, "0 <= a <= b", {"a_minus": 1.0}),
        ({"b_plus": 1e10}, "0 <= a <= b", {"b_plus": math.inf}),
        ({"a_plus": -1.0}, "0 <= a <= b", {"a_plus": 0.0}),
        ({"b_plus": math.nan}, "0 <= a <= b", {"b_plus": 1.0}),
        ({"a_plus": math.inf, "b_plus": math.inf}, "0 <= a <= b", {"a_plus": 1.0}),
        ({"baseline": 0.1, "positive_share": 0.2}, "both", {"baseline": 0.0}),
        ({"positive_share": 1.0}, "strictly between", {"positive_share": 0.99}),
        ({"baseline": math.nan}, "finite", {"baseline": -0.5}),
        ({"ratio": "tokens"}, "one of sequence", {"ratio": "token"}),
    ],
)
def test_bad_arguments_are_rejected_and_corrected_ones_are_not(arguments, words, correction):
    with pytest.raises(InputError, match=words):
        TOPR(**arguments)
    TOPR(**arguments | correction)


def test_rewards_without_a_signal_are_rejected_or_warned_about():
    ones, group = np.ones(4), np.zeros(4, dtype=int)
    with pytest.raises(InputError, match="every reward is 1"):
        TOPR(positive_share=0.2).advantages(ones, group)
    with pytest.raises(InputError, match="no trajectory has a gradient"):
        PositivesOnly().advantages(-ones, group)
    with pytest.warns(UserWarning, match="only positives"):
        TOPR().advantages(ones, group)
    with pytest.warns(UserWarning, match="0/1 rewards"):
        TOPR().advantages(np.array([0.0, 1.0, 1.0, 0.0]), group)
    with pytest.warns(UserWarning, match="every trajectory has a negative"):
        TOPR().advantages(-ones, group)
