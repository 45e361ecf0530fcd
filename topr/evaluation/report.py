"""Table and figure of metrics with intervals."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from topr.io import atomic, write_text

Row = dict[str, Any]  # counts and, by metric, the mean with its interval
UNITS = "Per cent (length: tokens) with 95% bootstrap intervals over problems."


def cell(name: str, value: Any) -> str:
    """A mean with its interval, or a count."""
    if not isinstance(value, dict):
        return str(value)
    scale = 1 if name == "length" else 100
    numbers = [scale * number for number in (value["mean"], *value["interval"])]
    return "{:.1f} [{:.1f}, {:.1f}]".format(*numbers)


def table(rows: dict[str, Row]) -> str:
    """Markdown table of labelled rows: counts and metrics."""
    cells = []
    for row in rows.values():
        cells.append({name: cell(name, value) for name, value in row.items()})
    frame = pd.DataFrame(cells, list(rows)).fillna("")
    text = f"| | {' | '.join(frame)} |\n" + "|---" * (1 + len(frame.columns)) + "|\n"
    for line in frame.reset_index().to_numpy():
        text += f"| {' | '.join(line)} |\n"
    return text


def write_report(out: Path, results: dict[str, dict[str, Row]]) -> str:
    """Write results.json, results.md and results.png from rows by policy and benchmark; returns
    the text of results.md."""
    rows = {}
    for policy, benchmarks in results.items():
        for benchmark, row in benchmarks.items():
            rows[f"{policy}, {benchmark}"] = row
    text = f"{table(rows)}\n{UNITS}\n"
    write_text(out / "results.json", json.dumps(results, indent=2) + "\n")
    write_text(out / "results.md", text)
    draw(out / "results.png", rows)
    return text


def draw(path: Path, rows: dict[str, Row]) -> None:
    """Draw shares with their intervals as PNG: a line for each metric of each row."""
    from matplotlib.figure import Figure  # here, because tables are made without figures, too

    shares = pd.DataFrame(list(rows.values()), list(rows))
    shares = shares.drop(columns=["problems", "samples", "length"])
    figure = Figure(figsize=(9, 1 + shares.size / 4), layout="constrained")
    panel = figure.subplots()
    for (name, label), share in shares.unstack().dropna().items():
        low, high = share["interval"]
        panel.plot([low, share["mean"], high], [f"{name} of {label}"] * 3, "|-C0")
    panel.set(xlabel="share or its difference, 95% interval")
    panel.invert_yaxis()
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png")
