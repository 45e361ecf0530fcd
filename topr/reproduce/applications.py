"""Claims 5 to 8: the composition of the data, loose clipping, several iterations, a generative verifier."""

import numpy as np

from topr.reproduce.experiments import Experiment
from topr.reproduce.study import START, Claim, Rows, Study, above, below, best, differences, over_seeds, summaries

LIMITS = ("a_plus", "b_plus", "a_minus", "b_minus")
CLIPPING = {"IS, clip 1": (0, 1, 0, 1), "IS, clip 100": (0, 100, 0, 100), "TOPR, clip 100": (1, 1, 0, 100)}
UNIFORM, KARENINA, SAME_RATE = "uniform", "Anna Karenina", "uniform, Anna Karenina's rate"


def effective_share(study: Study) -> Claim:
    """Accuracy peaks at an effective share of positives of .1 to .2, whatever the data's share, and drops above .5
    (Figure 5, for data with 10% and with 50% positives).
    """
    setting = study.setting
    data = {f"data with {p:.0%} positives": {"way": "share", "share": p, "total": setting.total} for p in (0.1, 0.5)}
    runs = {
        f"{name} at effective share {share:.0%}": {"loss": ["TOPR", {"positive_share": share}], "curation": curation}
        for name, curation in data.items()
        for share in setting.shares
    }
    grid = study.tune(runs, setting.share_tuning_seeds)
    names, trainings = list(data), {label: run | {"rate": best(grid[label])} for label, run in runs.items()}
    if rate := setting.small_rate:
        names += [f"{name}, rate {rate:g}," for name in data]
        trainings |= {label.replace(" at", f", rate {rate:g}, at"): run | {"rate": rate} for label, run in runs.items()}
    ends = study.train(trainings, min(8, setting.samples))
    changes, parts = Rows(), {}
    for name in names:
        label = {share: f"{name} at effective share {share:.0%}" for share in setting.shares}
        pairs = (label[0.15], label[0.05]), (label[0.15], label[0.5]), (label[0.5], label[0.9])
        changes |= (gaps := differences(ends, *pairs))
        *wins, last = (above(gap["pass@1"]) for gap in gaps.values())
        parts[f"{name}: an effective share of 15% beats 5% and 50%"] = False if False in wins else wins[0] and wins[1]
        parts[f"{name}: an effective share of 50% beats 90%"] = last
    return Claim(summaries(ends), changes, parts, grid)


def loose_clipping(study: Study) -> Claim:
    """With 60% negatives and clipping loosened to 100, untruncated importance sampling harms; TOPR still improves
    (Figure 7: importance sampling ends with 31% bad outputs, 12% before).
    """
    setting, changes, parts = study.setting, Rows(), {}
    data = {"curation": {"way": "share", "share": 0.4, "total": setting.total}}
    runs = {name: data | {"loss": ["TOPR", dict(zip(LIMITS, CLIPPING[name], strict=True))]} for name in CLIPPING}
    grid, rates = study.tune(runs, setting.tuning_seeds), setting.rates
    trainings = {f"{name} at rate {rate:g}": runs[name] | {"rate": rate} for rate in rates for name in runs}
    ends = study.train(trainings, min(8, setting.samples))
    for rate in rates:
        sampling, topr = (f"{name}, clip 100 at rate {rate:g}" for name in ("IS", "TOPR"))
        changes |= differences(ends, (sampling, START), (topr, START), (topr, sampling))
    for when, rate in (("at TOPR's own rate", best(grid["TOPR, clip 100"])), ("at the largest", max(rates))):
        sampling, topr = (f"{name}, clip 100 at rate {rate:g}" for name in ("IS", "TOPR"))
        where, change = f"with clip 100 {when}, {rate:g}", changes[f"{sampling} minus {START}"]
        parts[f"{where}: IS ends below the start"] = below(change["pass@1"])
        parts[f"{where}: IS ends with more invalid responses than the start"] = above(change["invalid"])
        parts[f"{where}: TOPR ends above the start"] = above(changes[f"{topr} minus {START}"]["pass@1"])
        parts[f"{where}: TOPR ends above IS"] = above(changes[f"{topr} minus {sampling}"]["pass@1"])
    return Claim(summaries(ends), changes, parts, grid)


