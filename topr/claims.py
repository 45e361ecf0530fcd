"""The paper's claims (arXiv:2503.14286), each an experiment, a criterion fixed beforehand, and a verdict.

Everything is measured on several seeds; base policy, data, order and sampling vary with the seed. Differences are
paired by seed, with 95% t-intervals over seeds. Learning rates are chosen for each method by its mean validation
pass@1 at the end, on a grid fixed beforehand, of the same size for all; results are read on test.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from topr import experiments
from topr.first_order import cosine, gain, length_ratio, quietest_share
from topr.laboratory import Job
from topr.study import METHODS, Study, above, below, best, over_seeds, verdict


def claim_1(study: Study) -> dict[str, Any]:
    """Naive REINFORCE improves, then collapses."""
    start, ends = study.start, study.ends
    own, longer, fast = (ends[f"REINFORCE{how}"] for how in ("", ", two epochs", ", TOPR's rate"))
    curves = [[point["pass@1"] for point in result["curve"]] for result in own]
    peaks = [curve[other_peak(curves, i)] for i, curve in enumerate(curves)]
    rise = over_seeds([peak - curve[0] for peak, curve in zip(peaks, curves, strict=True)])
    fall = over_seeds([curve[-1] - peak for peak, curve in zip(peaks, curves, strict=True)])
    runs = {"before training": start, "TOPR": ends["TOPR"], "REINFORCE": own}
    runs |= {"REINFORCE, two epochs": longer, "REINFORCE, TOPR's rate": fast}
    invalid = over_seeds(study.mean(fast, "invalid"))
    end, late = study.difference(fast, start), study.difference(longer, start)
    return {
        "paper": "Figures 1 and 3: rises, then most outputs are degenerate by the end",
        "measured": {label: study.summary(results) for label, results in runs.items()}
        | {"REINFORCE on validation": {"rise to its peak": rise, "fall from its peak": fall}},
        "differences": {"REINFORCE, two epochs, minus before training": late}
        | {"REINFORCE, TOPR's rate, minus before training": end}
        | {"REINFORCE minus TOPR": study.difference(own, ends["TOPR"])},
        **verdict(
            {
                "at its own rate, accuracy on validation first rises": above(rise),
                "and then falls": below(fall),
                "after a second epoch it ends below where it began": below(late["pass@1"]),
                "at TOPR's rate it ends below where it began": below(end["pass@1"]),
                "with most responses invalid": above(invalid, 0.5),
            }
        ),
        "settings": study.settings(study.grid),
    }


def other_peak(curves: list[list[float]], i: int) -> int:
    """Where the other seeds' mean curve peaks: one's own peak would be a peak of its noise, too."""
    others = curves[:i] + curves[i + 1 :] or curves
    return int(np.mean(others, axis=0).argmax())


def claim_2(study: Study) -> dict[str, Any]:
    """PPO makes little progress: most data leave the clip's range and lose their gradient."""
    start, ends = study.start, study.ends
    names, measured, differences, parts = ["PPO", "PPO, sequence ratio"], {}, {}, {}
    for name in names:
        lost = over_seeds(
            [without_gradient(result, base) for result, base in zip(ends[name], study.bases, strict=True)]
        )
        columns = zip(*(study.mean(results, "pass@1") for results in (ends[name], ends["TOPR"], start)), strict=True)
        gain = over_seeds([(ppo - before) - (topr - before) / 2 for ppo, topr, before in columns])
        measured[name] = study.summary(ends[name]) | {"without gradient": lost}
        differences[f"{name} minus TOPR"] = study.difference(ends[name], ends["TOPR"])
        differences[f"{name} minus before training"] = study.difference(ends[name], start)
        differences[f"{name}: gain minus half of TOPR's"] = {"pass@1": gain}
        parts[f"{name} gains less than half of what TOPR gains"] = below(gain)
        parts[f"at the end of {name}, most of the data has no gradient"] = above(lost, 0.5)
    return {
        "paper": "Figure 3: PPO hardly improves; most data leave [1 - 0.2, 1 + 0.2]",
        "measured": {"before training": study.summary(start)} | measured | {"TOPR": study.summary(ends["TOPR"])},
        "differences": differences,
        **verdict(parts),
        "settings": study.settings(study.grid),
    }


