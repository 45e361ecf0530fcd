"""Tables and figures of metrics with intervals."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from topr.io import atomic, write_text

# Summaries by metric, numbers, and `difference…`: summaries of paired differences to another row.
Row = dict[str, Any]
MARKERS = "os^DvP*X"  # of the series of a figure
UNITS = "Per cent (length: tokens) with 95% bootstrap intervals over problems."


def is_summary(value: Any) -> bool:
    """Whether this is a mean with its interval, as `summarise` returns it."""
    return isinstance(value, dict) and "interval" in value


def cell(value: Any, scale: int = 100, sign: str = "") -> str:
    """A mean with its interval, in per cent by default, or any other value as it is.

    `sign` is + for differences.
    """
    if not is_summary(value):
        return str(value)
    low, high = value["interval"]
    return f"{scale * value['mean']:{sign}.1f} [{scale * low:.1f}, {scale * high:.1f}]"


def metric_names(rows: Iterable[Row]) -> list[str]:
    """Names of the summaries of some rows, each once."""
    return list(dict.fromkeys(name for row in rows for name in row if is_summary(row[name])))


def table(rows: dict[str, Row], sign: str = "") -> str:
    """Markdown table of labelled rows: their whole numbers and summaries (shares in per cent)."""
    names: dict[str, None] = {}  # in the order of the rows
    for row in rows.values():
        for name, value in row.items():
            if is_summary(value) or isinstance(value, int):
                names[name] = None
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, row in rows.items():
        cells = [cell(row.get(name, ""), 1 if name == "length" else 100, sign) for name in names]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_report(out: Path, results: Any, rows: dict[str, dict[str, Row]]) -> str:
    """Write results.json, results.md and results.png.

    Args:
        out: folder.
        results: what results.json holds.
        rows: what is tabulated and drawn, by series and place on the horizontal axis.

    Returns:
        the text of results.md.
    """
    labelled: dict[str, Row] = {}
    differences: dict[str, dict[str, Row]] = {}  # a table for each name
    for series, group in rows.items():
        for place, row in group.items():
            label = f"{series}, {place}"
            labelled[label] = row
            for name in row:
                if name.startswith("difference"):
                    differences.setdefault(name, {})[label] = row[name]
    text = f"{table(labelled)}\n{UNITS}\n"
    for name, compared in differences.items():
        title = name.replace("_", " ").capitalize()
        if name == "difference":
            title += f" to {next(iter(rows))}"
        text += f"\n{title}, paired by problem:\n\n{table(compared, sign='+')}"
    write_text(out / "results.json", json.dumps(results, indent=2) + "\n")
    write_text(out / "results.md", text)
    draw(out / "results.png", rows)
    return text


def draw(path: Path, rows: dict[str, dict[str, Row]], axis: str = "") -> None:
    """Draw shares with their intervals as PNG, a panel for each metric.

    Args:
        path: file to write.
        rows: by series (a colour and a marker) and place on the horizontal axis.
        axis: what the places are; if it is given, they are in order and joined by lines.
    """
    from matplotlib.figure import Figure  # here, because tables are made without figures, too

    places = list(dict.fromkeys(place for group in rows.values() for place in group))
    metrics = metric_names(row for group in rows.values() for row in group.values())
    shares = [metric for metric in metrics if metric != "length"]
    figure = Figure(figsize=(1 + 3.2 * len(shares), 4), layout="constrained")
    panels = figure.subplots(1, len(shares), sharex=True, sharey=True, squeeze=False)[0]
    for panel, metric in zip(panels, shares, strict=True):
        for number, (series, group) in enumerate(rows.items()):
            found = {place: row[metric] for place, row in group.items() if metric in row}
            x = [places.index(place) + 0.1 * number for place in found]
            values = [[value["mean"], *value["interval"]] for value in found.values()]
            mean, low, high = 100 * np.reshape(values, (-1, 3)).T
            error = np.abs([low - mean, high - mean])
            marker = MARKERS[number % len(MARKERS)]
            line = "-" if axis else ""
            panel.errorbar(x, mean, error, fmt=marker + line, capsize=3, label=series)
        panel.set_xticks(range(len(places)), places)
        panel.set(title=metric, xlabel=axis)
        panel.grid(alpha=0.3)
    # after all series: a limit ends the scaling of all panels
    panels[0].set(ylabel="per cent, 95% interval", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
