"""The comparators against their formulas, written here a second time without torch, and the identities between them."""

import math

import numpy as np
import pytest
import torch

from topr.io import InputError
from topr.losses import (
    CISPO,
    DPO,
    GRPO,
    GSPO,
    IS,
    KTO,
    OPMD,
    PPO,
    REINFORCE,
    RLOO,
    TOPR,
    AsymRE,
    RECOneSide,
    RECRing,
    RECTwoSide,
    REDDrop,
    REDWeight,
    silent_groups,
)

INF = math.inf


def batch(seed: int = 0, distance: float = 0.5, count: int = 40):
    """Token log-probs of pi and mu, one array a trajectory, rewards of +-1 and groups of 1 to 8."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, count)
    mu = [-rng.exponential(1, n) for n in lengths]
    pi = [m + distance * rng.normal(size=len(m)) for m in mu]
    group = np.sort(rng.integers(0, count // 5, count))
    return pi, mu, rng.choice([-1.0, 1.0], count), group


def ours(loss, pi, mu, advantage):
    """Losses and their gradients at the token log-probs, one array a trajectory."""
    log_probs_N = torch.tensor(np.concatenate(pi), requires_grad=True)
    length_B = torch.tensor([len(m) for m in mu])
    output = loss(
        log_probs_N,
        torch.tensor(np.concatenate(mu)),
        length_B,
        torch.tensor(advantage, dtype=torch.float64),
    )
    (gradient_N,) = torch.autograd.grad(output.loss_B.sum(), log_probs_N)
    return output, [part.numpy() for part in gradient_N.split(length_B.tolist())]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# A trajectory's loss and its derivative at each token's log-prob, from the token log-ratios d, the log-probs lp and A.


def ppo(d, lp, A, low=0.2, high=0.2):
    loss, slope = 0.0, np.zeros(len(d))
    for t, x in enumerate(d):
        r = math.exp(x)
        free, clipped = r * A, min(max(r, 1 - low), 1 + high) * A
        loss -= min(free, clipped) / len(d)
        slope[t] = -r * A / len(d) if free <= clipped else 0.0
    return loss, slope


def ppo_of_sequence(d, lp, A, low=0.2, high=0.2):
    loss, slope = ppo([sum(d)], None, A, low, high)
    return loss / len(d), np.full(len(d), slope[0] / len(d))


def gspo(d, lp, A, low=3e-4, high=4e-4):
    loss, slope = ppo([sum(d) / len(d)], None, A, low, high)
    return loss, np.full(len(d), slope[0] / len(d))


def weighted(weight):
    def formula(d, lp, A):
        w = np.array([weight(math.exp(x), A) for x in d])
        return -A * float(w @ lp) / len(d), -A * w / len(d)

    return formula


def one_side(r, A):
    return float((A >= 0 and r <= 1.2) or (A <= 0 and r >= 0.8))


def two_side(r, A):
    return float(0.8 <= r <= 1.2)


def ring(r, A):
    return float(two_side(r, A) or (A >= 0 and r <= 0.4) or (A <= 0 and r >= 3.0))


def opmd(d, lp, A, tau=0.3):
    return -A * sum(lp) + tau / 2 * sum(d) ** 2, np.full(len(d), -A + tau * sum(d))


def kto(d, lp, A, beta=0.2):
    x = beta * sum(d) * (1 if A >= 0 else -1)
    s = sigmoid(x)
    return 1 - s, np.full(len(d), -beta * (1 if A >= 0 else -1) * s * (1 - s))


def reinforce(d, lp, A):
    return -A * (1 + sum(d)) / len(d), np.full(len(d), -A / len(d))


FORMULAS = {
    "PPO": (PPO(), ppo),
    "PPO, wider above": (PPO(0.1, 0.5), lambda d, lp, A: ppo(d, lp, A, 0.1, 0.5)),
    "PPO of the sequence": (PPO(ratio="sequence"), ppo_of_sequence),
    "GRPO": (GRPO(), ppo),
    "GSPO": (GSPO(), gspo),
    "GSPO, wider": (GSPO(0.1, 0.2), lambda d, lp, A: gspo(d, lp, A, 0.1, 0.2)),
    "CISPO": (CISPO(0.3, 0.4), weighted(lambda r, A: min(max(r, 0.7), 1.4))),
    "CISPO without a lower bound": (CISPO(1.0, 4.0), weighted(lambda r, A: min(r, 5.0))),
    "REC-OneSide": (RECOneSide(), weighted(one_side)),
    "REC-OneSide, IS": (RECOneSide(importance=True), weighted(lambda r, A: r * one_side(r, A))),
    "REC-TwoSide": (RECTwoSide(), weighted(two_side)),
    "REC-TwoSide, IS": (RECTwoSide(importance=True), weighted(lambda r, A: r * two_side(r, A))),
    "REC-Ring": (RECRing(), weighted(ring)),
    "REC-Ring, IS": (RECRing(importance=True), weighted(lambda r, A: r * ring(r, A))),
    "RLOO": (RLOO(), reinforce),
    "AsymRE": (AsymRE(), reinforce),
    "RED-Drop": (REDDrop(), reinforce),
    "RED-Weight": (REDWeight(), reinforce),
    "OPMD": (OPMD(0.3), opmd),
    "KTO": (KTO(0.2), kto),
}


@pytest.mark.parametrize(("loss", "formula"), FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("distance", [0.0, 0.5, 1.5])
def test_value_and_gradient_equal_the_formula(loss, formula, distance):
    pi, mu, reward, group = batch(distance=distance)
    advantage = loss.advantages(reward, group, 0, 0).astype(np.float64)
    assert (advantage > 0).any() and (advantage < 0).any()
    output, gradients = ours(loss, pi, mu, advantage)
    for i, (lp, m) in enumerate(zip(pi, mu, strict=True)):
        value, slope = formula(lp - m, lp, advantage[i])
        assert output.loss_B[i].item() == pytest.approx(value, abs=1e-9)
        np.testing.assert_allclose(gradients[i], slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in FORMULAS if name not in ("OPMD", "KTO")])
def test_the_reported_weight_is_what_multiplies_the_advantage_in_the_gradient(name):
    loss, _ = FORMULAS[name]
    pi, mu, reward, group = batch()
    advantage = loss.advantages(reward, group).astype(np.float64)
    output, gradients = ours(loss, pi, mu, advantage)
    for i in np.flatnonzero(advantage):
        assert output.weight_B[i].item() == pytest.approx(
            -gradients[i].sum() / advantage[i], abs=1e-9
        )
        if name.startswith(
            ("PPO", "GRPO", "GSPO", "REC")
        ):  # a truncated token, or sequence, has no gradient
            assert output.truncated_B[i].item() == pytest.approx(np.mean(gradients[i] == 0))
        if name.startswith("CISPO"):  # the weight of a truncated token is not its ratio
            weight, ratio = -gradients[i] * len(pi[i]) / advantage[i], np.exp(pi[i] - mu[i])
            assert output.truncated_B[i].item() == pytest.approx(
                np.mean(abs(weight - ratio) > 1e-9)
            )


@pytest.mark.parametrize("loss", [DPO(0.2), KTO(0.2)])
def test_the_reported_weight_of_dpo_and_kto_is_the_size_of_the_gradient(loss):
    pi, mu, *_ = batch()
    output, gradients = ours(loss, pi, mu, np.tile([1.0, -1.0], 20))
    for weight, gradient in zip(output.weight_B.tolist(), gradients, strict=True):
        np.testing.assert_allclose(np.abs(gradient), weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("distance", [0.0, 1.5])
def test_dpo_equals_its_formula_pair_by_pair(distance):
    pi, mu, *_ = batch(distance=distance)
    output, gradients = ours(DPO(0.2), pi, mu, np.tile([1.0, -1.0], 20))
    h = [sum(lp - m) for lp, m in zip(pi, mu, strict=True)]
    for i in range(0, 40, 2):
        margin = 0.2 * (h[i] - h[i + 1])
        assert output.loss_B[i : i + 2].sum().item() == pytest.approx(
            -math.log(sigmoid(margin)), abs=1e-9
        )
        for j, sign in ((i, -1), (i + 1, 1)):
            np.testing.assert_allclose(
                gradients[j], sign * 0.2 * sigmoid(-margin), rtol=0, atol=1e-9
            )


def of_group(reward, group, i):
    return [r for r, g in zip(reward, group, strict=True) if g == group[i]]


BASELINES = {
    "GRPO": (
        GRPO(),
        lambda r, R: (r - np.mean(R)) / (np.std(R, ddof=1) + 1e-4) if len(R) > 1 else 0,
    ),
    "GSPO": (
        GSPO(),
        lambda r, R: (r - np.mean(R)) / (np.std(R, ddof=1) + 1e-4) if len(R) > 1 else 0,
    ),
    "CISPO": (
        CISPO(1, 4),
        lambda r, R: (r - np.mean(R)) / (np.std(R, ddof=1) + 1e-4) if len(R) > 1 else 0,
    ),
    "RLOO": (RLOO(), lambda r, R: r - (sum(R) - r) / (len(R) - 1) if len(R) > 1 else 0),
    "AsymRE": (AsymRE(-0.2), lambda r, R: r - (np.mean(R) - 0.2) if len(R) > 1 else 0),
    "RED-Weight": (REDWeight(2.0), lambda r, R: (r - np.mean(R)) * math.exp((r - np.mean(R)) / 2)),
    "OPMD": (OPMD(), lambda r, R: r - np.mean(R)),
    "REC": (RECRing(), lambda r, R: r - np.mean(R)),
}


@pytest.mark.parametrize(("loss", "formula"), BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("real", [False, True])
def test_advantages_of_a_group(loss, formula, real):
    rng = np.random.default_rng(1)
    group = rng.integers(0, 12, 60)
    group[0], group[1:] = 99, np.where(group[1:] == 99, 0, group[1:])  # alone
    reward = rng.normal(size=60) if real else rng.choice([-1.0, 1.0], 60)
    expected = [formula(r, of_group(reward, group, i)) for i, r in enumerate(reward)]
    np.testing.assert_allclose(loss.advantages(reward, group), expected, rtol=1e-6, atol=1e-6)


def test_groups_of_equal_rewards_have_no_gradient_and_are_counted():
    reward, group = np.array([0.1, 0.1, 0.1, 1, -1, -1, 1, 0.3]), np.array([4, 4, 4, 0, 0, 2, 2, 7])
    for loss in (GRPO(), RLOO(), OPMD(), RECOneSide(), REDWeight(), REDDrop()):
        advantage = loss.advantages(reward, group)
        assert (advantage[[0, 1, 2, 7]] == 0).all() and (advantage[3:7] != 0).all()
        assert silent_groups(advantage, group) == 2


def test_red_drop_balances_groups_at_random():
    group = np.repeat(np.arange(200), 8)
    reward = np.where(np.tile(np.arange(8), 200) < np.repeat(np.arange(200) % 9, 8), 1.0, -1.0)
    drawn = [
        REDDrop().advantages(reward, group, seed, epoch)
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any() and (drawn[0] != drawn[3]).any()
    for g in range(200):
        R, A, positives = reward[group == g], drawn[0][group == g], g % 9
        if positives in (0, 8):
            assert (A == 0).all()
            continue
        kept = A != 0
        assert kept[R > 0].all() and kept[R < 0].sum() == min(positives, 8 - positives)
        np.testing.assert_allclose(A[kept], R[kept] - R[kept].mean(), rtol=1e-6)
    mixed = np.repeat((np.arange(200) % 9 > 0) & (np.arange(200) % 9 < 4), 8) & (reward < 0)
    share = np.mean(
        [REDDrop().advantages(reward, group, 0, epoch)[mixed] != 0 for epoch in range(200)], axis=0
    )
    expected = np.repeat(np.arange(200) % 9, 8)[mixed] / (
        8 - np.repeat(np.arange(200) % 9, 8)[mixed]
    )
    assert np.abs(share - expected).max() < 0.18  # five standard deviations of 200 draws


def test_on_policy_every_gradient_is_that_of_reinforce():
    pi, mu, reward, group = batch(distance=0.0)
    plain = ours(REINFORCE(), pi, mu, reward)[1]
    for loss in (
        PPO(),
        PPO(ratio="sequence"),
        GRPO(),
        GSPO(),
        CISPO(0.2, 0.2),
        RECOneSide(True),
        RECTwoSide(),
        RECRing(),
    ):
        same(ours(loss, pi, mu, reward)[1], plain)
    same(ours(OPMD(5.0), pi, mu, reward)[1], [g * len(g) for g in plain])
    same(ours(KTO(0.4), pi, mu, reward)[1], [0.1 * g * len(g) for g in plain])  # beta / 4, no 1/T


def same(found, expected):
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=0, atol=1e-9)


def test_without_a_clip_they_are_importance_sampling():
    pi, mu, reward, group = batch(distance=1.0)
    tokens = ours(IS(ratio="token"), pi, mu, reward)[1]
    for loss in (
        PPO(INF, INF),
        GRPO(INF, INF),
        CISPO(INF, INF),
        RECOneSide(True, INF, INF),
        RECTwoSide(True, INF, INF),
    ):
        same(ours(loss, pi, mu, reward)[1], tokens)
    same(
        ours(GSPO(INF, INF), pi, mu, reward)[1], ours(IS(ratio="sequence_mean"), pi, mu, reward)[1]
    )
    same(ours(PPO(INF, INF, ratio="sequence"), pi, mu, reward)[1], ours(IS(), pi, mu, reward)[1])
    same(ours(RECOneSide(False, INF, INF), pi, mu, reward)[1], ours(REINFORCE(), pi, mu, reward)[1])


def test_cispo_is_toprs_family_with_token_ratios_and_one_side_with_importance_is_ppo():
    pi, mu, reward, group = batch(distance=1.0)
    same(
        ours(CISPO(0.3, 0.4), pi, mu, reward)[1],
        ours(TOPR(0.7, 1.4, 0.7, 1.4, ratio="token"), pi, mu, reward)[1],
    )
    same(ours(RECOneSide(True), pi, mu, reward)[1], ours(PPO(), pi, mu, reward)[1])


def test_limits_of_temperature_delta_and_tau_are_reinforce_against_the_groups_mean():
    pi, mu, reward, group = batch(distance=1.0)
    mean = OPMD().advantages(reward, group)
    for loss in (REDWeight(1e12), AsymRE(0.0)):
        np.testing.assert_allclose(loss.advantages(reward, group), mean, rtol=1e-6, atol=1e-9)
    plain = ours(REINFORCE(), pi, mu, mean)[1]
    same(ours(OPMD(0.0), pi, mu, mean)[1], [g * len(g) for g in plain])
    balanced, pairs = np.tile([1.0, -1.0], 20), np.repeat(np.arange(10), 4)
    np.testing.assert_allclose(
        REDDrop().advantages(balanced, pairs), OPMD().advantages(balanced, pairs)
    )


def test_in_one_group_rloo_is_a_baseline_scaled():
    _, _, reward, _ = batch()
    one = np.zeros(len(reward), dtype=int)
    n = len(reward)
    np.testing.assert_allclose(
        RLOO().advantages(reward, one), (reward - reward.mean()) * n / (n - 1), rtol=1e-6
    )
    np.testing.assert_allclose(
        GRPO().advantages(reward, one),
        (reward - reward.mean()) / (reward.std(ddof=1) + 1e-4),
        rtol=1e-6,
    )


@pytest.mark.parametrize("loss", [loss for loss, _ in FORMULAS.values()], ids=FORMULAS)
def test_no_nan_or_inf_for_log_ratios_up_to_a_thousand(loss):
    log_ratio_N = torch.tensor([0.0, 20, -20, 89, -104, 1e3, -1e3] * 2, requires_grad=True)
    advantage_B = torch.tensor([1.0] * 7 + [-1.0] * 7)
    output = loss(log_ratio_N, torch.zeros(14), torch.ones(14, dtype=int), advantage_B)
    output.loss_B.sum().backward()
    for values in (*output, log_ratio_N.grad):
        assert torch.isfinite(values).all()


@pytest.mark.parametrize(
    ("loss", "arguments", "words", "correction"),
    [
        (PPO, {"clip_low": -0.1}, "clip_low", {"clip_low": 0.1}),
        (GRPO, {"clip_high": math.nan}, "clip_high", {"clip_high": INF}),
        (PPO, {"ratio": "tokens"}, "one of sequence", {"ratio": "token"}),
        (PPO, {"baseline": INF}, "baseline", {"baseline": 1}),
        (RECRing, {"outer_low": -1}, "outer_low", {"outer_low": 1}),
        (DPO, {"beta": 0}, "beta", {"beta": 0.1}),
        (KTO, {"beta": INF}, "beta", {"beta": 0.1}),
        (OPMD, {"tau": -1}, "tau", {"tau": 0}),
        (AsymRE, {"delta": math.nan}, "delta", {"delta": 0}),
        (REDWeight, {"temperature": 0}, "temperature", {"temperature": 1}),
    ],
)
def test_bad_arguments_are_rejected_and_corrected_ones_are_not(loss, arguments, words, correction):
    with pytest.raises(InputError, match=words):
        loss(**arguments)
    loss(**correction)


def test_a_weight_that_overflows_is_rejected():
    reward, group = np.array([1.0, -1.0]), np.zeros(2, dtype=int)
    with pytest.raises(InputError, match="overflows"):
        REDWeight(1e-3).advantages(reward, group)
    assert np.isfinite(REDWeight(1.0).advantages(reward, group)).all()
