"""What TOPR is trained on: the share of positives (5), negatives alone (6), its own samples (7)."""

from itertools import product

import pandas as pd

from data.claims.study import CRITERIA, SETTINGS, START, Found, Study, best, differences, row, rows

CLIPPED = ["IS, clip 1", "IS, clip 100", "TOPR, clip 100"]
UNIFORM = "uniform"
KARENINA = "Anna Karenina"
SAME_RATE = "uniform, Anna Karenina's rate"


def effective_share(study: Study) -> Found:
    """Claim 5: effective shares of positives, in data with few and with many."""
    setting = study.setting
    runs = {}
    for p, share in product((0.1, 0.5), setting["shares"]):
        advantage = ["--data.advantage=topr.advantages.PositiveShare"]
        advantage += [f"--data.advantage.share={share}"]
        runs[f"data with {p:.0%} positives at effective share {share:.0%}"] = {
            "loss": SETTINGS["losses"]["TOPR"] + advantage,
            "curation": ["share", f"--share={p}", f"--total={setting['total']}"],
        }
    tuning = study.tune(runs)
    trainings = {label: run | {"rate": best(tuning[label])} for label, run in runs.items()}
    data = ["data with 10% positives", "data with 50% positives"]
    if rate := setting["small_rate"]:
        data += [f"{name}, rate {rate:g}," for name in data]
        for label, run in runs.items():
            trainings[label.replace(" at", f", rate {rate:g}, at")] = run | {"rate": rate}
    ends = study.train(trainings, min(8, setting["samples"]))
    pairs = []
    for name, (one, two) in product(data, ((15, 5), (15, 50), (50, 90))):
        label = f"{name} at effective share"
        pairs.append((f"{label} {one}%", f"{label} {two}%"))
    variants = [{"data": name} for name in data]
    return Found(rows(ends), differences(ends, pairs), tuning, variants=variants)


def loose_clipping(study: Study) -> Found:
    """Claim 6: importance sampling and TOPR with a clip of 100, on data with 60% negatives."""
    setting = study.setting
    curation = ["share", "--share=0.4", f"--total={setting['total']}"]
    runs = {name: {"loss": SETTINGS["losses"][name], "curation": curation} for name in CLIPPED}
    tuning = study.tune({"TOPR, clip 100": runs["TOPR, clip 100"]})
    trainings = {}
    pairs = []
    for rate in setting["rates"]:
        for name in CLIPPED:
            trainings[f"{name} at rate {rate:g}"] = runs[name] | {"rate": rate}
        sampling = f"IS, clip 100 at rate {rate:g}"
        topr = f"TOPR, clip 100 at rate {rate:g}"
        pairs += [(sampling, START), (topr, START), (topr, sampling)]
    ends = study.train(trainings, min(8, setting["samples"]))
    own = setting["rates"].index(best(tuning["TOPR, clip 100"]))
    variants = [{"when": "at TOPR's own rate", "rate": f"{setting['rates'][own]:g}"}]
    for rate in setting["rates"][own + 1 : own + 2]:
        variants.append({"when": "at the next larger", "rate": f"{rate:g}"})
    return Found(rows(ends), differences(ends, pairs), tuning, variants=variants)


def iterations(study: Study) -> Found:
    """Claim 7: four iterations of uniform and of Anna Karenina sampling."""
    runs = {UNIFORM: {"way": "uniform"}, KARENINA: {"way": "anna_karenina"}}
    tuning = study.tune({name: run | {"count": 2} for name, run in runs.items()}, "iterate")
    given = {"count": 4, "split": "test", "samples": min(8, study.setting["samples"])}
    chains = {name: run | given | {"rate": best(tuning[name])} for name, run in runs.items()}
    chains[SAME_RATE] = chains[UNIFORM] | {"rate": chains[KARENINA]["rate"]}
    found = study.run("iterate", chains, study.seeds)
    ends = {}
    for name, i in product(chains, range(5)):
        ends[f"{name} at iteration {i}"] = [
            {"result": chain["results"][i]} for chain in found[name]
        ]
    changes = differences(ends, CRITERIA[7]["differences"])
    figure = rows(ends)
    measured = dict(figure)
    updates = {}
    for name, results in found.items():
        shares = pd.DataFrame([chain["shares"] for chain in results])
        measured[f"positives, {name}"] = row(shares.rename(columns=lambda i: f"iteration {i + 1}"))
        updates[name] = [sum(chain["updates"]) for chain in results]
    return Found(measured, changes, tuning, figure, updates)
