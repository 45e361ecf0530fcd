"""The claims on what the data are composed of and how negatives are weighted; see `topr.claims`."""

from typing import Any

import numpy as np

from topr import experiments
from topr.first_order import cosine, gain, length_ratio, quietest_share
from topr.study import Study, above, below, best, over_seeds, verdict


def claim_5(study: Study) -> dict[str, Any]:
    """Accuracy peaks at an effective share of positives of .1 to .2, whatever the data's share, and drops above .5."""
    tables, differences, parts, grids, found = {}, {}, {}, {}, {}
    for p in (0.1, 0.5):
        methods = {
            f"data {p:.0%}, effective {share:.0%}": ["TOPR", {"positive_share": share}] for share in study.shares
        }
        grid = study.tuned(methods, study.share_grid_seeds, share=[p, study.total])
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
            gaps = {
                pair: study.difference(*(rows[share] for share in pair))
                for pair in ((0.15, 0.05), (0.15, 0.5), (0.5, 0.9))
            }
            for (one, two), gap in gaps.items():
                differences[f"data {p:.0%}{when}: effective {one:.0%} minus {two:.0%}"] = gap
            beats = {pair: above(gap["pass@1"]) for pair, gap in gaps.items()}
            ends = beats[0.15, 0.05], beats[0.15, 0.5]
            name = f"data with {p:.0%} positives{when}: an effective share"
            parts[f"{name} of 15% beats 5% and 50%"] = False if False in ends else None if None in ends else True
            parts[f"{name} of 50% beats 90%"] = beats[0.5, 0.9]
    return {
        "paper": "Figure 5: the peak lies at an effective share of .1 to .2 for data with 10% and with 50% positives, "
        "and accuracy drops above .5",
        "measured": tables | {"best effective share": peaks},
        "differences": differences,
        "explanation": to_first_order(study, found),
        **verdict(parts),
        "settings": study.settings(
            grids, grid_seeds=study.share_grid_seeds, trajectories=study.total, samples=min(8, study.samples)
        )
        | {"small_rate": study.small_rate},
    }


def to_first_order(study: Study, found: dict[str, list[dict]]) -> dict[str, Any]:
    """What the gradients at the base policies explain of claim 5, and what they do not."""
    at_base = study.run(
        study.job(experiments.gradients, f"gradients, seed {seed}", seed, count=study.gradients) for seed in study.seeds
    )
    before = study.mean(study.begin(min(8, study.samples)), "pass@1")
    told: dict[str, Any] = {
        "entropy of a response, nats": over_seeds([one["entropy"] for one in at_base]),
        "share of positives of the base policy, p": over_seeds([one["positive_share"] for one in at_base]),
        "cosine of the mean gradients of positives and negatives": over_seeds([cosine(one) for one in at_base]),
        "the same without the division by length (in theory -1)": over_seeds([cosine(one, "whole") for one in at_base]),
        "length of the negatives' over the positives' (in theory p/(1 - p) without the division)": over_seeds(
            [length_ratio(one) for one in at_base]
        ),
    }
    for p in (0.1, 0.5):
        told[f"effective share of the step with the least noise, data {p:.0%}"] = over_seeds(
            [quietest_share(one, p) for one in at_base]
        )
    for when in ("", ", small rate")[: 2 if study.small_rate else 1]:
        names = {(p, share): f"data {p:.0%}, effective {share:.0%}{when}" for p in (0.1, 0.5) for share in study.shares}
        moved = [
            [result["logged"]["log_ratio/negatives_mean"][-1] for result in found[name]] for name in names.values()
        ]
        told[f"log-ratio of the negatives at the end{when}, mean"] = over_seeds(np.mean(moved, axis=0).tolist())
    if study.small_rate:
        rises = np.array([np.subtract(study.mean(found[name], "pass@1"), before) for name in names.values()])
        steps = np.array([[gain(one, *cell) for one in at_base] for cell in names])
        unit = (rises * steps).sum(0) / (steps**2).sum(0)  # points per unit of gain, fitted for each base policy
        for name, rise, predicted in zip(names.values(), rises, steps * unit, strict=True):
            told[f"{name}: points gained"] = over_seeds((100 * rise).tolist())
            told[f"{name}: points that plain gradient steps gain to first order"] = over_seeds(
                (100 * predicted).tolist()
            )
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
    found, start, differences, parts = study.train(runs), study.begin(more["samples"]), {}, {}
    for rate in study.rates:
        ends = {name: found[f"{name}, clip 100, rate {rate:g}"] for name in ("IS", "TOPR")}
        for name, end in ends.items():
            differences[f"{name}, clip 100, rate {rate:g}, minus before training"] = study.difference(end, start)
        differences[f"TOPR minus IS, both clip 100, rate {rate:g}"] = study.difference(ends["TOPR"], ends["IS"])
    for when, rate in (("at TOPR's own rate", best(grid["TOPR, clip 100"])), ("at the largest", max(study.rates))):
        against = {
            name: differences[f"{name}, clip 100, rate {rate:g}, minus before training"] for name in ("IS", "TOPR")
        }
        gap = differences[f"TOPR minus IS, both clip 100, rate {rate:g}"]
        where = f"with clip 100 {when}, {rate:g}"
        parts |= {
            f"{where}: IS ends below the start": below(against["IS"]["pass@1"]),
            f"{where}: IS ends with more invalid responses than the start": above(against["IS"]["invalid"]),
            f"{where}: TOPR ends above the start": above(against["TOPR"]["pass@1"]),
            f"{where}: TOPR ends above IS": above(gap["pass@1"]),
        }
    return {
        "paper": "Figure 7: untruncated importance sampling ends with 31% bad outputs, 12% before; TOPR improves",
        "measured": {"before training": study.summary(start)}
        | {label: study.summary(results) for label, results in found.items()},
        "differences": differences,
        **verdict(parts),
        "settings": study.settings(grid, negatives=0.6, **more),
    }
