"""Comparators and group advantages against their formulas, computed without torch."""

import math
from pathlib import Path

import jsonargparse
import numpy as np
import pytest
import torch
import yaml
from test_losses import batch, evaluate, gradient_of, same

from topr.advantages import (
    Advantage,
    Baseline,
    GroupBalanced,
    GroupExponential,
    GroupMean,
    GroupNormalised,
    GroupQuantile,
    LeaveOneOut,
)
from topr.io import InputError
from topr.io.commands import ArgumentParser
from topr.losses import (
    CISPO,
    DPO,
    IPO,
    IS,
    KTO,
    NFT,
    OPMD,
    PPO,
    QRPO,
    REINFORCE,
    TOPR,
    VESPO,
    Loss,
    MaskedPPO,
    RECOneSide,
    RECRing,
    RECTwoSide,
)
from topr.losses.statistics import statistics

INF = math.inf
ROOT = Path(__file__).parent.parent
OVERLAYS = sorted((ROOT / "configs" / "loss").glob("*.yaml"))
SIGNS = np.tile([1.0, -1.0], 20)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# The formulas: a trajectory's loss, and its derivative at each token's log-prob, from the tokens'
# log-ratios d, their log-probs lp, and A.


def ppo(d, lp, A, low=0.2, high=0.2):
    value = 0.0
    slope = np.zeros(len(d))
    for t, log_ratio in enumerate(d):
        r = math.exp(log_ratio)
        free = r * A
        clipped = min(max(r, 1 - low), 1 + high) * A
        value -= min(free, clipped) / len(d)
        if free <= clipped:
            slope[t] = -r * A / len(d)
    return value, slope


def ppo_of_sequence(d, lp, A):
    value, (slope,) = ppo([sum(d)], None, A)
    return value / len(d), np.full(len(d), slope / len(d))


def gspo(d, lp, A):
    value, (slope,) = ppo([sum(d) / len(d)], None, A, 3e-4, 4e-4)
    return value, np.full(len(d), slope / len(d))


def masked_ppo(d, lp, A):
    if A < 0 and -np.mean(d) > 0.3:
        return 0.0, np.zeros(len(d))
    return ppo(d, lp, A)


def vespo_weight(log_x, A):
    k, rate = (2, 3) if A >= 0 else (3, 2)
    x = math.exp(log_x)
    return x**k * math.exp(rate * (1 - x))


def vespo(d, lp, A):
    phi = vespo_weight(sum(d), A)
    return -A * phi * sum(d) / len(d), np.full(len(d), -A * phi / len(d))


def vespo_of_tokens(d, lp, A):
    phi = np.array([vespo_weight(x, A) for x in d])
    return -A * float(phi @ d) / len(d), -A * phi / len(d)


def nft_weight(r, A, epsilon=1.0):
    if A >= 0:
        return 1.0
    p = min(-A / 2, 0.98)
    return r / max((1 - p * r) / (1 - p), epsilon)


def qrpo(d, lp, A):
    log_z = 1 / 0.04 + math.log(0.04 * (1 - math.exp(-1 / 0.04)))  # of a uniform quantile
    residual = A + 1 - 0.04 * log_z - 0.04 * sum(d)
    return residual**2, np.full(len(d), -2 * 0.04 * residual)


def weighted(weight):
    def formula(d, lp, A):
        w = np.array([weight(math.exp(x), A) for x in d])
        return -A * float(w @ lp) / len(d), -A * w / len(d)

    return formula


def one_side(r, A):
    return r <= 1.2 if A >= 0 else r >= 0.8


def two_side(r, A):
    return 0.8 <= r <= 1.2


def ring(r, A):
    return two_side(r, A) or (A >= 0 and r <= 0.4) or (A <= 0 and r >= 3.0)


def opmd(d, lp, A):
    return -A * sum(lp) + 0.15 * sum(d) ** 2, np.full(len(d), -A + 0.3 * sum(d))


def kto(d, lp, A):
    sign = 1 if A >= 0 else -1
    s = sigmoid(0.2 * sign * sum(d))
    return 1 - s, np.full(len(d), -0.2 * sign * s * (1 - s))


