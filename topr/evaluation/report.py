"""Table and figure of metrics with intervals."""

import json
from pathlib import Path

import pandas as pd

from topr.io import atomic, write_text

Row = dict  # counts and, by metric, the mean with its interval
UNITS = "Per cent (length: tokens) with 95% bootstrap intervals over problems or seeds."


def cell(name: str, value) -> str:
    """A mean with its interval, or a count."""
    if not isinstance(value, dict):
        return str(value)
    scale = 1 if name == "length" else 100
    numbers = [scale * number for number in (value["mean"], *value["interval"])]
    return "{:.1f} [{:.1f}, {:.1f}]".format(*numbers)


def table(rows: dict) -> str:
    """Markdown table of labelled rows: counts and metrics."""
    names = list(pd.DataFrame(rows).index)  # that any row has
    text = f"| | {' | '.join(names)} |\n" + "|---" * (1 + len(names)) + "|\n"
    for label, row in rows.items():
        cells = [cell(name, row.get(name, "")) for name in names]
        text += f"| {' | '.join([label, *cells])} |\n"
    return text


def write_report(out: Path, results: dict) -> str:
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


def draw(path: Path, rows: dict):
    """Draw shares with their intervals as PNG: a line for each metric of each row."""
    from matplotlib.figure import Figure  # here, because tables are made without figures, too

    figure = Figure(layout="constrained")
    panel = figure.subplots()
    for (name, label), value in pd.DataFrame(rows).stack().items():
        if isinstance(value, dict) and name != "length":
            low, high = value["interval"]
            panel.plot([low, value["mean"], high], [f"{name} of {label}"] * 3, "|-C0")
    figure.set_size_inches(9, 1 + len(panel.lines) / 4)
    panel.set(xlabel="share or its difference, 95% interval")
    panel.invert_yaxis()
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png")
