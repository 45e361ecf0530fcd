"""Preferences instead of rewards: DPO on pairs, KTO on single trajectories, with log mu as the reference."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from topr.io import InputError
from topr.losses.loss import Loss, LossOutput, check_baseline, checked, sum_tokens


class DPO(Loss):
    """-log sigmoid(beta (h+ - h-)) on pairs of a positive and a negative of one group (arXiv:2305.18290).

    The divisor is the number of pairs in the global batch; each of a pair holds half of its loss.

    Args:
        beta: of the difference of the sequence log-ratios.
        baseline: c; trajectories with R >= c are positives.
    """

    grouping = "pair"

    def __init__(self, beta: float = 0.1, baseline: float = 0.0):
        check_beta(beta)
        check_baseline(baseline)
        self.beta, self.baseline = beta, baseline

    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        """R - c, of which only the sign counts."""
        return checked(self, reward.astype(np.float64) - self.baseline)

    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        positive, negative = log_ratio_B.view(-1, 2).unbind(dim=1)
        margin = self.beta * (positive - negative)
        loss_B = -F.logsigmoid(margin).repeat_interleave(2) / 2
        weight_B = self.beta * (-margin.detach()).sigmoid().repeat_interleave(2)
        return LossOutput(loss_B, -loss_B.detach(), log_ratio_B.detach(), weight_B, 0 * weight_B)


class KTO(Loss):
    """1 - sigmoid(beta (h - z)) for positives, 1 - sigmoid(beta (z - h)) for negatives (arXiv:2402.01306).

    Offline z, a divergence estimated from mismatched pairs, is 0; both classes weigh 1.

    Args:
        beta: of the sequence log-ratio.
        baseline: c; trajectories with R >= c are positives.
    """

    def __init__(self, beta: float = 0.1, baseline: float = 0.0):
        check_beta(beta)
        check_baseline(baseline)
        self.beta, self.baseline = beta, baseline

    advantages = DPO.advantages

    def __call__(
        self, log_probs_N: Tensor, ref_log_probs_N: Tensor, length_B: Tensor, advantage_B: Tensor
    ) -> LossOutput:
        log_ratio_B = sum_tokens(log_probs_N - ref_log_probs_N, length_B)
        gain_B = self.beta * torch.where(advantage_B >= 0, log_ratio_B, -log_ratio_B)
        loss_B = (-gain_B).sigmoid()  # 1 - sigmoid(x) = sigmoid(-x)
        weight_B = self.beta * (loss_B * (1 - loss_B)).detach()
        return LossOutput(loss_B, -loss_B.detach(), log_ratio_B.detach(), weight_B, 0 * weight_B)


def check_beta(beta: float) -> None:
    """Refuse a beta that is not finite and above 0."""
    if not 0 < beta < np.inf:
        raise InputError(f"model.loss: beta is {beta}; it must be finite and above 0")
