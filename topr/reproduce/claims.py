"""The claims: TOPR against other methods (1 to 4), what it is applied to (5 to 8); and all losses side by side (9).

The first sentence of a docstring is the claim, the brackets after it are the place in the paper.
"""

from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd

from topr.reproduce.experiments import Experiment
from topr.reproduce.study import (
    START,
    Claim,
    Study,
    above,
    below,
    best,
    by_seed,
    differences,
    over_seeds,
    row,
    rows,
)

LONG, FAST = "REINFORCE, two epochs", "REINFORCE, TOPR's rate"
LOOSE = ["IS, clip 1", "IS, clip 100", "TOPR, clip 100"]
UNIFORM, KARENINA, SAME_RATE = "uniform", "Anna Karenina", "uniform, Anna Karenina's rate"


def curves(study: Study, *names: str) -> dict[str, Any]:
    """Validation metrics of the runs, by the number of validations, in which seeds may differ."""
    return {
        f"{name} at validation {i}": row(pd.DataFrame(points)[["pass@1", "invalid"]])
        for name in names
        for i, points in enumerate(
            zip(*(result["curve"] for result in study.methods[0][name]), strict=False)
        )
    }


def collapse(study: Study) -> Claim:
    """Naive REINFORCE improves, then collapses (Figures 1 and 3: rises, then most outputs are degenerate)."""
    runs, grid = study.methods
    columns = [[point["pass@1"] for point in result["curve"]] for result in runs[LONG]]
    peaks = np.array([column[other_peak(columns, i)] for i, column in enumerate(columns)])
    rise = over_seeds(peaks - [column[0] for column in columns])
    fall = over_seeds([column[-1] for column in columns] - peaks)
    measured = rows(runs, START, "TOPR", "REINFORCE", LONG, FAST)
    changes = differences(runs, (LONG, START), (FAST, START), ("REINFORCE", "TOPR"))
    parts = {
        "in two epochs at its own rate it first rises (on validation)": above(rise),
        "and then falls": below(fall),
        "below where it began": below(changes[f"{LONG} minus {START}"]["pass@1"]),
        "with most responses invalid": above(measured[LONG]["invalid"], 0.5),
        "in one epoch at TOPR's rate it ends below where it began": below(
            changes[f"{FAST} minus {START}"]["pass@1"]
        ),
        "with most responses invalid there": above(measured[FAST]["invalid"], 0.5),
    }
    measured[f"{LONG}, on validation"] = {"rise to its peak": rise, "fall from its peak": fall}
    return Claim(measured, changes, parts, grid, curves(study, LONG, FAST, "TOPR"))


def other_peak(columns: list[list[float]], i: int) -> int:
    """Where the mean curve of the other seeds peaks; the peak of curve i itself would be a peak of its noise, too."""
    return int(np.mean(columns[:i] + columns[i + 1 :] or columns, axis=0).argmax())


def clipping(study: Study) -> Claim:
    """PPO makes little progress: most data leave the clip's range and lose their gradient (Figure 3)."""
    (runs, grid), names, parts = study.methods, ["PPO", "PPO, sequence ratio"], {}
    measured = rows(runs, START, *names, "TOPR")
    changes = differences(runs, *((name, other) for name in names for other in ("TOPR", START)))
    for name in names:
        lost = over_seeds([without_gradient(**result) for result in runs[name]])
        before, after, topr = (by_seed(runs[label])["pass@1"] for label in (START, name, "TOPR"))
        gain = over_seeds((after - before) - (topr - before) / 2)
        measured[name]["without gradient"] = lost
        changes[f"{name}: gain minus half of TOPR's"] = {"pass@1": gain}
        parts[f"{name} gains less than half of what TOPR gains"] = below(gain)
        parts[f"at the end of {name}, most of the data has no gradient"] = above(lost, 0.5)
    return Claim(measured, changes, parts, grid)