FORMULAS = {
    "PPO": (PPO(), ppo),
    "PPO, wider": (PPO(0.1, 0.5), lambda d, lp, A: ppo(d, lp, A, 0.1, 0.5)),
    "PPO of the sequence": (PPO(ratio="sequence"), ppo_of_sequence),
    "PPO as GSPO": (PPO(3e-4, 4e-4, ratio="sequence_mean"), gspo),
    "CISPO": (CISPO(0.3, 0.4), weighted(lambda r, A: min(max(r, 0.7), 1.4))),
    "CISPO without a lower bound": (CISPO(1.0, 4.0), weighted(lambda r, A: min(r, 5.0))),
    "REC-OneSide": (RECOneSide(), weighted(one_side)),
    "REC-TwoSide": (RECTwoSide(), weighted(two_side)),
    "REC-Ring": (RECRing(), weighted(ring)),
    "NFT": (NFT(), weighted(nft_weight)),
    "NFT, lower floor": (NFT(0.3), weighted(lambda r, A: nft_weight(r, A, 0.3))),
    "VESPO": (VESPO(), vespo),
    "VESPO of tokens": (VESPO(ratio="token"), vespo_of_tokens),
    "PPO, masked": (MaskedPPO(delta=0.3), masked_ppo),
    "OPMD": (OPMD(0.3), opmd),
    "QRPO": (QRPO(0.04), qrpo),
    "KTO": (KTO(0.2), kto),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("distance", [0.0, 0.5, 1.5])
def test_value_and_gradient_equal_the_formula(name, distance):
    loss, formula = FORMULAS[name]
    pi, mu, advantage = batch(distance)
    output, gradients = evaluate(loss, pi, mu, advantage)
    for i, A in enumerate(advantage):
        value, slope = formula(pi[i] - mu[i], pi[i], A)
        same(output.loss_B[i].item(), value)
        same(gradients[i], slope)
        same(output.log_ratio_B[i], sum(pi[i] - mu[i]))
        if name in ("OPMD", "KTO", "QRPO"):
            continue
        same(output.weight_B[i], -slope.sum() / A)
        if name.startswith(("PPO", "REC")):  # what is truncated has no gradient
            same(output.truncated_B[i], np.mean(slope == 0))
        elif name.startswith("CISPO"):  # a truncated weight is not the ratio
            ratio = np.exp(pi[i] - mu[i])
            same(output.truncated_B[i], np.mean(abs(-slope * len(slope) / A - ratio) > 1e-9))


def test_what_is_masked_or_floored_is_reported():
    pi, mu, advantage = batch(1.0)
    negative = advantage < 0
    mean = np.array([np.mean(p - m) for p, m in zip(pi, mu, strict=True)])
    dropped = negative & (mean < -0.3)
    assert 0 < dropped.sum() < negative.sum()
    masked, _ = evaluate(MaskedPPO(delta=0.3), pi, mu, advantage)
    same(masked.objective_B, -masked.loss_B.detach())  # of token ratios the loss is not divided
    same(masked.truncated_B[dropped], 1)
    # q < 1 where r > 1
    above = np.array([np.mean(p > m) for p, m in zip(pi, mu, strict=True)])
    same(evaluate(NFT(), pi, mu, advantage)[0].truncated_B, above * negative)
    same(evaluate(VESPO(), pi, mu, advantage)[0].truncated_B, 0)


PAIRS = {  # a pair's loss, and its derivative, from h+ - h-
    DPO(0.2): lambda gap: (-math.log(sigmoid(0.2 * gap)), -0.2 * sigmoid(-0.2 * gap)),
    IPO(0.2): lambda gap: ((gap - 2.5) ** 2, 2 * (gap - 2.5)),
}


@pytest.mark.parametrize("distance", [0.0, 1.5])
@pytest.mark.parametrize(("loss", "formula"), PAIRS.items())
def test_losses_of_pairs_equal_their_formula(loss, formula, distance):
    assert (loss.batching, KTO.batching) == ("pairs", "trajectories")
    pi, mu, _ = batch(distance)
    output, gradients = evaluate(loss, pi, mu, SIGNS)
    for i in range(0, 40, 2):
        value, slope = formula(sum(pi[i] - mu[i]) - sum(pi[i + 1] - mu[i + 1]))
        same(output.loss_B[i : i + 2].detach(), value)
        # each of the two holds the loss of the pair
        same(gradients[i] / 2, slope)
        same(gradients[i + 1] / 2, -slope)


@pytest.mark.parametrize(
    ("loss", "copies"), [(DPO(0.2), 2), (IPO(), 2), (KTO(0.2), 1), (QRPO(), 1)]
)
def test_the_weight_of_a_squared_or_preference_loss_is_the_size_of_the_gradient(loss, copies):
    pi, mu, _ = batch()
    output, gradients = evaluate(loss, pi, mu, SIGNS)
    for weight, gradient in zip(output.weight_B, gradients, strict=True):
        same(abs(gradient) / copies, weight)


@pytest.mark.parametrize("loss", [*(loss for loss, _ in FORMULAS.values()), *PAIRS])
def test_no_nan_or_inf_for_log_ratios_up_to_a_thousand(loss):
    log_ratio_N = torch.tensor([0.0, 20, -20, 89, -104, 1e3, -1e3] * 2, requires_grad=True)
    advantage_B = torch.tensor([1.0] * 7 + [-1.0] * 7)
    output = loss(log_ratio_N, torch.zeros(14), torch.ones(14, dtype=int), advantage_B)
    output.loss_B.sum().backward()
    for values in (*output, log_ratio_N.grad):
        assert torch.isfinite(values).all()


ON_POLICY = [PPO(), PPO(ratio="sequence_mean"), CISPO(0.2, 0.2), RECOneSide(), RECRing()]
ON_POLICY += [MaskedPPO(), NFT(), VESPO()]


@pytest.mark.parametrize("loss", ON_POLICY)
def test_on_policy_the_gradient_is_that_of_reinforce(loss):
    pi, mu, advantage = batch(distance=0.0)
    same(gradient_of(loss, pi, mu, advantage), gradient_of(REINFORCE(), pi, mu, advantage))


EQUAL = {
    "PPO without clips is IS": (PPO(INF, INF), IS("token")),
    "CISPO without clips is IS": (CISPO(INF, INF), IS("token")),
    "PPO of sequences without clips is IS": (PPO(INF, INF, "sequence"), IS()),
    "REC without clips is REINFORCE": (RECOneSide(INF, INF), REINFORCE()),
    "CISPO is TOPR's family": (CISPO(0.3, 0.4), TOPR(0.7, 1.4, 0.7, 1.4, "token")),
    "MaskedPPO without a mask is PPO": (MaskedPPO(delta=INF), PPO()),
}


@pytest.mark.parametrize(("loss", "other"), EQUAL.values(), ids=EQUAL)
def test_gradients_are_equal(loss, other):
    pi, mu, advantage = batch(distance=1.0)
    same(gradient_of(loss, pi, mu, advantage), gradient_of(other, pi, mu, advantage))


# The losses of papers as they are written there, for one response: from its log-probs, with a
# gradient, log mu, its reward R of +-1, the mean reward V of its group and the advantage A.


def apo_zero_unpaired(lp, mu, R, V, A):
    chosen = torch.sigmoid(0.2 * (lp - mu).sum())
    return 1 - chosen if R > 0 else chosen


def dro(lp, mu, R, V, A):
    return (R - V - 0.3 * (lp - mu).sum()) ** 2 / 2


def weighted_reinforce(lp, mu, R, V, A):
    return -0.1 * lp.mean() if R > 0 else lp.mean()


def iw_sft(lp, mu, R, V, A):
    weight = (lp - mu).sum().exp().clamp(max=2).detach()
    return -weight * lp.mean() if R > 0 else 0 * lp.sum()


def clip_higher(lp, mu, R, V, A):
    r = (lp - mu).exp()
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).mean()