def without_gradient(result: dict[str, Any], base: dict[str, Any]) -> float:
    """Share of tokens (of the sequence ratio: responses) beyond their side of the clip, in the last fifth of a run."""
    tail = {sign: result["logged"][f"weight/{sign}_truncated"] for sign in ("positives", "negatives")}
    mean = {sign: np.mean(column[-(len(column) // 5 or 1) :]) for sign, column in tail.items()}
    share = base["positive_share"]
    return float(share * mean["positives"] + (1 - share) * mean["negatives"])


def claim_3(study: Study) -> dict[str, Any]:
    """DPO does well off-policy; TOPR at least as well, and it alone sharply lowers the invalid rate."""
    start, ends = study.start, study.ends
    names = ["TOPR", "DPO", "PPO", "PPO, sequence ratio", "REINFORCE"]
    differences = {f"TOPR minus {name}": study.difference(ends["TOPR"], ends[name]) for name in names[1:]}
    gains = {f"{name} minus before training": study.difference(ends[name], start) for name in names}
    return {
        "paper": "Figure 3: DPO improves; TOPR is at least as good, and the one of the four that sharply lowers the "
        "share of invalid responses",
        "measured": {"before training": study.summary(start)} | {name: study.summary(ends[name]) for name in names},
        "differences": differences | gains,
        **verdict(
            {
                "DPO ends above the start": above(gains["DPO minus before training"]["pass@1"]),
                "TOPR ends above DPO": above(differences["TOPR minus DPO"]["pass@1"]),
                "TOPR lowers the share of invalid responses": below(gains["TOPR minus before training"]["invalid"]),
            }
            | {
                f"TOPR leaves fewer invalid responses than {name}": below(differences[f"TOPR minus {name}"]["invalid"])
                for name in names[1:]
            }
        ),
        "settings": study.settings(study.grid),
    }


def claim_4(study: Study) -> dict[str, Any]:
    """Positives only is stable but lower in pass@1 and maj@k; negatives rescue questions with few or no solutions."""
    start, ends = study.start, study.ends
    topr, positives = ends["TOPR"], ends["positives only"]
    difference, rescued = study.difference(positives, topr), by_difficulty(study, topr, positives)
    return {
        "paper": "Figure 4: lower in pass@1 and maj@16; negatives mostly help questions with few or no solutions",
        "measured": {"before training": study.summary(start), "TOPR": study.summary(topr)}
        | {"positives only": study.summary(positives)},
        "differences": {"positives only minus TOPR": difference}
        | {"TOPR minus positives only, by how often the base policy is right": rescued},
        **verdict(
            {
                "positives only ends below TOPR in pass@1": below(difference["pass@1"]),
                f"and in maj@{study.samples}": below(difference["maj"]),
                "it is stable: it ends above the start": above(study.difference(positives, start)["pass@1"]),
                "negatives help most where the base policy is never or seldom right": above(
                    over_seeds(
                        [
                            (hard - easy)
                            for hard, easy in zip(
                                rescued["up to a quarter"]["values"], rescued["more often"]["values"], strict=True
                            )
                        ]
                    )
                ),
            }
        ),
        "settings": study.settings(study.grid),
    }


def by_difficulty(study: Study, one: list[dict], other: list[dict]) -> dict[str, Any]:
    """Difference in pass@1 over the problems that the base policy solves this often."""
    bins = {"never": (-1, 0), "up to a quarter": (0, 0.25), "up to a half": (0.25, 0.5), "more often": (0.5, 1)}
    found: dict[str, list[float]] = {name: [] for name in bins}
    for before, a, b in zip(study.start, one, other, strict=True):
        solved = np.array(before["result"]["pass@1"])
        gap = np.array(a["result"]["pass@1"]) - np.array(b["result"]["pass@1"])
        for name, (low, high) in bins.items():
            if len(chosen := gap[(solved > low) & (solved <= high)]):
                found[name].append(float(chosen.mean()))
    return {name: over_seeds(values) for name, values in found.items() if values}


def claim_5(study: Study) -> dict[str, Any]:
    """Accuracy peaks at an effective share of positives of .1 to .2, whatever the data's share, and drops above .5."""
    tables, differences, parts, grids, found = {}, {}, {}, {}, {}
    for p in (0.1, 0.5):
        methods = {
            f"data {p:.0%}, effective {share:.0%}": ["TOPR", {"positive_share": share}] for share in study.shares
        }
        grid = study.tuned(methods, 1, share=[p, study.total])
        more = {"share": [p, study.total], "samples": min(8, study.samples)}
        runs = {name: {"loss": loss, "rate": best(grid[name])} | more for name, loss in methods.items()}
        if study.small_rate:
            small = more | {"rate": study.small_rate}
            runs |= {f"{name}, small rate": {"loss": loss} | small for name, loss in methods.items()}
        found |= study.train(runs)
        grids |= grid
    peaks = {}
    for when in ("", ", small rate")[: 2 if study.small_rate else 1]:
        for p in (0.1, 0.5):
            rows = {share: found[f"data {p:.0%}, effective {share:.0%}{when}"] for share in study.shares}
            tables |= {f"data {p:.0%}, effective {share:.0%}{when}": study.summary(row) for share, row in rows.items()}
            mean = {share: np.mean(study.mean(row, "pass@1")) for share, row in rows.items()}
            peaks[f"data {p:.0%}{when}"] = best(mean)
            for share in (0.05, 0.5, 0.9):
                gap = study.difference(rows[0.15], rows[share])
                differences[f"data {p:.0%}{when}: effective 15% minus {share:.0%}"] = gap
                parts[f"data with {p:.0%} positives{when}: an effective share of 15% beats {share:.0%}"] = above(
                    gap["pass@1"]
                )
    return {
        "paper": "Figure 5: the peak lies at an effective share of .1 to .2 for data with 10% and with 50% positives, "
        "and accuracy drops above .5",
        "measured": tables | {"best effective share": peaks},
        "differences": differences,
        "explanation": to_first_order(study, found),
        **verdict(parts),
        "settings": study.settings(grids, grid_seeds=1, trajectories=study.total, samples=min(8, study.samples))
        | {"small_rate": study.small_rate},
    }


def to_first_order(study: Study, found: dict[str, list[dict]]) -> dict[str, Any]:
    """What the gradients at the base policies explain of claim 5, and what they do not."""
    at_base = study.lab.run(
        study.job(experiments.gradients, f"gradients, seed {seed}", seed, count=1000) for seed in study.seeds
    )
    told: dict[str, Any] = {
        "entropy of a response, nats": over_seeds([one["entropy"] for one in at_base]),
        "share of positives of the base policy, p": over_seeds([one["positive_share"] for one in at_base]),
        "cosine of the mean gradients of positives and negatives (to first order -1)": over_seeds(
            [cosine(one) for one in at_base]
        ),
        "length of the negatives' over the positives' (to first order p/(1 - p))": over_seeds(
            [length_ratio(one) for one in at_base]
        ),
    }
    for p in (0.1, 0.5):
        told[f"effective share of the step with the least noise, data {p:.0%}"] = over_seeds(
            [quietest_share(one, p) for one in at_base]
        )
    if not study.small_rate:
        return told
    for p in (0.1, 0.5):
        names = {share: f"data {p:.0%}, effective {share:.0%}, small rate" for share in study.shares}
        rise = {
            share: np.subtract(study.mean(found[name], "pass@1"), study.mean(study.start, "pass@1"))
            for share, name in names.items()
        }
        for share in study.shares:
            units = [1 / gain(one, p, 0.5) for one in at_base]
            predicted = [gain(one, p, share) * unit for one, unit in zip(at_base, units, strict=True)]
            told[f"{names[share]}: gain over that of 50%, to first order"] = over_seeds(predicted)
            told[f"{names[share]}: measured"] = over_seeds([float(x) for x in rise[share] / rise[0.5]])
    return told


def claim_6(study: Study) -> dict[str, Any]:
    """With 60% negatives and clipping loosened to 100, untruncated importance sampling harms; TOPR still improves."""
    methods = {
        "IS, clip 1": ["TOPR", {"a_plus": 0, "b_plus": 1, "a_minus": 0, "b_minus": 1}],
        "IS, clip 100": ["TOPR", {"a_plus": 0, "b_plus": 100, "a_minus": 0, "b_minus": 100}],
        "TOPR, clip 100": ["TOPR", {"a_plus": 1, "b_plus": 1, "a_minus": 0, "b_minus": 100}],
    }
    given = {"share": [0.4, study.total]}
    grid, more = study.tuned(methods, **given), given | {"samples": min(8, study.samples)}
    runs = {
        f"{name}, rate {rate:g}": {"loss": loss, "rate": rate} | more
        for rate in study.rates
        for name, loss in methods.items()
    }
    found, start, differences, parts = study.train(runs), study.start, {}, {}
    for rate in study.rates:
        ends = {name: found[f"{name}, clip 100, rate {rate:g}"] for name in ("IS", "TOPR")}
        for name, end in ends.items():
            differences[f"{name}, clip 100, rate {rate:g}, minus before training"] = study.difference(end, start)
        differences[f"TOPR minus IS, both clip 100, rate {rate:g}"] = study.difference(ends["TOPR"], ends["IS"])
    for name, check, end in (("IS", below, "below"), ("TOPR", above, "above")):
        for when, rate in (("at its own rate", best(grid[f"{name}, clip 100"])), ("at the largest", max(study.rates))):
            change = differences[f"{name}, clip 100, rate {rate:g}, minus before training"]
            parts[f"{name}, clip 100, ends {end} the start {when}, {rate:g}"] = check(change["pass@1"])
    return {
        "paper": "Figure 7: untruncated importance sampling ends with 31% bad outputs, 12% before; TOPR improves",
        "measured": {"before training": study.summary(start)}
        | {label: study.summary(results) for label, results in found.items()},
        "differences": differences,
        **verdict(parts),
        "settings": study.settings(grid, negatives=0.6, **more),
    }


def claim_7(study: Study) -> dict[str, Any]:
    """Several iterations keep improving; Anna Karenina sampling beats uniform."""
    assert study.bases
    how = {"prompts": study.prompts, "budget": 8, "pool": study.pool}
    ways = {"uniform": "uniform", "Anna Karenina": "anna_karenina"}

    def job(cell: tuple[str, float], seed: int, **more: Any) -> Job:
        given = {"way": ways[cell[0]], "rate": cell[1]} | how | more
        return study.job(experiments.iterations, f"{cell[0]}, rate {cell[1]:g}, seed {seed}", seed, **given)

    def halfway(cell: tuple[str, float], seed: int) -> Job:
        return job(cell, seed, count=2, split="val", samples=4)

    grid = study.scores([(name, rate) for name in ways for rate in study.rates], halfway, 1)
    jobs = [
        job((name, best(grid[name])), seed, count=4, split="test", samples=8) for name in ways for seed in study.seeds
    ]
    found, n = study.lab.run(jobs), len(study.seeds)
    chains = {name: found[i * n : (i + 1) * n] for i, name in enumerate(ways)}

    def at(name: str, i: int) -> list[dict]:
        return [{"result": chain["results"][i]} for chain in chains[name]]

    steps = {
        f"uniform, iteration {i + 1} minus {i}": study.difference(at("uniform", i + 1), at("uniform", i))
        for i in range(4)
    }
    against = {
        f"Anna Karenina minus uniform, after iteration {i}": study.difference(at("Anna Karenina", i), at("uniform", i))
        for i in range(1, 5)
    }
    shares = {
        f"positives, {name}": {
            f"iteration {i + 1}": over_seeds([chain["shares"][i][1] for chain in chain_of]) for i in range(4)
        }
        for name, chain_of in chains.items()
    }
    return {
        "paper": "Section 4.4, Figure 10: iterations keep improving; Anna Karenina 79.6% against 75.4% on GSM8K",
        "measured": {f"{name}, after iteration {i}": study.summary(at(name, i)) for name in ways for i in range(5)}
        | shares,
        "differences": steps
        | {"uniform, four iterations minus one": (more := study.difference(at("uniform", 4), at("uniform", 1)))}
        | against,
        **verdict(
            {
                "four iterations end above one": above(more["pass@1"]),
                "Anna Karenina ends above uniform": above(
                    against["Anna Karenina minus uniform, after iteration 4"]["pass@1"]
                ),
            }
        ),
        "settings": study.settings(grid, grid_seeds=1, **how | {"samples": 8}),
    }


def claim_8(study: Study) -> dict[str, Any]:
    """A generative verifier trained with TOPR: more accurate, fewer invalid critiques, better weighted votes."""
    assert study.bases
    grid = study.tuned({"TOPR": METHODS["TOPR"]}, **study.sampled)  # of the arithmetic itself
    how = {"rate": best(grid["TOPR"]), "samples": 8, "critiques": 4, "steps": study.verifier_steps}
    found = study.lab.run(
        study.job(experiments.verifier, f"verifier, seed {seed}", seed, **how) for seed in study.seeds
    )
    measured = {
        when: {name: over_seeds([result[when][name] for result in found]) for name in ("accuracy", "invalid")}
        for when in ("before", "after")
    }
    change = {
        name: over_seeds([result["after"][name] - result["before"][name] for result in found])
        for name in ("accuracy", "invalid")
    }
    votes, gaps = {}, {}
    for k in (4, 8):
        majority, before, after = (
            [float(np.mean(values)) for values in column]
            for column in (
                [result["majority"][f"maj@{k}"] for result in found],
                [result["before"][f"weighted@{k}"] for result in found],
                [result["after"][f"weighted@{k}"] for result in found],
            )
        )
        votes |= {f"majority @{k}": over_seeds(majority), f"weighted @{k}, before": over_seeds(before)}
        votes |= {f"weighted @{k}, after": over_seeds(after)}
        gaps[f"@{k}"] = over_seeds([a - m for a, m in zip(after, majority, strict=True)])
    return {
        "paper": "Table 2: accuracy 32.6 to 70.9%, invalid 34.2 to 0.9%; weighted self-consistency 55.5 to 61.5",
        "measured": measured | {"votes": votes},
        "differences": {"after minus before": change, "weighted vote minus majority": gaps},
        **verdict(
            {
                "training raises the verifier's accuracy": above(change["accuracy"]),
                "and lowers its share of invalid critiques": below(change["invalid"]),
                "the vote of 8, weighted by it, beats the majority": above(gaps["@8"]),
            }
        ),
        "settings": study.settings(grid, **how),
    }


CLAIMS: dict[int, Callable[[Study], dict[str, Any]]] = {number: globals()[f"claim_{number}"] for number in range(1, 9)}