def without_gradient(logged: dict[str, list[float]], positive_share: float, **_: Any) -> float:
    """Share of responses (for the token ratio: mean share of their tokens) beyond the clip, in a run's last fifth."""
    columns = [
        logged[f"weight/{sign}_truncated"] for sign in ("positives", "negatives")
    ]  # a batch may lack a sign
    positives, negatives = (np.mean(column[-(len(column) // 5 or 1) :]) for column in columns)
    return float(positive_share * positives + (1 - positive_share) * negatives)


def comparison(study: Study) -> Claim:
    """DPO does well off-policy; TOPR at least as well, and it alone sharply lowers the invalid rate (Figure 3)."""
    (runs, grid), names = (
        study.methods,
        ["TOPR", "positives only", "DPO", "PPO", "PPO, sequence ratio", "REINFORCE"],
    )
    changes = differences(runs, *((name, START) for name in names), *combinations(names, 2))
    invalid = {name: by_seed(runs[name])["invalid"] for name in (START, *names)}
    halved = {name: over_seeds(invalid[name] - invalid[START] / 2) for name in names}
    parts = {
        "DPO ends above the start": above(changes[f"DPO minus {START}"]["pass@1"]),
        "TOPR ends at most a point below DPO": above(changes["TOPR minus DPO"]["pass@1"], -0.01),
        "TOPR more than halves the share of invalid responses": below(halved["TOPR"]),
    }
    parts |= {
        f"{name} does not": above(halved[name]) for name in names[2:]
    }  # the paper compares TOPR with these
    changes |= {
        f"{name}: invalid minus half of the start's": {"invalid": gap}
        for name, gap in halved.items()
    }
    return Claim(rows(runs, START, *names), changes, parts, grid, curves(study, *names))


def positives_only(study: Study) -> Claim:
    """Positives only is stable but lower in pass@1 and maj@k; negatives rescue questions with few or no solutions
    (Figure 4)."""
    (runs, grid), names = study.methods, [START, "TOPR", "positives only"]
    changes = differences(runs, ("positives only", "TOPR"), ("positives only", START))
    solved, topr, positives = (
        np.array([result["result"]["pass@1"] for result in runs[name]]) for name in names
    )
    gains = {}
    for name, low, high in (
        ("up to a quarter", -1, 0.25),
        ("up to a half", 0.25, 0.5),
        ("more than half", 0.5, 1),
    ):
        chosen = (low < solved) & (solved <= high)
        gains[name] = ((topr - positives) * chosen).sum(axis=1) / np.maximum(
            chosen.sum(axis=1), 1
        )  # 0 if none
    most = over_seeds(gains["up to a quarter"] - gains["more than half"])
    parts = {
        "positives only ends below TOPR in pass@1": below(
            changes["positives only minus TOPR"]["pass@1"]
        ),
        f"and in maj@{study.setting.samples}": below(changes["positives only minus TOPR"]["maj"]),
        "it is stable: it ends above the start": above(
            changes[f"positives only minus {START}"]["pass@1"]
        ),
        "negatives help most where the base policy is right in up to a quarter": above(most),
    }
    changes["TOPR minus positives only, by how often the base policy is right"] = row(
        pd.DataFrame(gains)
    )
    return Claim(rows(runs, *names), changes, parts, grid)


def effective_share(study: Study) -> Claim:
    """Accuracy peaks at an effective share of positives of .1 to .2, whatever the data's share, and drops above .5
    (Figure 5, for data with 10% and with 50% positives)."""
    setting = study.setting
    data = {
        f"data with {p:.0%} positives": {"way": "share", "share": p, "total": setting.total}
        for p in (0.1, 0.5)
    }
    runs = {
        f"{name} at effective share {share:.0%}": {
            "loss": ["TOPR", {"positive_share": share}],
            "curation": data[name],
        }
        for name, share in product(data, setting.shares)
    }
    grid = study.tune(runs)
    names, trainings = (
        list(data),
        {label: run | {"rate": best(grid[label])} for label, run in runs.items()},
    )
    if rate := setting.small_rate:
        names += [f"{name}, rate {rate:g}," for name in data]
        trainings |= {
            label.replace(" at", f", rate {rate:g}, at"): run | {"rate": rate}
            for label, run in runs.items()
        }
    ends = study.train(trainings, min(8, setting.samples))
    changes, parts = dict[str, Any](), {}
    for name in names:
        label = {share: f"{name} at effective share {share:.0%}" for share in setting.shares}
        pairs = (label[0.15], label[0.05]), (label[0.15], label[0.5]), (label[0.5], label[0.9])
        changes |= (gaps := differences(ends, *pairs))
        *wins, last = (above(gap["pass@1"]) for gap in gaps.values())
        parts[f"{name}: an effective share of 15% beats 5% and 50%"] = (
            False if False in wins else wins[0] and wins[1]
        )
        parts[f"{name}: an effective share of 50% beats 90%"] = last
    return Claim(rows(ends), changes, parts, grid)


def loose_clipping(study: Study) -> Claim:
    """With 60% negatives and clipping loosened to 100, untruncated importance sampling harms; TOPR still improves
    (Figure 7: importance sampling ends with 31% bad outputs, 12% before)."""
    setting, changes, parts = study.setting, dict[str, Any](), {}
    data = {"curation": {"way": "share", "share": 0.4, "total": setting.total}}
    runs = {name: study.method(name) | data for name in LOOSE}
    grid, rates = study.tune({"TOPR, clip 100": runs["TOPR, clip 100"]}), setting.rates
    trainings = {
        f"{name} at rate {rate:g}": runs[name] | {"rate": rate} for rate in rates for name in runs
    }
    ends = study.train(trainings, min(8, setting.samples))
    loose = {
        rate: [f"{name}, clip 100 at rate {rate:g}" for name in ("IS", "TOPR")] for rate in rates
    }
    for sampling, topr in loose.values():
        changes |= differences(ends, (sampling, START), (topr, START), (topr, sampling))
    own = rates.index(best(grid["TOPR, clip 100"]))
    for when, rate in zip(("at TOPR's own rate", "at the next larger"), rates[own:], strict=False):
        sampling, topr = loose[rate]
        where, change = f"with clip 100 {when}, {rate:g}", changes[f"{sampling} minus {START}"]
        parts[f"{where}: IS ends below the start"] = below(change["pass@1"])
        parts[f"{where}: IS ends with more invalid responses than the start"] = above(
            change["invalid"]
        )
        parts[f"{where}: TOPR ends above the start"] = above(
            changes[f"{topr} minus {START}"]["pass@1"]
        )
        parts[f"{where}: TOPR ends above IS"] = above(changes[f"{topr} minus {sampling}"]["pass@1"])
    return Claim(rows(ends), changes, parts, grid)


def iterations(study: Study) -> Claim:
    """Several iterations keep improving; Anna Karenina sampling beats uniform (Figure 10: 79.6% to 75.4% on GSM8K)."""
    sizes = {"prompts": study.setting.prompts, "budget": 8, "pool": study.setting.pool}
    runs = {UNIFORM: sizes | {"way": "uniform"}, KARENINA: sizes | {"way": "anna_karenina"}}
    grid = study.tune({name: run | {"count": 2} for name, run in runs.items()}, Experiment.iterate)
    given = {"count": 4, "split": "test", "samples": min(8, study.setting.samples)}
    chains = {name: run | given | {"rate": best(grid[name])} for name, run in runs.items()}
    chains[SAME_RATE] = chains[UNIFORM] | {"rate": chains[KARENINA]["rate"]}
    found = study.run(Experiment.iterate, chains, study.seeds)
    label, steps, ends = "{} at iteration {}".format, range(1, 5), {}
    for name, i in product(chains, range(5)):
        ends[label(name, i)] = [{"result": chain["results"][i]} for chain in found[name]]
    changes = differences(ends, *((label(UNIFORM, i), label(UNIFORM, i - 1)) for i in steps))
    gains = [above(gap["pass@1"]) for gap in changes.values()]
    parts = {f"iteration {i} ends above {i - 1}": gains[i - 1] for i in steps[1:]}
    for name in (UNIFORM, SAME_RATE):
        changes |= (
            gaps := differences(ends, *((label(KARENINA, i), label(name, i)) for i in steps))
        )
        parts[f"{KARENINA} ends above {name}"] = [above(gap["pass@1"]) for gap in gaps.values()][-1]
    measured = rows(ends)
    for name in chains:
        shares = pd.DataFrame(
            [chain["shares"] for chain in found[name]], columns=[f"iteration {i}" for i in steps]
        )
        measured[f"positives, {name}"] = row(shares)
    updates = {name: [sum(chain["updates"]) for chain in found[name]] for name in chains}
    return Claim(measured, changes, parts, grid, rows(ends), updates)


def verifier(study: Study) -> Claim:
    """A generative verifier trained with TOPR: more accurate, fewer invalid critiques, better weighted votes
    (Table 2: accuracy 32.6 to 70.9%, invalid 34.2 to 0.9%; weighted self-consistency 55.5 to 61.5)."""
    grid = study.tune({"TOPR": study.method("TOPR")})  # of the arithmetic itself
    run = {
        "rate": best(grid["TOPR"]),
        "samples": 8,
        "critiques": 4,
        "steps": study.setting.verifier_steps,
    }
    results = study.run(Experiment.verify, {"verifier": run}, study.seeds)["verifier"]
    before, after = by_seed(results, "before"), by_seed(results, "after")
    votes = pd.DataFrame({f"@{k}": after[f"weighted@{k}"] - after[f"maj@{k}"] for k in (4, 8)})
    changes = {
        "after minus before": row(after - before),
        "after: weighted minus majority": row(votes),
    }
    parts = {
        "training raises the verifier's accuracy": above(changes["after minus before"]["accuracy"]),
        "and lowers its share of invalid critiques": below(
            changes["after minus before"]["invalid"]
        ),
        "the vote of 8, weighted by it, beats the majority": above(
            changes["after: weighted minus majority"]["@8"]
        ),
    }
    figure = {
        "before": row(before.filter(regex="[^4]$")),
        "after": row(after.filter(regex="[^4]$")),
    }  # without @4
    return Claim({"before": row(before), "after": row(after)}, changes, parts, grid, figure)


def losses(study: Study) -> Claim:
    """Every shipped loss on the same trajectories, each at its own rate (no claim of the paper)."""
    runs, grid = study.tuned([name for name in study.losses if name not in LOOSE])
    ends = study.train(runs, study.setting.samples)
    measured, changes = (
        rows(ends),
        differences(ends, *((name, "TOPR") for name in runs if name != "TOPR")),
    )
    for name in runs:
        curves = [np.array([point["pass@1"] for point in result["curve"]]) for result in ends[name]]
        measured[name]["largest fall"] = over_seeds(
            [(np.maximum.accumulate(c) - c).max() for c in curves]
        )
        if name != "TOPR":
            measured[name]["minus TOPR"] = changes[f"{name} minus TOPR"]["pass@1"]
        for label, key in (("updates", "steps"), ("CPU seconds", "train_cpu_s")):
            measured[name][label] = round(np.mean([result[key] for result in ends[name]]))
    ranking = sorted(measured, key=lambda name: measured[name]["pass@1"]["mean"], reverse=True)
    return Claim({name: measured[name] for name in ranking}, changes, {}, grid)


CLAIMS = [
    collapse,
    clipping,
    comparison,
    positives_only,
    effective_share,
    loose_clipping,
    iterations,
    verifier,
    losses,
]
