"""What an update did to each of its trajectories: gathered over ranks, checked and summarised.

Columns hold a value for each trajectory. They are gathered as float64, because float32 would
round row numbers; `trajectory` and `group` are integers again afterwards.
"""

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from topr.advantages import positive_share_of
from topr.batching import MicroBatch
from topr.io import InputError
from topr.io.distributed import end_all_ranks_on_error, gather
from topr.losses.base import LossOutput, sum_tokens

# largest |h| of the first batch, if this policy has scored log mu in float32 and trains in float32
MAX_LOG_RATIO = 1e-2
# if either precision is bfloat16: largest median of |h|/T
MEDIAN_TOKEN_LOG_RATIO = 2e-2
Columns = dict[str, np.ndarray]


def columns_of(part: MicroBatch, output: LossOutput, gradient_N: Tensor) -> dict[str, Tensor]:
    """The columns of a micro-batch whose backward has run.

    Args:
        gradient_N: of the scaled loss at the log-probs.
    """
    length_B = part.tokens.length_B
    return {
        "real": part.real_B,
        "trajectory": part.trajectory_B,
        "group": part.group_B,
        "reward": part.reward_B,
        "advantage": part.advantage_B,
        "length": length_B,
        "loss": output.loss_B.detach(),
        "objective": output.objective_B,
        "log_ratio": output.log_ratio_B,
        "weight": output.weight_B,
        "truncated": output.truncated_B,
        "gradient": sum_tokens(gradient_N.square(), length_B),  # squared norm
    }


def gather_columns(parts: list[dict[str, Tensor]]) -> Columns:
    """The columns of all micro-batches and ranks, without fillers, in the order of the data."""
    names = list(parts[0])
    stacked = [torch.stack([part[name].double() for name in names]) for part in parts]
    values = torch.cat(stacked, dim=1).cpu().numpy()  # one transfer from the device
    values = np.concatenate(gather(values), axis=1)
    values = values[:, values[names.index("real")] > 0]
    values = values[:, values[names.index("trajectory")].argsort(kind="stable")]
    columns = dict(zip(names, values, strict=True))
    for name in ("trajectory", "group"):
        columns[name] = columns[name].astype(int)
    return columns


def check_finite(columns: Columns, norm: float, update: int, data):
    """Raise an InputError before an update of NaN or infinite numbers: weights and checkpoints
    stay as they were.

    Args:
        norm: of the gradient.
        data: the `TrainingSet`, which knows where trajectories come from, if there is one.
    """
    checked = {
        "log-prob": columns["log_ratio"],
        "loss": columns["loss"],
        "gradient": columns["gradient"],
        "gradient of the weights": np.full(len(columns["loss"]), norm),
    }
    for name, values in checked.items():
        bad = columns["trajectory"][~np.isfinite(values)]
        if len(bad):
            where = "" if data is None else f", first {data.place(bad[0])}"
            with end_all_ranks_on_error():
                raise InputError(
                    f"update {update}: the {name} is NaN or infinite for {len(bad)} of its "
                    f"{len(values)} trajectories{where}; nothing was updated",
                    "lower the learning rate, or set trainer.precision 32-true, then resume",
                )


def check_start(columns: Columns, precision: str, data, policy_hash: str):
    """Before the first update log pi must equal log mu where a file says that this very policy
    sampled it; of another policy, the distribution of h is reported.

    Args:
        precision: of training.
        data: the `TrainingSet`; without one, nothing is known about the sampling policy.
        policy_hash: of the policy that starts training.
    """
    if data is None:
        return
    trajectory = columns["trajectory"]
    by_this_policy = data.sampled_by(policy_hash, trajectory)
    if not by_this_policy.all():
        low, middle, high = np.quantile(columns["log_ratio"][~by_this_policy], [0, 0.5, 1])
        rank_zero_info(
            f"another or an unknown policy sampled {(~by_this_policy).mean():.0%} of the first "
            f"batch; log-ratios: min {low:.3g}, median {middle:.3g}, max {high:.3g}"
        )
    if not by_this_policy.any():
        return
    size = np.abs(columns["log_ratio"][by_this_policy])
    distance, bound, measure = size.max(), MAX_LOG_RATIO, "the largest |log pi - log mu|"
    if precision != "32-true" or not data.in_float32:
        size = size / columns["length"][by_this_policy]
        distance, bound = np.median(size), MEDIAN_TOKEN_LOG_RATIO
        measure = "the median |log pi - log mu| per token"
    if distance <= bound:
        return
    worst = data.place(trajectory[by_this_policy][size.argmax()])
    with end_all_ranks_on_error():
        raise InputError(
            "data.train says that this policy sampled it, but before the first update "
            f"{measure} is {distance:.3g}, expected at most {bound} (worst: {worst}); "
            "score the responses again with this policy"
        )


def statistics(columns: Columns) -> dict[str, float]:
    """What is logged of one update; `callbacks/README.md` explains each name. NaN stands for what a
    batch without positives, or without negatives, does not have."""
    advantage = columns["advantage"]
    group = columns["group"]
    weight = columns["weight"]
    positive = advantage >= 0
    gradient = columns["gradient"]
    squares = (weight**2).sum() * len(weight)
    drift = columns["log_ratio"] / columns["length"]
    figures = {
        "train/loss": columns["loss"].mean(),
        "train/objective": columns["objective"].mean(),
        "train/reward": columns["reward"].mean(),
        "train/positive_share": positive.mean(),
        "train/effective_positive_share": positive_share_of(advantage),
        "train/groups_without_signal": len(np.setdiff1d(group, group[advantage != 0])),
        "weight/effective_sample_size": weight.sum() ** 2 / max(squares, 1e-12),
        "weight/negatives_below_0.01": mean(weight[~positive] < 0.01),
        "gradient/positive_share": gradient[positive].sum() / max(gradient.sum(), 1e-300),
    }
    for sign, chosen in (("positives", positive), ("negatives", ~positive)):
        log_ratio = columns["log_ratio"][chosen] if chosen.any() else np.array([np.nan])
        figures |= {
            f"log_ratio/{sign}_mean": log_ratio.mean(),
            f"log_ratio/{sign}_min": log_ratio.min(),
            f"log_ratio/{sign}_max": log_ratio.max(),
            f"drift/{sign}": mean(drift[chosen]),
            f"weight/{sign}_truncated": mean(columns["truncated"][chosen]),
        }
    return {name: float(value) for name, value in figures.items()}


def mean(values: np.ndarray) -> float:
    """The mean; NaN of nothing, without a warning."""
    return values.mean() if len(values) else np.nan