def iterations(study: Study) -> Claim:
    """Several iterations keep improving; Anna Karenina sampling beats uniform (Figure 10: 79.6% to 75.4% on GSM8K)."""
    sizes = {"prompts": study.setting.prompts, "budget": 8, "pool": study.setting.pool}
    runs = {UNIFORM: sizes | {"way": "uniform"}, KARENINA: sizes | {"way": "anna_karenina"}}
    grid = study.tune({name: run | {"count": 2} for name, run in runs.items()}, 1, Experiment.iterate)
    given = {"count": 4, "split": "test", "samples": min(8, study.setting.samples)}
    chains = {name: run | given | {"rate": best(grid[name])} for name, run in runs.items()}
    chains[SAME_RATE] = chains[UNIFORM] | {"rate": chains[KARENINA]["rate"]}
    found = study.cache.run(Experiment.iterate, chains, study.seeds)
    label, steps = "{} at iteration {}".format, range(1, 5)
    ends = {
        label(name, i): [{"result": chain["results"][i]} for chain in found[name]] for name in chains for i in range(5)
    }
    changes = differences(ends, *((label(UNIFORM, i), label(UNIFORM, i - 1)) for i in steps))
    gains = [above(gap["pass@1"]) for gap in changes.values()]
    parts = {f"iteration {i} ends above {i - 1}": gains[i - 1] for i in steps[1:]}
    for name in (UNIFORM, SAME_RATE):
        changes |= (gaps := differences(ends, *((label(KARENINA, i), label(name, i)) for i in steps)))
        parts[f"{KARENINA} ends above {name}"] = [above(gap["pass@1"]) for gap in gaps.values()][-1]
    measured, rows = summaries(ends), {}
    for name in chains:
        shares = np.transpose([chain["shares"] for chain in found[name]])
        rows[f"positives, {name}"] = {f"iteration {i}": over_seeds(row) for i, row in enumerate(shares, 1)}
    updates = {name: [sum(chain["updates"]) for chain in found[name]] for name in chains}
    return Claim(measured | rows, changes, parts, grid, updates=updates)


def verifier(study: Study) -> Claim:
    """A generative verifier trained with TOPR: more accurate, fewer invalid critiques, better weighted votes
    (Table 2: accuracy 32.6 to 70.9%, invalid 34.2 to 0.9%; weighted self-consistency 55.5 to 61.5).
    """
    grid = study.tune({"TOPR": study.trainings["TOPR"]}, study.setting.tuning_seeds)  # of the arithmetic itself
    run = {"rate": best(grid["TOPR"]), "samples": 8, "critiques": 4, "steps": study.setting.verifier_steps}
    results, found = study.cache.run(Experiment.verify, {"verifier": run}, study.seeds)["verifier"], {}
    for when in ("before", "after"):
        found[when] = {name: np.array([np.mean(result[when][name]) for result in results]) for name in results[0][when]}
    before, after = found["before"], found["after"]
    gaps = {"after minus before": {name: after[name] - before[name] for name in after}}
    gaps["after: weighted minus majority"] = {f"@{k}": after[f"weighted@{k}"] - after[f"maj@{k}"] for k in (4, 8)}
    measured, changes = (
        {label: {k: over_seeds(v) for k, v in rows[label].items()} for label in rows} for rows in (found, gaps)
    )
    parts = {
        "training raises the verifier's accuracy": above(changes["after minus before"]["accuracy"]),
        "and lowers its share of invalid critiques": below(changes["after minus before"]["invalid"]),
        "the vote of 8, weighted by it, beats the majority": above(changes["after: weighted minus majority"]["@8"]),
    }
    return Claim(measured, changes, parts, grid)
