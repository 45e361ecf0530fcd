"""What gradients at the base policy say about the effective share of positives, to first order in the step.

A batch with a share p of positives and baseline c moves the policy along d = p (1 − c) E₊ − (1 − p) (1 + c) E₋, with
E± the mean gradient of (log π)/T over positive and negative responses, and V± the variances around them. On-policy and
without the 1/T the policy's mean gradient is 0, so that E₋ = −E₊ p/(1 − p) with the base policy's own p: every
composition and every baseline gives the same direction, and only the length of the step and its noise differ.
"""

import math
from typing import Any

from topr.losses.shares import baseline_for_share


def cosine(found: dict[str, Any], of: str = "products") -> float:
    """Of E₊ and E₋, or without the 1/T, of `whole`: -1 but for noise, which may let an estimate leave [-1, 1]."""
    positives, negatives, cross = found[of]
    return cross / math.sqrt(positives * negatives)


def length_ratio(found: dict[str, Any]) -> float:
    """|E₋| / |E₊|."""
    return math.sqrt(found["products"][1] / found["products"][0])


def gain(found: dict[str, Any], p: float, share: float) -> float:
    """What a small step of plain gradient ascent gains, in units that do not depend on p and the effective share.

    The gain's own gradient is taken with the 1/T, too, though accuracy knows none: alike where the cosine is near -1.

    Args:
        found: by `experiments.gradients`.
        p: share of positives of the data.
        share: the effective one.
    """
    positives, negatives, cross = found["products"]
    own, c = found["positive_share"], baseline_for_share(p, share)
    plus, minus = p * (1 - c), (1 - p) * (1 + c)
    return own * (plus * positives - minus * cross) - (1 - own) * (plus * cross - minus * negatives)


def quietest_share(found: dict[str, Any], p: float) -> float:
    """The effective share whose step has the most signal for its noise: best where noise decides."""
    plus, minus = found["variances"]
    return 1 / (1 + length_ratio(found) * plus / minus * (1 - p) / p)
