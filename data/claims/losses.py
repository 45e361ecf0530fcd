"""TOPR against other losses on the same trajectories: claims 1 to 4, and 9."""

import numpy as np
import pandas as pd

from data.claims.study import (
    CRITERIA,
    SETTINGS,
    START,
    Found,
    Results,
    Study,
    differences,
    means,
    over_seeds,
    row,
    rows,
)

LONG = "REINFORCE, two epochs"
DIFFICULTIES = ["up to a quarter", "up to a half", "more than half"]


def collapse(study: Study) -> Found:
    """Claim 1: the rise and the fall of REINFORCE on validation."""
    found, runs = compared(study, 1)
    accuracy = curves(runs[LONG], "val/pass@1")
    peaks = [accuracy[seed, other_peak(accuracy, seed)] for seed in range(len(accuracy))]
    found.measured[f"{LONG}, on validation"] = {
        "rise to its peak": over_seeds(peaks - accuracy[:, 0]),
        "fall from its peak": over_seeds(accuracy[:, -1] - peaks),
    }
    return found


def clipping(study: Study) -> Found:
    """Claim 2: what PPO gains, and how many responses have lost their gradient."""
    found, runs = compared(study, 2)
    for name in ("PPO", "PPO, sequence ratio"):
        lost = [without_gradient(**result) for result in runs[name]]
        found.measured[name]["without gradient"] = over_seeds(lost)
        before, after, topr = (means(runs[label])["pass@1"] for label in (START, name, "TOPR"))
        gain = over_seeds(after - before - (topr - before) / 2)
        found.differences[f"{name}: gain minus half of TOPR's"] = {"pass@1": gain}
    return found


def comparison(study: Study) -> Found:
    """Claim 3: whether the share of invalid responses is halved."""
    found, runs = compared(study, 3)
    half = means(runs[START])["invalid"] / 2
    for name in CRITERIA[3]["rows"][1:]:
        gap = over_seeds(means(runs[name])["invalid"] - half)
        found.differences[f"{name}: invalid minus half of the start's"] = {"invalid": gap}
    return found


def positives_only(study: Study) -> Found:
    """Claim 4: what negatives add, by how often the base policy solves a problem."""
    found, runs = compared(study, 4)
    gains = []
    for seeds in zip(runs[START], runs["TOPR"], runs["positives only"], strict=True):
        solved, topr, positives = (result["result"]["pass@1"] for result in seeds)
        groups = pd.cut(solved, [-1, 0.25, 0.5, 1], labels=DIFFICULTIES)
        gains.append((topr - positives).groupby(groups, observed=False).mean().fillna(0))
    label = "TOPR minus positives only, by how often the base policy is right"
    found.differences[label] = row(pd.DataFrame(gains))
    return found


def all_losses(study: Study) -> Found:
    """Every loss of this package, from the best to the worst."""
    names = [name for name in SETTINGS["losses"] if "clip" not in name]
    runs, tuning = study.tuned(names)
    ends = study.train(runs, study.setting["samples"])
    measured = rows(ends)
    changes = differences(ends, [(name, "TOPR") for name in names if name != "TOPR"])
    for name in names:
        accuracy = curves(ends[name], "val/pass@1")
        falls = np.maximum.accumulate(accuracy, axis=1) - accuracy
        measured[name]["largest fall"] = over_seeds(falls.max(axis=1))
        if name != "TOPR":
            measured[name]["minus TOPR"] = changes[f"{name} minus TOPR"]["pass@1"]
        for column in ("updates", "CPU seconds"):
            measured[name][column] = round(np.mean([result[column] for result in ends[name]]))
    ranking = sorted(measured, key=lambda name: -measured[name]["pass@1"]["mean"])
    return Found({name: measured[name] for name in ranking}, changes, tuning)


def compared(study: Study, claim: int) -> tuple[Found, dict[str, Results]]:
    """The rows, differences and curves that claims.yaml names for a claim, and all results."""
    runs, tuning = study.methods
    named = CRITERIA[claim]
    found = Found(rows(runs, named["rows"]), differences(runs, named["differences"]), tuning)
    for name in named["shown"]:
        accuracy = curves(runs[name], "val/pass@1")
        invalid = curves(runs[name], "val/invalid")
        for i in range(accuracy.shape[1]):
            point = {"pass@1": over_seeds(accuracy[:, i]), "invalid": over_seeds(invalid[:, i])}
            found.figure[f"{name} at validation {i}"] = point
    return found, runs


def curves(results: Results, metric: str) -> np.ndarray:
    """A validation metric, a row for each seed; after divergence its last value is repeated."""
    found = [result["metrics"][metric].dropna().tolist() for result in results]
    return pd.DataFrame(found).ffill(axis=1).to_numpy()


def other_peak(columns: np.ndarray, seed: int) -> int:
    """Where the mean curve of the other seeds peaks.

    The peak of the seed's own curve would be a peak of its noise, too.
    """
    return np.delete(columns, seed, axis=0).mean(axis=0).argmax()


def without_gradient(metrics: pd.DataFrame, positive_share: float, **_: object) -> float:
    """Share of responses beyond the clip in the last fifth of a training.

    For the token ratio it is the mean share of their tokens.
    """
    shares = []
    for sign in ("positives", "negatives"):
        column = metrics[f"weight/{sign}_truncated"].dropna()  # a batch may lack a sign
        shares.append(column.tail(max(1, len(column) // 5)).mean())
    return float(np.average(shares, weights=[positive_share, 1 - positive_share]))
