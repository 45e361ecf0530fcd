"""The losses, each one class chosen by class_path: TOPR's family and the methods that it is compared with."""

from topr.losses.clipped import GRPO, GSPO, PPO
from topr.losses.groups import OPMD, RLOO, AsymRE, REDDrop, REDWeight
from topr.losses.loss import LARGEST, Loss, LossOutput, sum_tokens
from topr.losses.preference import DPO, KTO
from topr.losses.shares import (
    advantage_share,
    baseline_for_share,
    baseline_from_rewards,
    effective_positive_share,
    positives,
    silent_groups,
)
from topr.losses.tapered import IS, REINFORCE, TIS, TOPR, PositivesOnly, rho
from topr.losses.weighted import CISPO, RECOneSide, RECRing, RECTwoSide

__all__ = [
    "AsymRE", "CISPO", "DPO", "GRPO", "GSPO", "IS", "KTO", "LARGEST", "Loss", "LossOutput", "OPMD", "PPO",
    "PositivesOnly", "RECOneSide", "RECRing", "RECTwoSide", "REDDrop", "REDWeight", "REINFORCE", "RLOO", "TIS",
    "TOPR", "advantage_share", "baseline_for_share", "baseline_from_rewards", "effective_positive_share",
    "positives", "rho",
    "silent_groups", "sum_tokens",
]  # fmt: skip
