"""Tables and figures of metrics with intervals."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from topr.io import atomic, write_text

# Summaries by metric, numbers, and `difference…`: summaries of paired differences to another row.
Row = dict[str, Any]
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


def metric_names(rows: Iterable[Row], numbers: bool = False) -> list[str]:
    """Names of the summaries of some rows, and perhaps of the whole numbers, each once."""
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            if is_summary(value) or (numbers and isinstance(value, int)):
                names[name] = None
    return list(names)


def table(rows: dict[str, Row], sign: str = "") -> str:
    """Markdown table of labelled rows: their whole numbers and summaries (shares in per cent)."""
    names = metric_names(rows.values(), numbers=True)
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, row in rows.items():
        cells = [cell(row.get(name, ""), 1 if name == "length" else 100, sign) for name in names]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_report(out: Path, results: Any, rows: dict[str, Row]) -> str:
    """Write results.json, results.md and results.png; returns the text of results.md.

    Args:
        out: folder.
        results: what results.json holds.
        rows: what is tabulated and drawn, by label.
    """
    differences: dict[str, dict[str, Row]] = {}  # a table for each name
    for label, row in rows.items():
        for name in row:
            if name.startswith("difference"):
                differences.setdefault(name, {})[label] = row[name]
    text = f"{table(rows)}\n{UNITS}\n"
    for name, compared in differences.items():
        title = name.replace("_", " ").capitalize()
        text += f"\n{title}, paired by problem:\n\n{table(compared, sign='+')}"
    write_text(out / "results.json", json.dumps(results, indent=2) + "\n")
    write_text(out / "results.md", text)
    draw(out / "results.png", rows)
    return text


def draw(path: Path, rows: dict[str, Row]) -> None:
    """Draw shares with their intervals as PNG: a panel for each metric, a line for each row."""
    from matplotlib.figure import Figure  # here, because tables are made without figures, too

    shares = [name for name in metric_names(rows.values()) if name != "length"]
    size = (3 + 2.5 * len(shares), 1.5 + 0.3 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, shares, strict=True):
        found = {place: row[name] for place, row in enumerate(rows.values()) if name in row}
        mean = np.array([value["mean"] for value in found.values()])
        ends = np.array([value["interval"] for value in found.values()]).T
        panel.errorbar(100 * mean, list(found), xerr=100 * abs(ends - mean), fmt="o", capsize=3)
        panel.set(title=name, xlabel="per cent, 95% interval")
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].invert_yaxis()
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
