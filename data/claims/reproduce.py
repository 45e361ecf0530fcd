"""Measure the paper's claims on the embedded task; write claims.json, claims.md and figures."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from jsonargparse.typing import PositiveInt, restricted_number_type
from matplotlib.figure import Figure

from data.claims.commands import ROOT
from data.claims.criteria import CLAIMS
from data.claims.experiments import SETTINGS
from data.claims.measures import measured
from data.claims.study import Study, best
from topr.commands import ArgumentParser, command
from topr.evaluation.report import draw, table
from topr.io import InputError, atomic, check_folder, lock, write_text

Rows = dict[str, dict[str, Any]]  # of a table
Seeds: Any = restricted_number_type("Seeds", int, (">=", 2))  # fewer have no interval


def reproduce(
    claims: str | None = None,
    seeds: Seeds | None = None,
    regime: Literal["standard", "strong"] = "standard",
    quick: bool = False,
    out: Path = Path("runs/claims"),
    workers: PositiveInt = os.cpu_count() or 1,
) -> None:
    """Measure claims, and write the report after each.

    Args:
        claims: numbers with commas; 1 to 8 are the paper's, 9 compares all losses (default: the
            paper's that the regime shows)
        seeds: number of seeds, each with its own base policy and data (default: 5, or 2 if quick)
        regime: the embedded setting; strong has a strong base policy of high entropy, and SGD
        quick: takes minutes, with the shipped base policy, two rates and few samples; no evidence
        out: folder; the report is in a folder under it
        workers: number of processes
    """
    if quick and regime != "standard":
        raise InputError(f"--quick needs --regime standard: {regime} ships no trajectories")
    setting = SETTINGS["standard"] | SETTINGS["quick" if quick else regime]
    numbers = chosen_claims(claims, setting["claims"])
    seeds = seeds or (2 if quick else 5)
    check_folder("--out", out)
    lock(out / "cache")
    study = Study(out / "cache", workers, setting, list(range(1, seeds + 1)))
    folder = (out / "quick" if quick else out) / regime
    words = f"--claims {','.join(map(str, numbers))} --seeds {seeds} --regime {regime}"
    report: dict[str, Any] = {
        "command": f"python data/claims/reproduce.py {words}" + (" --quick" if quick else ""),
        "hardware": processor(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "setting": setting,
        "claims": [],
        "commit": subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty"),
    }
    for number in numbers:
        print(f"{number}. {CLAIMS[number]['statement']}", flush=True)
        claim, figure = measured(study, number)
        draw_claim(folder / f"claim_{number}.png", figure)
        report["claims"].append(claim)
        report["cpu_minutes"] = round(sum(study.commands.cpu_s.values()) / 60)
        write_text(folder / "claims.md", markdown(report))
        write_text(folder / "claims.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
        print(f"{number}. holds: {claim['holds']}", flush=True)
    print(f"wrote claims.json, claims.md and figures under {folder}")


def chosen_claims(claims: str | None, default: list[int]) -> list[int]:
    """The numbers of the claims to measure."""
    if claims is None:
        return default
    known = [*map(str, default), "9"]
    numbers = claims.split(",")
    for text in numbers:
        if text not in known:
            raise InputError(f"--claims has {text!r}; this regime has {','.join(known)}")
    return sorted(map(int, numbers))


def draw_claim(path: Path, labelled: Rows) -> None:
    """A figure as in evaluations; but rows such as `TOPR at rate 0.1` become curves over the rate,
    one for each name, a panel for each metric."""
    curves: dict[str, Rows] = {}
    for label, row in labelled.items():
        name, _, place = label.partition(" at ")
        curves.setdefault(name.strip(","), {})[place] = row
    if all(len(points) == 1 for points in curves.values()):
        draw(path, labelled)
        return
    places = list(dict.fromkeys(place for points in curves.values() for place in points))
    metrics = list(dict.fromkeys(name for row in labelled.values() for name in row))
    figure = Figure(figsize=(4 * len(metrics), 4), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for name, points in curves.items():
            means = np.array([100 * row[metric]["mean"] for row in points.values()])
            ends = np.array([row[metric]["interval"] for row in points.values()]).T
            x = [places.index(place) for place in points]
            panel.errorbar(x, means, abs(100 * ends - means), fmt="o-", capsize=3, label=name)
        panel.set(title=metric, ylabel="per cent, 95% interval")
        panel.set_xticks(range(len(places)), places, rotation=90)
    panels[0].legend()
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def markdown(report: dict[str, Any]) -> str:
    """The report for reading: verdicts, then the tables of each claim."""
    lines = [
        "# The paper's claims on the embedded task\n",
        "`{command}`, commit {commit}; {cpu_minutes} CPU minutes on {hardware}.\n".format(**report),
        "Per cent; 95% t-intervals over seeds in brackets, differences paired by seed."
        " A part of a claim is",
        "undecided where its interval contains the bound.\n",
        "| claim | paper | holds here |\n|---|---|---|",
    ]
    for claim in report["claims"]:
        lines.append("| {claim}. {statement} | {paper} | **{holds}** |".format(**claim))
    for claim in report["claims"]:
        lines.append("\n## {claim}. {statement}\n\n![](claim_{claim}.png)\n".format(**claim))
        for part, answer in claim["parts"].items():
            lines.append(f"- {part}: {answer}")
        for title in ("measured", "differences"):
            lines.append(f"\n{title.capitalize()}:\n\n{table(claim[title])}".rstrip())
        rates = []
        for name, found in claim["tuning"].items():
            gains = {float(rate): values for rate, values in found.items()}  # strings in JSON
            rate = best(gains)
            end = " (an end of the grid)" if rate in (min(gains), max(gains)) else ""
            rates.append(f"{name} {rate:g}{end}")
        lines.append(f"\nLearning rates, chosen on other seeds: {', '.join(rates)}.")
    return "\n".join(lines) + "\n"


def processor() -> str:
    """The name of this machine's processor."""
    cpu = Path("/proc/cpuinfo")  # of Linux
    found = re.search("model name.*: (.*)", cpu.read_text()) if cpu.exists() else None
    return found[1] if found else platform.machine()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_function_arguments(reproduce, as_group=False, skip={"quick"})
    parser.add_argument("--quick", action="store_true", help="minutes, no evidence")
    with command():
        reproduce(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
