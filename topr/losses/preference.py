"""Preference losses that TOPR is compared with: they see only whether a response is preferred.

Shapes and symbols: see `losses/base.py`. beta scales the log-ratio h.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveFloat
from torch import Tensor

from topr.losses.base import Loss, LossOutput, sum_tokens, whole_response_output


class PreferenceLoss(Loss):
    """A loss of beta h."""

    def __init__(self, beta: PositiveFloat = 0.1):
        self.beta = beta


class PairLoss(PreferenceLoss):
    """A loss of the margin beta (h+ - h-) between a positive and a negative.

    Each trajectory of a pair holds the pair's loss, so that the mean is that over pairs.
    """

    batching = "pairs"

    @abstractmethod
    def of_margin(self, margin_B: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the size of its derivative with respect to h."""

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        positive, negative = log_ratio_B.view(-1, 2).unbind(dim=1)
        margin_B = (self.beta * (positive - negative)).repeat_interleave(2)
        loss_B, weight_B = self.of_margin(margin_B)
        return whole_response_output(loss_B, log_ratio_B, weight_B)


class DPO(PairLoss):
    """-log sigmoid(beta (h+ - h-)) (arXiv:2305.18290)."""

    def of_margin(self, margin_B):
        return -F.logsigmoid(margin_B), self.beta * (-margin_B).sigmoid()


class IPO(PairLoss):
    """(h+ - h- - 1/(2 beta))^2 (arXiv:2310.12036, Eq. 17); beta is the paper's tau.

    h is the sum over tokens, as in the paper's formula; TRL takes the mean.
    """

    def of_margin(self, margin_B):
        residual_B = (margin_B - 0.5) / self.beta
        return residual_B.square(), 2 * residual_B.abs()


class KTO(PreferenceLoss):
    """1 - sigmoid(beta (h - z)) for positives, 1 - sigmoid(beta (z - h)) for negatives
    (arXiv:2402.01306).

    z, a divergence estimated from mismatched pairs, is 0 offline. Both classes weigh 1.
    """

    refuses_zero_advantages = True

    def __call__(self, log_probs_N, ref_log_probs_N, length_B, advantage_B) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        gain_B = self.beta * torch.where(advantage_B >= 0, log_ratio_B, -log_ratio_B)
        loss_B = (-gain_B).sigmoid()  # 1 - sigmoid(x) = sigmoid(-x)
        return whole_response_output(loss_B, log_ratio_B, self.beta * (loss_B * (1 - loss_B)))
