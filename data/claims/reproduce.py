"""Measure the paper's claims on the embedded task; write claims.json, claims.md and figures."""

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import pandas as pd
import yaml
from jsonargparse.typing import PositiveInt, restricted_number_type
from matplotlib.figure import Figure

from data.claims.commands import ROOT, Commands
from data.claims.criteria import check, half_width, load_claim, summarise, verdict
from data.claims.study import Study, add_peaks, best
from topr.commands import ArgumentParser, command
from topr.evaluation.report import table
from topr.io import InputError, atomic, check_folder, lock, write_text

SETTINGS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text())
Seeds: Any = restricted_number_type("Seeds", int, (">=", 2))  # fewer have no interval


def reproduce(
    claims: str = "",
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
    name = "quick" if quick else regime
    setting = SETTINGS["standard"] | SETTINGS[name]
    known = [*map(str, setting["claims"]), "9"]
    numbers = claims.split(",") if claims else known[:-1]
    for text in numbers:
        if text not in known:
            raise InputError(f"--claims has {text!r}; this regime has {','.join(known)}")
    check_folder("--out", out)
    lock(out / "cache")
    last_seed = seeds or (2 if quick else 5)
    study = Study(Commands(out / "cache"), workers, setting, list(range(1, last_seed + 1)))
    report: dict[str, Any] = {
        "command": f"python {shlex.join(sys.argv)}",
        "hardware": platform.processor() or platform.machine(),
        "commit": subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty"),
        "setting": setting,
        "claims": [],
    }
    for number in sorted(map(int, set(numbers))):
        claim, drawn = measure(study, number)
        report["claims"].append(claim)
        write_text(out / name / "claims.md", markdown(report))
        write_text(out / name / "claims.json", json.dumps(report, indent=1) + "\n")
        draw(out / name / f"claim_{number}.png", drawn)
        print(f"{number}. {claim['statement']}: {claim['holds']}", flush=True)
    print(f"wrote claims.json, claims.md and figures under {out / name}")


def measure(study: Study, number: int) -> tuple[dict[str, Any], pd.DataFrame]:
    """The report of a claim, and the results that its figure shows."""
    claim = load_claim(number, study.setting, {})
    tuning = study.tune(claim["runs"], claim["tuning"])
    rates = {label: best(gains) for label, gains in tuning.items()}
    claim = load_claim(number, study.setting, rates)
    runs = {label: {"rate": rates.get(label)} | run for label, run in claim["runs"].items()}
    samples = min(study.setting["samples"], claim["samples"])
    results = study.run(claim["experiment"], runs, study.seeds, "test", samples)
    add_peaks(results, runs)
    rows = claim["rows"] or ["before training", *runs]
    parts = check(claim["parts"], results)
    report = {
        "claim": number,
        "statement": claim["statement"],
        "paper": claim["paper"],
        "seeds": study.seeds,
        "holds": verdict(parts),
        "measured": summarise(results, rows, claim["metrics"]),
        "differences": summarise(results, claim["differences"], claim["metrics"]),
        "parts": parts,
        "tuning": tuning,
        "rates": rates,
    }
    drawn = results.filter(regex=claim["drawn"]) if claim["drawn"] else results[rows]
    return report, drawn.loc[pd.IndexSlice[:, claim["metrics"]], :].dropna(how="all")


def draw(path: Path, results: pd.DataFrame) -> None:
    """A panel for each metric. Rows such as `TOPR at rate 0.1` become a curve over the rate."""
    metrics = results.index.unique("metric")
    figure = Figure(figsize=(4 * len(metrics), 5), layout="constrained")
    for panel, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        values = 100 * results.xs(metric, level="metric").dropna(axis=1)
        values.columns = values.columns.str.rpartition(" at ").droplevel(1)
        means = values.mean().unstack(0, sort=False)
        errors = half_width(values).unstack(0, sort=False)
        curves = len(means.columns) > 1
        line = {"marker": "o", "linestyle": "-" if curves else "none", "capsize": 3}
        means.plot(ax=panel, yerr=errors, xticks=range(len(means)), rot=90, legend=curves, **line)
        panel.set(title=metric, ylabel="per cent, 95% interval")
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def markdown(report: dict[str, Any]) -> str:
    """The report for reading: verdicts, then the tables of each claim."""
    lines = [
        "# The paper's claims on the embedded task\n",
        "`{command}`, commit {commit}, {hardware}.\n".format(**report),
        "Per cent; 95% t-intervals over seeds in brackets, differences paired by seed.",
        "A part of a claim is undecided where its interval contains the bound.\n",
        "| claim | paper | holds here |\n|---|---|---|",
    ]
    for claim in report["claims"]:
        lines.append("| {claim}. {statement} | {paper} | **{holds}** |".format(**claim))
    for claim in report["claims"]:
        lines.append("\n## {claim}. {statement}\n\n![](claim_{claim}.png)\n".format(**claim))
        for part, answer in claim["parts"].items():
            lines.append(f"- {part}: {answer}")
        lines.append("\nMeasured:\n\n" + table(claim["measured"]))
        lines.append("Differences:\n\n" + table(claim["differences"]))
        lines.append(f"Learning rates, chosen on other seeds from {report['setting']['rates']}:\n")
        lines += [f"- {label}: {rate:g}" for label, rate in claim["rates"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_function_arguments(reproduce, as_group=False, skip={"quick"})
    parser.add_argument("--quick", action="store_true", help="minutes, no evidence")
    with command():
        reproduce(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
