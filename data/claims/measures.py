"""What is reported of a claim."""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from data.claims.criteria import CLAIMS, Row, check, summaries, verdict
from data.claims.study import Frames, Study, best, expanded

Words = list[dict[str, str]]  # what fills the braces of texts, one after another


def measured(study: Study, number: int) -> tuple[dict[str, Any], dict[str, Row]]:
    """The report of a claim, and the rows of its figure."""
    claim = CLAIMS[number]
    setting = study.setting
    runs = {run.pop("label"): run for run in expanded(claim["runs"], setting)}
    runs, tuning = study.tuned(runs, claim["tuning"])
    samples = min(setting["samples"], claim["samples"])
    frames = study.run(claim["experiment"], runs, study.seeds, split="test", samples=samples)
    words = list(expanded(claim["words"], setting))
    differences = compared(frames, claim, words)
    if number == 1:
        add_rise_and_fall(frames, "REINFORCE, two epochs")
    elif number == 6:
        name = "TOPR, clip 100"
        del frames[name]  # its own rate is one of the rates
        words = own_and_next_rate(setting["rates"], best(tuning[name]))
    elif number == 9:
        frames = ranked(frames, differences)
    columns = [*claim["metrics"], *claim["columns"]]
    rows = summaries({name: frames[name].filter(columns) for name in claim["rows"] or frames})
    changes = summaries(differences)
    parts: dict[str, str] = {}
    for filling in words:
        filling |= {"samples": setting["samples"]}
        parts |= check(claim["parts"], rows | changes, filling)
    report = {
        "claim": number,
        "statement": claim["statement"],
        "paper": claim["paper"],
        "seeds": study.seeds,
        "holds": verdict(parts),
        "measured": rows,
        "differences": changes,
        "parts": parts,
        "tuning": tuning,
    }
    figure = summaries(validations(frames, claim["shown"]))
    return report, figure or {name: row for name, row in rows.items() if "invalid" in row}


def compared(frames: Frames, claim: dict[str, Any], words: Words) -> Frames:
    """The differences and combinations that claims.yaml names."""
    found = {}
    metrics = claim["metrics"]
    for filling, text in product(words, claim["differences"]):
        label = text.format(**filling)
        one, other = label.split(" minus ")
        if one != other:
            found[label] = frames[one][metrics] - frames[other][metrics]
    for label, terms in claim["combinations"].items():
        total = 0
        for name, weight in terms["rows"].items():
            total += weight * frames[name][terms["metrics"]]
        found[label] = total
    return found


def validations(frames: Frames, names: list[str]) -> Frames:
    """A row for each validation of these runs."""
    found = {}
    for name in names:
        accuracy = curves(frames[name], "val/pass@1")
        invalid = curves(frames[name], "val/invalid")
        for i in accuracy:
            point = {"pass@1": accuracy[i], "invalid": invalid[i]}
            found[f"{name} at validation {i}"] = pd.DataFrame(point)
    return found


def curves(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A validation metric over training; after divergence its last value is repeated."""
    return pd.DataFrame(frame[metric].tolist()).ffill(axis=1)


def add_rise_and_fall(frames: Frames, name: str) -> None:
    """Claim 1: what a run rises on validation to its peak, and falls from there."""
    accuracy = curves(frames[name], "val/pass@1").to_numpy()
    peaks = np.array([accuracy[seed, other_peak(accuracy, seed)] for seed in range(len(accuracy))])
    changes = {
        "rise to its peak": peaks - accuracy[:, 0],
        "fall from its peak": accuracy[:, -1] - peaks,
    }
    frames[f"{name}, on validation"] = pd.DataFrame(changes)


def other_peak(columns: np.ndarray, seed: int) -> int:
    """Where the mean curve of the other seeds peaks.

    The peak of the seed's own curve would be a peak of its noise, too.
    """
    return np.delete(columns, seed, axis=0).mean(axis=0).argmax()


def own_and_next_rate(rates: list[float], own: float) -> Words:
    """Claim 6: its parts are about TOPR's own rate, and the next larger one."""
    place = rates.index(own)
    words = [{"when": "at TOPR's own rate", "rate": f"{own:g}"}]
    for rate in rates[place + 1 : place + 2]:
        words.append({"when": "at the next larger", "rate": f"{rate:g}"})
    return words


def ranked(frames: Frames, differences: Frames) -> Frames:
    """Claim 9: all losses from the best to the worst."""
    for name, frame in frames.items():
        if name != "before training":
            accuracy = curves(frame, "val/pass@1")
            frame["largest fall"] = (accuracy.cummax(axis=1) - accuracy).max(axis=1)
        if f"{name} minus TOPR" in differences:
            frame["minus TOPR"] = differences[f"{name} minus TOPR"]["pass@1"]
    order = sorted(frames, key=lambda name: -frames[name]["pass@1"].mean())
    return {name: frames[name] for name in order}