def nft(lp, mu, R, V, A):
    p = (V + 1) / 2
    r = (lp - mu).exp()
    if R > 0:
        return -(1 - p) * r.log().mean()
    q = (1 - p * r) / (1 - p)
    straight_through = q + (q.clamp(min=1) - q).detach()
    return -(1 - p) * straight_through.log().mean()


def quantile_regression(lp, mu, R, V, A):
    quantile = 1 if R > 0 else (1 - V) / 2
    log_z = math.log(0.04 * (math.exp(1 / 0.04) - 1))
    return (quantile - 0.04 * log_z - 0.04 * (lp - mu).sum()) ** 2


def incomplete_gamma(lp, mu, R, V, A):
    k, rate = torch.tensor([2.0, 3.0] if A >= 0 else [3.0, 2.0], dtype=torch.float64)
    x = (lp - mu).sum().exp()
    scale = torch.exp(rate + torch.lgamma(k)) / rate**k
    return -A * scale * torch.special.gammainc(k, rate * x) / len(lp)


EQUIVALENT = {  # a loss and an advantage are this often the paper's loss
    "TRL's apo_zero_unpaired is KTO": (KTO(0.2), Baseline(), apo_zero_unpaired, 1),
    "DRO with the group's mean is OPMD": (OPMD(0.3), GroupMean(), dro, 1 / 0.3),
    "W-REINFORCE": (TOPR(0.1, 0.1, 1, 1), Baseline(), weighted_reinforce, 1),
    "iw-SFT of trajectories": (TOPR(0, 2, 0, 0), Baseline(), iw_sft, 1),
    "DAPO's clip-higher is GRPO's": (PPO(0.2, 0.28), GroupNormalised(), clip_higher, 1),
    "NFT": (NFT(), GroupMean(), nft, 2),
    "QRPO": (QRPO(0.04), GroupQuantile(), quantile_regression, 1),
    "VESPO's surrogate": (VESPO(), GroupMean(), incomplete_gamma, 1),
}


