"""Tables and figures of metrics with intervals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from topr.io import atomic, write_text

Row = dict[
    str, Any
]  # summaries by metric, and numbers; `difference…`: summaries of paired differences to another row


def is_summary(value: Any) -> bool:
    """Whether this is a mean with its interval, as `summarise` returns it."""
    return isinstance(value, dict) and "interval" in value


def cell(value: Any, scale: int = 100, sign: str = "") -> str:
    """A mean with its interval, in per cent by default, or a number; `sign` is + for differences."""
    if not is_summary(value):
        return str(value)
    low, high = value["interval"]
    return f"{scale * value['mean']:{sign}.1f} [{scale * low:.1f}, {scale * high:.1f}]"


def table(rows: dict[str, Row], sign: str = "") -> str:
    """Markdown table of labelled rows: their summaries (shares in per cent) and whole numbers."""
    found = [item for row in rows.values() for item in row.items()]
    names = list(
        dict.fromkeys(name for name, value in found if is_summary(value) or isinstance(value, int))
    )
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, row in rows.items():
        cells = [cell(row.get(name, ""), 1 if name == "length" else 100, sign) for name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_report(out: Path, results: Any, rows: dict[str, dict[str, Row]]) -> str:
    """Write results.json, results.md (whose text is returned) and results.png. `rows` are tabulated and drawn; their
    keys are a series and a place on the horizontal axis."""
    labelled = {
        f"{series}, {place}": row for series, group in rows.items() for place, row in group.items()
    }
    text = f"{table(labelled)}\nPer cent (length: tokens) with 95% bootstrap intervals over problems.\n"
    for name in dict.fromkeys(
        key for row in labelled.values() for key in row if key.startswith("difference")
    ):
        differences = {label: row[name] for label, row in labelled.items() if name in row}
        to = f" to {next(iter(rows))}" if name == "difference" else ""
        text += f"\n{name.replace('_', ' ').capitalize()}{to}, paired by problem:\n\n{table(differences, sign='+')}"
    write_text(out / "results.json", json.dumps(results, indent=2) + "\n")
    write_text(out / "results.md", text)
    draw(out / "results.png", rows)
    return text


def draw(path: Path, rows: dict[str, dict[str, Row]], axis: str = "") -> None:
    """Shares with their intervals as PNG, a panel for each metric. Places stand on the horizontal axis, in order if it
    is named; each series has a colour and a marker. Series that have one place are listed from top to bottom."""
    places = list(dict.fromkeys(place for group in rows.values() for place in group))
    found = [item for group in rows.values() for row in group.values() for item in row.items()]
    metrics = list(
        dict.fromkeys(name for name, value in found if is_summary(value) and name != "length")
    )
    listed, shown, middle = len(places) == 1, "per cent, 95% interval", 0.05 * (len(rows) - 1)
    with style.context(
        ["petroff10", {"axes.grid": True, "grid.alpha": 0.3}]
    ):  # safe for colour-blind readers
        size = (
            (2.2 + 1.7 * len(metrics), 1 + 0.25 * len(rows))
            if listed
            else (1 + 3.2 * len(metrics), 4)
        )
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for panel, metric in zip(panels, metrics, strict=True):
            for i, (series, group) in enumerate(rows.items()):
                points = {
                    places.index(place) + 0.1 * i: row[metric]
                    for place, row in group.items()
                    if metric in row
                }
                mean = 100 * np.array([point["mean"] for point in points.values()])
                ends = np.abs(
                    100 * np.array([point["interval"] for point in points.values()]).T - mean
                )
                if listed:
                    panel.errorbar(mean, [i] * len(mean), xerr=ends, fmt="oC0", capsize=3)
                else:
                    form = "os^DvP*X"[i % 8] + "-" * bool(axis)
                    panel.errorbar(
                        list(points), mean, ends, fmt=form, capsize=3, lw=1, label=series
                    )
            if listed:
                panel.set(
                    yticks=range(len(rows)), yticklabels=list(rows), ylim=(len(rows) - 0.5, -0.5)
                )
            else:
                panel.set_xticks(
                    np.arange(len(places)) + middle, places, rotation=90 * (len(places) > 6)
                )
            panel.set(title=metric, xlabel=shown if listed else axis)
        if not listed:
            panels[0].set(
                ylabel=shown, ylim=(0, None)
            )  # at last, since it ends the scaling of all panels
            handles = panels[0].get_legend_handles_labels()
            figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
