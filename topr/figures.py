"""One figure a claim, which should be understood at a glance: means over seeds, bands and bars of 95% intervals."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topr.experiments import BINS
from topr.io import atomic
from topr.study import METHODS, Study, best, over_seeds

COLOURS = dict(zip(METHODS, ["C0", "C2", "C3", "C1", "C8", "C4"], strict=True))
COLOURS |= {"REINFORCE, two epochs": "C3", "REINFORCE, TOPR's rate": "C5"}
TITLES = {
    1: "Naive REINFORCE improves, then collapses",
    2: "PPO's clip: how much of the data loses its gradient",
    3: "Against other off-policy methods: accuracy and invalid responses",
    4: "Positives only, and where negatives help",
    5: "The effective share of positives, set by the baseline",
    6: "60% negatives, clipping loosened to 100",
    7: "Several iterations, and which samples to train on",
    8: "A generative verifier",
}


def draw(number: int, study: Study, claim: dict[str, Any], path: Path) -> None:
    """Draw the figure of a claim as PNG."""
    drawn = Figure(figsize=(9, 3.6), layout="constrained")
    axes = drawn.subplots(1, 2)
    DRAW[number](study, claim, *axes)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    verdict = {"yes": "holds", "in part": "holds in part", "no": "does not hold"}.get(claim["holds"], claim["holds"])
    drawn.suptitle(f"{TITLES[number]} ({verdict} here; {len(study.seeds)} seeds, 95% intervals)", fontsize=11)
    with atomic(path) as temporary:
        drawn.savefig(temporary, format="png", dpi=120)


def _curve(axis: Axes, results: list[dict], metric: str, label: str, epochs: int = 1) -> None:
    """A validation metric against epochs: mean and interval over seeds, interpolated where seeds differ in updates."""
    at = np.linspace(0, epochs, 10 * epochs + 1)
    columns = []
    for result in results:
        steps, values = zip(*((point["step"], point[metric]) for point in result["curve"]), strict=True)
        last = max(result["steps"], steps[-1])  # a run that diverged has a longer curve than updates
        columns.append(np.interp(at, epochs * np.array(steps) / last, 100 * np.array(values)))
    _band(axis, at, np.array(columns), label)


def _band(axis: Axes, at: np.ndarray, values: np.ndarray, label: str) -> None:
    """Mean and interval over the rows of values, in per cent, cut to what is possible."""
    rows = [over_seeds(list(column)) for column in values.T]
    axis.plot(at, [row["mean"] for row in rows], label=label, color=COLOURS[label])
    low, high = zip(*(row["interval"] for row in rows), strict=True)
    axis.fill_between(at, np.maximum(low, 0), np.minimum(high, 100), alpha=0.15, color=COLOURS[label])
    axis.set_xlabel("epochs")


def _bars(axis: Axes, rows: dict[str, dict[str, Any]], ylabel: str, colours: list[str] | None = None) -> None:
    """Means in per cent with their intervals, horizontal so that the names can be read."""
    place = np.arange(len(rows))[::-1]
    mean = np.array([100 * row["mean"] for row in rows.values()])
    ends = np.array([[100 * end for end in row["interval"] or [row["mean"]] * 2] for row in rows.values()]).T
    axis.barh(place, mean, xerr=np.abs(ends - mean), capsize=2, color=colours or "C0", height=0.7)
    axis.set_yticks(place, list(rows))
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel(ylabel)


def _points(axis: Axes, place: Iterable[float], rows: list[dict[str, Any]], colour: str, label: str) -> None:
    """A line of means in per cent with their intervals, cut to what is possible."""
    mean = 100 * np.array([row["mean"] for row in rows])
    ends = np.clip(100 * np.array([row["interval"] for row in rows]).T, 0, 100)
    axis.errorbar(place, mean, np.abs(ends - mean), capsize=2, marker="o", color=colour, label=label)


def _of(claim: dict[str, Any], metric: str) -> dict[str, dict]:
    return {name: row[metric] for name, row in claim["measured"].items() if metric in row}


def _one(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    slow, fast = (best(study.grid[name]) for name in ("REINFORCE", "TOPR"))
    runs = {"TOPR": (1, fast), "REINFORCE, two epochs": (2, slow), "REINFORCE, TOPR's rate": (1, fast)}
    for label, (epochs, rate) in runs.items():
        _curve(left, study.ends[label], "pass@1", label, epochs)
        left.lines[-1].set_label(f"{label} ({rate:g})")
        _curve(right, study.ends[label], "invalid", label, epochs)
    left.set_ylabel("validation pass@1, per cent")
    right.set_ylabel("invalid validation responses, per cent")
    left.legend(fontsize=7, edgecolor="none", framealpha=0.6)


def _two(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    shares, at = [base["positive_share"] for base in study.bases], np.linspace(0.05, 0.95, 10)
    for label, what in (("PPO", "tokens"), ("PPO, sequence ratio", "responses")):
        lost = []
        for result, share in zip(study.ends[label], shares, strict=True):
            logged = (result["logged"][f"weight/{sign}_truncated"] for sign in ("positives", "negatives"))
            # a batch may lack a sign
            parts = [np.array([np.mean(part) for part in np.array_split(column, len(at))]) for column in logged]
            lost.append(100 * (share * parts[0] + (1 - share) * parts[1]))
        _band(left, at, np.array(lost), label)
        left.lines[-1].set_label(f"{label} ({what})")
    left.set_ylim(0, 100)
    left.set_ylabel("data without gradient, per cent")
    left.legend(frameon=False, fontsize=8)
    middle = (BINS[:-1] + BINS[1:]) / 2
    for label in ("TOPR", "PPO, sequence ratio", "PPO"):
        for sign, style in (("positives", "-"), ("negatives", "--")):
            counts = np.sum([result["ratios"][sign] for result in study.ends[label] if result["ratios"]], axis=0)
            name = f"{label}, {sign}"
            right.plot(middle, 100 * counts / counts.sum(), style, color=COLOURS[label], label=name, linewidth=1.2)
    right.axvspan(np.log(0.8), np.log(1.2), color="grey", alpha=0.4, linewidth=0)
    right.set_xlabel("log-ratio of a response at the end (grey: PPO's clip of it)")
    right.set_ylabel("stored responses of the sign, per cent")
    right.set_yscale("symlog", linthresh=1)
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=7)


def _three(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    names = list(claim["measured"])[1:]
    for label in names:
        _curve(left, study.ends[label], "pass@1", label)
    left.set_xlabel("epochs (colours as on the right)")
    left.set_ylabel("validation pass@1, per cent")
    colours = ["grey", *(COLOURS[name] for name in names)]
    _bars(right, _of(claim, "invalid"), "invalid test responses, per cent", colours)


def _four(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    rows = {
        f"{name}, {shown}": claim["measured"][name][metric]
        for metric, shown in (("pass@1", "pass@1"), ("maj", f"maj@{study.samples}"))
        for name in ("before training", "TOPR", "positives only")
    }
    _bars(left, rows, "test accuracy, per cent", ["grey", COLOURS["TOPR"], COLOURS["positives only"]] * 2)
    gaps = claim["differences"]["TOPR minus positives only, by how often the base policy is right"]
    _bars(right, gaps, "gain in pass@1 over positives only,\nby how often the base policy is right")


def _five(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    shown = [(left, "pass@1", "test pass@1", "")]
    if study.small_rate:
        shown.append((right, "pass@1", f"test pass@1 at rate {study.small_rate:g}", ", small rate"))
    else:
        shown.append((right, "invalid", "invalid test responses", ""))
    for axis, metric, name, when in shown:
        axis.axvspan(0.1, 0.2, color="grey", alpha=0.2, linewidth=0, label="the paper's best")
        for colour, p, aside in (("C0", 0.1, -0.005), ("C1", 0.5, 0.005)):  # lest a bar hide another
            names = [f"data {p:.0%}, effective {share:.0%}{when}" for share in study.shares]
            rows = [claim["measured"][row][metric] for row in names]
            _points(axis, np.add(study.shares, aside), rows, colour, f"data with {p:.0%} positives")
        axis.set_xlabel("effective share of positives")
        axis.set_ylabel(f"{name}, per cent")
        axis.set_ylim(bottom=None if study.small_rate else 0)
    left.legend(frameon=False, fontsize=8)


def _six(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    for axis, metric, name in ((left, "pass@1", "test pass@1"), (right, "invalid", "invalid test responses")):
        before = claim["measured"]["before training"][metric]["mean"]
        axis.axhline(100 * before, color="grey", linestyle=":", label="before training")
        for colour, method, aside in (
            ("C1", "IS, clip 1", 0.94),
            ("C3", "IS, clip 100", 1),
            ("C0", "TOPR, clip 100", 1.06),
        ):
            rows = [claim["measured"][f"{method}, rate {rate:g}"][metric] for rate in study.rates]
            _points(axis, np.multiply(study.rates, aside), rows, colour, method)
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.set_ylabel(f"{name}, per cent")
    left.legend(frameon=False, fontsize=8)


def _seven(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    most = f"majority of {claim['settings']['samples']}"
    for axis, metric, name in ((left, "pass@1", "pass@1"), (right, "maj", most)):
        drawn: list[list[dict]] = []
        for colour, way in (("C0", "uniform"), ("C9", "uniform, Anna Karenina's rate"), ("C1", "Anna Karenina")):
            rows = [claim["measured"][f"{way}, after iteration {i}"][metric] for i in range(5)]
            if rows in drawn:  # both have the same best rate
                continue
            drawn.append(rows)
            _points(axis, np.arange(5) + 0.06 * len(drawn) - 0.12, rows, colour, way)
        axis.set_xticks(range(5))
        axis.set_xlabel("iterations")
        axis.set_ylabel(f"test {name}, per cent")
    left.legend(frameon=False, fontsize=8)


def _eight(study: Study, claim: dict[str, Any], left: Axes, right: Axes) -> None:
    measured = claim["measured"]
    rows = {
        f"{name}, {when} training": measured[when][name]
        for name in ("accuracy", "invalid")
        for when in ("before", "after")
    }
    _bars(left, rows, "of the verifier's critiques, per cent", ["lightgrey", "C0"] * 2)
    _bars(right, measured["votes"], "accuracy of the vote, per cent", ["grey", "lightgrey", "C0"] * 2)


DRAW: dict[int, Callable[[Study, dict[str, Any], Axes, Axes], None]] = {
    1: _one, 2: _two, 3: _three, 4: _four, 5: _five, 6: _six, 7: _seven, 8: _eight,
}  # fmt: skip
