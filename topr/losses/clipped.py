"""Clipped ratios: PPO, GRPO and GSPO on stored trajectories, with log mu in the place of the old policy's."""

import math

import numpy as np
import torch
from torch import Tensor

from topr.losses.groups import standardised
from topr.losses.loss import Ratio, RatioLoss, check_baseline, check_clips, checked
from topr.losses.tapered import rho, truncated_ratio


class PPO(RatioLoss):
    """-(1/T) sum_t min(r_t A, clip(r_t, 1 - low, 1 + high) A) (arXiv:1707.06347), offline, no KL, no critic.

    Args:
        clip_low: epsilon below 1, where a negative has no gradient any more.
        clip_high: epsilon above 1, where a positive has none.
        baseline: c, subtracted from every reward.
        ratio: `token` is PPO's; the others for comparison, see `RatioLoss`.

    Raises:
        InputError: an epsilon is negative, or the baseline is not finite.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, baseline: float = 0.0, ratio: Ratio = "token"):
        super().__init__(ratio)
        check_clips(clip_low=clip_low, clip_high=clip_high)
        check_baseline(baseline)
        self.low, self.high, self.baseline = clip_low, clip_high, baseline

    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        """R - c."""
        return checked(self, reward.astype(np.float64) - self.baseline)

    def of_ratio(self, log_ratio: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """min(r A, clip(r) A) / A, which is r up to 1 + high for positives, r from 1 - low for negatives."""
        ratio = rho(log_ratio, 0, math.inf)
        clipped = torch.where(positive, ratio > 1 + self.high, ratio < 1 - self.low)
        value = torch.where(positive, ratio.clamp(max=1 + self.high), ratio.clamp(min=1 - self.low))
        return value, truncated_ratio(log_ratio.detach(), 0, math.inf) * ~clipped, clipped


class GRPO(PPO):
    """PPO with A = (R - mean of the group) / (its standard deviation + 1e-4) (arXiv:2402.03300)."""

    grouping = "group"

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2):
        super().__init__(clip_low, clip_high)

    def advantages(self, reward: np.ndarray, group: np.ndarray, seed: int = 0, epoch: int = 0) -> np.ndarray:
        return checked(self, standardised(reward, group))


class GSPO(PPO):
    """-min(s A, clip(s, 1 - low, 1 + high) A) with s = e^(h/T), which carries the 1/T; A as GRPO (arXiv:2507.18071)."""

    grouping = "group"

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4):
        super().__init__(clip_low, clip_high, ratio="sequence_mean")

    advantages = GRPO.advantages
