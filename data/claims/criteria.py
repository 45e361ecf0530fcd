"""Intervals over seeds, and whether the parts of a claim hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats

Summary = dict[str, Any]  # of values, one a seed: `mean`, `interval`, `values`
Row = dict[str, Any]  # a summary for each metric, and counts
CLAIMS: dict[Any, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("claims.yaml").read_text()
)
DEFAULT = CLAIMS.pop("default")
for number in CLAIMS:
    CLAIMS[number] = DEFAULT | CLAIMS[number]
COUNTS = ("updates", "CPU seconds")


def over_seeds(values: Sequence[float] | np.ndarray | pd.Series) -> Summary:
    """Mean, 95% t-interval and the values, one for each of at least two seeds."""
    mean = np.mean(values)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    rounded = np.round([mean, mean - half, mean + half, *values], 5).tolist()
    return {"mean": rounded[0], "interval": rounded[1:3], "values": rounded[3:]}


def summaries(frames: dict[str, pd.DataFrame]) -> dict[str, Row]:
    """Rows of a table, from frames with a row for each seed; a metric may be absent (NaN)."""
    rows = {}
    for label, frame in frames.items():
        row = {}
        for name, values in frame.dropna(axis=1).items():
            row[name] = round(values.mean()) if name in COUNTS else over_seeds(values)
        rows[label] = row
    return rows


def check(criteria: dict[str, Any], table: dict[str, Row], words: dict[str, Any]) -> dict[str, str]:
    """Whether each part of a claim holds; `words` fill the braces of texts and rows."""
    found = {}
    for text, conditions in criteria.items():
        if isinstance(conditions, dict):
            conditions = [conditions]
        answers = []
        for condition in conditions:
            answers.append(holds(condition, table[condition["row"].format(**words)]))
        found[text.format(**words)] = min(answers, key=["no", "undecided", "yes"].index)
    return found


def holds(condition: dict[str, Any], metrics: Row) -> str:
    """Whether an interval lies on the right side of a bound."""
    summary = metrics[condition["metric"]]
    if "minus" in condition:
        other = metrics[condition["minus"]]["values"]
        summary = over_seeds(np.subtract(summary["values"], other))
    low, high = summary["interval"]
    right_side = "above" in condition
    bound = condition["above" if right_side else "below"]
    if low <= bound <= high:
        return "undecided"
    return "yes" if (low > bound) == right_side else "no"


def verdict(parts: dict[str, str]) -> str:
    """Whether a claim holds: in part if some of its parts do and others fail."""
    answers = set(parts.values())
    if not answers:
        return "not a claim"
    if "no" in answers:
        return "in part" if "yes" in answers else "no"
    return "undecided" if "undecided" in answers else "yes"
