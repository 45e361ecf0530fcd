"""Intervals over seeds and problems, and whether the parts of a claim hold.

Results are one table: its index has the levels `seed`, `problem` (0 is the mean of all) and
`metric`, its columns are labelled runs, and whatever else has these metrics.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from jinja2 import StrictUndefined, Template
from scipy import stats


def load_claim(number: int, setting: dict, rates: dict) -> dict:
    """What claims.yaml says of a claim. `rates`: those that have been chosen, by run."""
    template = Template(
        Path(__file__).with_name("claims.yaml").read_text(), undefined=StrictUndefined
    )
    return yaml.safe_load(template.render(setting, chosen=rates))[number]


def over_units(values: pd.Series) -> dict:
    """Mean, 95% t-interval and the seeds' means, of values by seed and problem.

    Both are random: the variance of the mean is that of a two-way table without repetition, the
    degrees of freedom are Satterthwaite's. Of one seed the interval is over problems, and of one
    problem over seeds.
    """
    table = values.unstack("problem").to_numpy()
    seeds = table.mean(axis=1)
    problems = table.mean(axis=0)
    rest = table - seeds[:, None] - problems
    freedom = np.maximum(np.subtract(table.shape, 1), 1)  # of one alone the variance is 0
    freedom = np.append(freedom, freedom.prod())
    parts = [seeds.var(), problems.var(), rest.var()] / freedom
    # the first two each hold the rest, which counts once; none may become negative
    variance = parts[:2].sum() - parts.min()
    degrees = variance**2 / (parts**2 / freedom).sum() if variance else table.size - 1
    mean = seeds.mean()
    half = stats.t.ppf(0.975, degrees) * variance**0.5
    return {"mean": mean, "interval": [mean - half, mean + half], "values": seeds.tolist()}


def evaluated(results: pd.DataFrame, row: str) -> pd.DataFrame:
    """A column of the results, or an expression of columns: by seed, problem and metric."""
    values = results[row] if row in results else results.eval(row)
    return values.unstack("metric").round(5)


def summarise(results: pd.DataFrame, rows: Iterable[str], metrics: list[str]) -> dict:
    """The rows of a report, in the metrics that they have."""
    table = {}
    for row in rows:
        values = evaluated(results, row).reindex(columns=metrics).dropna(axis=1)
        table[row] = {name: over_units(values[name]) for name in values}
    return table


def check(parts: dict, results: pd.DataFrame) -> dict:
    """Whether each part of a claim holds; one with several conditions needs all of them."""
    found = {}
    for text, conditions in parts.items():
        # the alphabet has no, undecided and yes in this order
        found[text] = min(holds(condition, results) for condition in conditions)
    return found


def holds(condition: dict, results: pd.DataFrame) -> str:
    """Whether an interval lies above 0."""
    values = evaluated(results, condition["row"])
    metric = condition["metric"]
    values = values[metric] if metric in values else values.eval(metric)
    low, high = over_units(values)["interval"]
    if high < 0:
        return "no"
    return "yes" if low > 0 else "undecided"  # also of one unit, whose interval is NaN


def verdict(parts: dict) -> str:
    """Whether a claim holds: in part if some of its parts do and others fail."""
    answers = set(parts.values())
    if answers >= {"no", "yes"}:
        return "in part"
    return min(answers, default="not a claim")  # as in `check`
