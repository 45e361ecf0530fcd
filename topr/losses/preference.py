"""Preference losses that TOPR is compared with: they see only whether a response is preferred.

Shapes and symbols: see `losses/base.py`. beta scales the log-ratio h.
"""

import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveFloat

from topr.losses.base import Loss, LossOutput, sum_tokens, whole_response_output


class PreferenceLoss(Loss):
    """A loss of beta h."""

    def __init__(self, beta: PositiveFloat = 0.1):
        self.beta = beta


class DPO(PreferenceLoss):
    """-log sigmoid(beta (h+ - h-)) on pairs of a positive and a negative (arXiv:2305.18290).

    Each trajectory of a pair holds the pair's loss, so that the mean is that over pairs.
    """

    batching = "pairs"

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        positive, negative = log_ratio_B.view(-1, 2).unbind(dim=1)
        margin_B = (self.beta * (positive - negative)).repeat_interleave(2)
        loss_B = -F.logsigmoid(margin_B)
        weight_B = self.beta * (-margin_B).sigmoid()
        return whole_response_output(loss_B, log_ratio_B, weight_B)


class KTO(PreferenceLoss):
    """1 - sigmoid(beta (h - z)) for positives, 1 - sigmoid(beta (z - h)) for negatives
    (arXiv:2402.01306).

    z, a divergence estimated from mismatched pairs, is 0 offline. Both classes weigh 1.
    """

    sees_signs_only = True

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        gain_B = self.beta * torch.where(advantage_B >= 0, log_ratio_B, -log_ratio_B)
        loss_B = (-gain_B).sigmoid()  # 1 - sigmoid(x) = sigmoid(-x)
        weight_B = self.beta * (loss_B * (1 - loss_B))
        return whole_response_output(loss_B, log_ratio_B, weight_B)
