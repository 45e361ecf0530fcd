"""Metrics of sampled and graded responses, with bootstrap intervals over problems."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from topr.losses import advantage_share, positives


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k responses is correct, from c correct among n: 1 - C(n-c, k) / C(n, k).

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(
    answers: Sequence[str | None], correct: Sequence[bool], k: int, weights: Sequence[float] | None = None
) -> float:
    """Expected correctness of the majority answer of k responses, in [0, 1].

    None marks an invalid response, which does not vote; ties count the expected correctness over the tied answers;
    without any vote the result is 0. More than k responses are averaged over disjoint runs of k.

    Args:
        answers: canonical answer of each response.
        correct: whether that answer is correct, the same for equal answers.
        weights: weight of each vote, 1 by default (self-consistency weighted by a verifier).

    Raises:
        ValueError: unless 1 <= k <= the number of answers.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@k needs 1 <= k <= {len(answers)} responses, got k={k}")
    weights = [1.0] * len(answers) if weights is None else weights
    results = []
    for start in range(0, len(answers) - k + 1, k):
        votes, right = defaultdict(float), {}
        for i in range(start, start + k):
            if answers[i] is not None:
                votes[answers[i]] += weights[i]
                right[answers[i]] = bool(correct[i])
        top = max(votes.values(), default=0.0)
        tied = [answer for answer, vote in votes.items() if math.isclose(vote, top)]
        results.append(sum(right[answer] for answer in tied) / len(tied) if tied else 0.0)
    return float(np.mean(results))


def bootstrap_interval(values: np.ndarray, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean of per-problem values, resampling problems.

    Paired comparison of two policies: pass the per-problem differences.
    """
    values = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def training_statistics(rows: dict[str, np.ndarray], of_group: bool = False) -> dict[str, float]:
    """What is logged of one global batch; the README's glossary explains each name.

    Args:
        rows: per-trajectory arrays [B]: reward, advantage, length (response tokens), loss, objective, log_ratio,
            weight, truncated, and gradient (squared norm of the loss's gradient at the hidden states).
        of_group: whether advantages are of a group, where 0 is neither sign.
    """
    advantage, weight = rows["advantage"], rows["weight"]
    positive, negative = positives(advantage, of_group), advantage < 0
    statistics = {
        "train/loss": rows["loss"].mean(),
        "train/objective": rows["objective"].mean(),
        "train/reward": rows["reward"].mean(),
        "train/positive_share": positive.mean(),
        "train/effective_positive_share": advantage_share(advantage),
        "weight/effective_sample_size": weight.sum() ** 2 / max((weight**2).sum() * len(weight), 1e-12),
        "gradient/positive_share": rows["gradient"][positive].sum() / max(rows["gradient"].sum(), 1e-45),
    }
    for sign, chosen in (("positives", positive), ("negatives", negative)):
        if chosen.any():
            log_ratio = rows["log_ratio"][chosen]
            statistics |= {
                f"log_ratio/{sign}_mean": log_ratio.mean(),
                f"log_ratio/{sign}_min": log_ratio.min(),
                f"log_ratio/{sign}_max": log_ratio.max(),
                f"drift/{sign}": (log_ratio / rows["length"][chosen]).mean(),
                f"weight/{sign}_truncated": rows["truncated"][chosen].mean(),
            }
    if negative.any():
        statistics["weight/negatives_below_0.01"] = (weight[negative] < 0.01).mean()
    return {name: float(value) for name, value in statistics.items()}
