"""Losses on stored trajectories: pure functions of log-probs, chosen by `class_path`.
Not here: advantages, models, loggers, trainers."""

from topr.losses.base import Loss, LossOutput, check_output, sum_tokens
from topr.losses.policy_gradient import CISPO, OPMD, PPO, RECOneSide, RECRing, RECTwoSide
from topr.losses.preference import DPO, KTO
from topr.losses.topr import IS, REINFORCE, TIS, TOPR, PositivesOnly, rho
