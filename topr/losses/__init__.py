"""Losses on stored trajectories: pure functions of log-probs, chosen by `class_path`; statistics of
what they did. Not here: advantages, models, loggers, trainers."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    base=["Loss", "LossOutput", "sum_tokens"],
    policy_gradient=[
        "CISPO",
        "MaskedPPO",
        "NFT",
        "OPMD",
        "PPO",
        "QRPO",
        "RECOneSide",
        "RECRing",
        "RECTwoSide",
        "VESPO",
    ],
    preference=["DPO", "IPO", "KTO"],
    topr=["IS", "REINFORCE", "TIS", "TOPR", "PositivesOnly", "rho"],
)