def groups_of_eight():
    """Rewards of +-1 and groups of the 40 trajectories of `batch`; each group has both signs."""
    reward = np.random.default_rng(3).choice([-1.0, 1.0], 40)
    reward[::8] = 1
    reward[1::8] = -1
    return reward, np.arange(40) // 8


@pytest.mark.parametrize("distance", [0.0, 0.5, 1.5])
@pytest.mark.parametrize(
    ("loss", "advantage", "formula", "factor"), EQUIVALENT.values(), ids=EQUIVALENT
)
def test_equivalences(loss, advantage, formula, factor, distance):
    pi, mu, _ = batch(distance)
    reward, group = groups_of_eight()
    A = advantage(reward, group, None)
    gradients = evaluate(loss, pi, mu, A)[1]
    for i, gradient in enumerate(gradients):
        log_probs = torch.tensor(pi[i], requires_grad=True)
        V = reward[group == group[i]].mean()
        formula(log_probs, torch.tensor(mu[i]), reward[i], V, A[i]).backward()
        same(gradient, factor * log_probs.grad.numpy())


def test_qrpo_is_opmd_with_another_advantage():
    pi, mu, advantage = batch()
    opmd = gradient_of(OPMD(0.1), pi, mu, advantage - 0.1 * math.log(0.1))
    same(gradient_of(QRPO(0.1), pi, mu, advantage), 2 * 0.1 * opmd)


def test_the_token_normaliser_of_dapo_weighs_trajectories_by_their_length():
    """Hence it is not GRPO's: the weight depends on the other trajectories of the batch."""
    pi, mu, advantage = batch(1.0)
    length = np.array([len(m) for m in mu])
    log_probs_N = torch.tensor(np.concatenate(pi), requires_grad=True)
    r_N = (log_probs_N - torch.tensor(np.concatenate(mu))).exp()
    A_N = torch.tensor(np.repeat(advantage, length))
    (-torch.minimum(r_N * A_N, r_N.clamp(0.8, 1.28) * A_N).sum() / length.sum()).backward()
    mean_over_trajectories = gradient_of(PPO(0.2, 0.28), pi, mu, advantage) / len(mu)
    same(log_probs_N.grad, np.repeat(length / length.mean(), length) * mean_over_trajectories)
    assert np.ptp(length) > 0


def deviation(R):
    return np.std(R, ddof=1) if len(R) > 1 else 0


def mean_of_others(r, R):
    return (sum(R) - r) / (len(R) - 1) if len(R) > 1 else r


ADVANTAGES = {  # from a reward r and all rewards R of its group
    GroupMean(): lambda r, R: r - np.mean(R),
    GroupMean(-0.2): lambda r, R: r - np.mean(R) + 0.2 * (len(R) > 1),
    LeaveOneOut(): lambda r, R: r - mean_of_others(r, R),
    GroupNormalised(): lambda r, R: (r - np.mean(R)) / (deviation(R) + 1e-4),
    GroupExponential(2.0): lambda r, R: (r - np.mean(R)) * math.exp((r - np.mean(R)) / 2),
    GroupQuantile(): lambda r, R: sum(x <= r for x in R) / len(R) - 1,
}


def rewards_of_groups(real: bool):
    """Rewards and groups of 60 trajectories in no order; the first is alone in its group."""
    rng = np.random.default_rng(1)
    group = rng.integers(0, 12, 60)
    group[0] = 12
    reward = rng.normal(size=60) if real else rng.choice([-1.0, 1.0], 60)
    return reward, group, rng


@pytest.mark.parametrize(("advantage", "formula"), ADVANTAGES.items())
@pytest.mark.parametrize("real", [False, True])
def test_advantages_of_groups(advantage, formula, real):
    reward, group, rng = rewards_of_groups(real)
    expected = [formula(r, reward[group == g]) for r, g in zip(reward, group, strict=True)]
    same(advantage(reward, group, rng), expected)


@pytest.mark.parametrize("advantage", [*ADVANTAGES, GroupBalanced()])
def test_groups_of_equal_rewards_have_no_signal_and_are_counted(advantage):
    reward = np.float32([0.1, 0.1, 0.1, 1, -1, -1, 1, 0.3])
    group = np.array([3, 3, 3, 0, 0, 1, 1, 2])
    found = advantage(reward, group, np.random.default_rng(0))
    shift = getattr(advantage, "shift", 0)
    assert (found[:3] == -shift).all() and found[7] == 0
    assert (found[4:6] != 0).all()  # the negatives: the best of a group may have 0
    names = [
        "reward",
        "length",
        "loss",
        "objective",
        "log_ratio",
        "weight",
        "truncated",
        "gradient",
    ]
    columns = dict.fromkeys(names, np.ones(8)) | {"advantage": -abs(found), "group": group}
    assert statistics(columns)["train/groups_without_signal"] == (1 if shift else 2)


