"""Losses on stored trajectories: pure functions of log-probs, each one class chosen by `class_path`.
Not here: models, loggers, trainers."""

from topr.losses.advantages import advantage_share, baseline_for_rewards, positives, silent_groups
from topr.losses.base import Loss, LossOutput, check_output, sum_tokens
from topr.losses.comparators import CISPO, DPO, GRPO, GSPO, KTO, OPMD, PPO, RLOO, AsymRE
from topr.losses.comparators import RECOneSide, RECRing, RECTwoSide, REDDrop, REDWeight
from topr.losses.topr import IS, REINFORCE, TIS, TOPR, PositivesOnly, rho
