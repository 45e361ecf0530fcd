"""Claims 1 to 4: TOPR against other methods, on the data as sampled."""

from itertools import combinations
from typing import Any

import numpy as np

from topr.reproduce.study import START, Claim, Rows, Study, above, below, by_seed, differences, over_seeds, summaries

LONG, FAST = "REINFORCE, two epochs", "REINFORCE, TOPR's rate"


def curves(study: Study, *names: str) -> Rows:
    """Validation metrics of the runs, by the number of validations."""
    rows: Rows = {}
    for name in names:
        validations = zip(*(result["curve"] for result in study.method_runs[name]), strict=False)
        for i, points in enumerate(validations):  # seeds may differ in their number of updates
            columns = {metric: [point[metric] for point in points] for metric in ("pass@1", "invalid")}
            rows[f"{name} at validation {i}"] = {metric: over_seeds(values) for metric, values in columns.items()}
    return rows


def collapse(study: Study) -> Claim:
    """Naive REINFORCE improves, then collapses (Figures 1 and 3: rises, then most outputs are degenerate)."""
    runs = study.method_runs
    columns = [[point["pass@1"] for point in result["curve"]] for result in runs[LONG]]
    peaks = np.array([column[other_peak(columns, i)] for i, column in enumerate(columns)])
    rise = over_seeds(peaks - [column[0] for column in columns])
    fall = over_seeds([column[-1] for column in columns] - peaks)
    measured = summaries(runs, START, "TOPR", "REINFORCE", LONG, FAST)
    changes = differences(runs, (LONG, START), (FAST, START), ("REINFORCE", "TOPR"))
    parts = {
        "in two epochs at its own rate it first rises (on validation)": above(rise),
        "and then falls": below(fall),
        "below where it began": below(changes[f"{LONG} minus {START}"]["pass@1"]),
        "with most responses invalid": above(measured[LONG]["invalid"], 0.5),
    }
    measured[f"{LONG}, on validation"] = {"rise to its peak": rise, "fall from its peak": fall}
    return Claim(measured, changes, parts, study.grid, curves(study, LONG, FAST, "TOPR"))


def other_peak(columns: list[list[float]], i: int) -> int:
    """Where the mean curve of the other seeds peaks; the peak of curve i itself would be a peak of its noise, too."""
    return int(np.mean(columns[:i] + columns[i + 1 :] or columns, axis=0).argmax())


def clipping(study: Study) -> Claim:
    """PPO makes little progress: most data leave the clip's range and lose their gradient (Figure 3)."""
    runs, names, parts = study.method_runs, ["PPO", "PPO, sequence ratio"], {}
    measured = summaries(runs, START, *names, "TOPR")
    changes = differences(runs, *((name, other) for name in names for other in ("TOPR", START)))
    for name in names:
        lost = over_seeds([without_gradient(**result) for result in runs[name]])
        before, after, topr = (by_seed(runs[label], "pass@1") for label in (START, name, "TOPR"))
        gain = over_seeds((after - before) - (topr - before) / 2)
        measured[name]["without gradient"] = lost
        changes[f"{name}: gain minus half of TOPR's"] = {"pass@1": gain}
        parts[f"{name} gains less than half of what TOPR gains"] = below(gain)
        parts[f"at the end of {name}, most of the data has no gradient"] = above(lost, 0.5)
    return Claim(measured, changes, parts, study.grid)


def without_gradient(logged: dict[str, list[float]], positive_share: float, **_: Any) -> float:
    """Share of responses (for the token ratio: mean share of their tokens) beyond the clip, in a run's last fifth."""
    columns = [logged[f"weight/{sign}_truncated"] for sign in ("positives", "negatives")]  # a batch may lack a sign
    positives, negatives = (np.mean(column[-(len(column) // 5 or 1) :]) for column in columns)
    return float(positive_share * positives + (1 - positive_share) * negatives)


def comparison(study: Study) -> Claim:
    """DPO does well off-policy; TOPR at least as well, and it alone sharply lowers the invalid rate (Figure 3)."""
    runs = study.method_runs
    names = ["TOPR", "positives only", "DPO", "PPO", "PPO, sequence ratio", "REINFORCE"]
    changes = differences(runs, *((name, START) for name in names), *combinations(names, 2))
    halved = {name: over_seeds(by_seed(runs[name], "invalid") - by_seed(runs[START], "invalid") / 2) for name in names}
    parts = {
        "DPO ends above the start": above(changes[f"DPO minus {START}"]["pass@1"]),
        "TOPR ends at most a point below DPO": above(changes["TOPR minus DPO"]["pass@1"], -0.01),
        "TOPR more than halves the share of invalid responses": below(halved["TOPR"]),
    }
    parts |= {f"{name} does not": above(halved[name]) for name in names[2:]}  # the paper compares TOPR with these
    changes |= {f"{name}: invalid minus half of the start's": {"invalid": gap} for name, gap in halved.items()}
    return Claim(summaries(runs, START, *names), changes, parts, study.grid, curves(study, *names))


def positives_only(study: Study) -> Claim:
    """Positives only is stable but lower in pass@1 and maj@k; negatives rescue questions with few or no solutions
    (Figure 4).
    """
    runs, names = study.method_runs, [START, "TOPR", "positives only"]
    measured = summaries(runs, *names)
    changes = differences(runs, ("positives only", "TOPR"), ("positives only", START))
    solved, topr, positives = (np.array([result["result"]["pass@1"] for result in runs[name]]) for name in names)
    gains = {}
    for name, low, high in (("up to a quarter", -1, 0.25), ("up to a half", 0.25, 0.5), ("more than half", 0.5, 1)):
        chosen = (low < solved) & (solved <= high)
        gains[name] = ((topr - positives) * chosen).sum(axis=1) / np.maximum(chosen.sum(axis=1), 1)  # 0 if none
    most = over_seeds(gains["up to a quarter"] - gains["more than half"])
    parts = {
        "positives only ends below TOPR in pass@1": below(changes["positives only minus TOPR"]["pass@1"]),
        f"and in maj@{study.setting.samples}": below(changes["positives only minus TOPR"]["maj"]),
        "it is stable: it ends above the start": above(changes[f"positives only minus {START}"]["pass@1"]),
        "negatives help most where the base policy is right in up to a quarter": above(most),
    }
    rescued = {name: over_seeds(values) for name, values in gains.items()}
    changes["TOPR minus positives only, by how often the base policy is right"] = rescued
    return Claim(measured, changes, parts, study.grid)