def test_group_balanced_keeps_as_many_negatives_as_positives():
    reward, group, _ = rewards_of_groups(real=False)
    advantage = GroupBalanced()(reward, group, np.random.default_rng(0))
    for g in range(13):
        R = reward[group == g]
        A = advantage[group == g]
        if np.ptp(R) == 0:
            assert (A == 0).all()
            continue
        kept = A != 0
        assert kept[R > 0].all()
        assert kept[R < 0].sum() == min((R > 0).sum(), (R < 0).sum())
        same(A[kept], R[kept] - R[kept].mean())


def test_group_balanced_drops_at_random_by_the_generator():
    reward = np.float32([1, 1, -1, -1, -1, -1, -1, -1])
    group = np.zeros(8, dtype=int)
    draws = [GroupBalanced()(reward, group, np.random.default_rng([0, i])) for i in range(300)]
    same(GroupBalanced()(reward, group, np.random.default_rng([0, 0])), draws[0])
    kept = np.mean(np.array(draws) != 0, axis=0)
    assert abs(kept[2:] - 2 / 6).max() < 5 * math.sqrt(2 / 9 / 300)  # five standard deviations


@pytest.mark.parametrize(
    ("kind", "name", "wrong", "right"),
    [
        ("losses.PPO", "ratio", "tokens", "token"),
        ("losses.PPO", "clip_high", math.nan, INF),
        ("losses.CISPO", "clip_low", -1, 0),
        ("losses.RECRing", "outer_low", -1, 1),
        ("losses.DPO", "beta", 0, 0.1),
        ("losses.OPMD", "tau", -1, 0),
        ("losses.MaskedPPO", "delta", -1, 0),
        ("losses.NFT", "epsilon", 0, 0.5),
        ("losses.QRPO", "beta", 0, 0.1),
        ("losses.VESPO", "k_minus", 0, 1),
        ("advantages.PositiveShare", "share", 1.0, 0.99),
        ("advantages.GroupExponential", "temperature", 0, 1),
    ],
)
def test_wrong_arguments_are_refused_and_right_ones_are_not(kind, name, wrong, right):
    parser = ArgumentParser()
    parser.add_argument("--losses", type=Loss)
    parser.add_argument("--advantages", type=Advantage)
    part = {"class_path": f"topr.{kind}", "init_args": {name: right}}
    key = kind.partition(".")[0]
    parser.parse_object({key: part})
    part["init_args"][name] = wrong
    with pytest.raises(InputError, match=name):
        parser.parse_object({key: part})


METHODS = {  # methods that are a loss with an advantage
    "grpo": (PPO, GroupNormalised),
    "gspo": (PPO, GroupNormalised),
    "rloo": (REINFORCE, LeaveOneOut),
    "asymre": (REINFORCE, GroupMean),
    "red_drop": (REINFORCE, GroupBalanced),
    "red_weight": (REINFORCE, GroupExponential),
}


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_write_every_argument_so_that_one_replaces_another(path):
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(Loss, "model.loss")
    parser.add_subclass_arguments(Advantage, "data.advantage")
    parser.add_argument("--data.whole_groups", type=bool)
    parsed = parser.parse_path(path)
    written = yaml.safe_load(path.read_text())
    written["data"].setdefault("whole_groups", None)  # only pairs leave no choice
    assert parsed.as_dict() == written  # nothing was filled in
    made = parser.instantiate(parsed)
    pairs = made.model.loss.batching == "pairs"
    assert made.data.whole_groups is (False if pairs else None)
    if path.stem in METHODS:
        assert (type(made.model.loss), type(made.data.advantage)) == METHODS[path.stem]
    same_name = path.stem.replace("_", "") == type(made.model.loss).__name__.lower()
    assert same_name == (path.stem not in METHODS)
    row = [path.stem, type(made.model.loss).__name__, type(made.data.advantage).__name__]
    assert f"| `{'` | `'.join(row)}`" in (ROOT / "topr/losses/README.md").read_text("utf-8")
    if path.stem == "gspo":
        assert made.model.loss.ratio == "sequence_mean"
    if path.stem == "asymre":
        assert made.data.advantage.shift == -0.1
