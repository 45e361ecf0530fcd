"""Measure the paper's claims on the embedded task; write claims.json, claims.md and figures."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import yaml
from jinja2 import Template
from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt

from data.claims.commands import ROOT, Commands
from data.claims.criteria import check, load_claim, summarise, verdict
from data.claims.study import Study, add_peaks, best
from topr.evaluation.report import draw, table
from topr.io import InputError, check_folder, lock, write_text
from topr.io.commands import ArgumentParser, command

SETTINGS = yaml.safe_load((ROOT / "data/claims/settings.yaml").read_text())


def reproduce(
    claims: str = "",
    seeds: PositiveInt | None = None,
    regime: Literal["standard", "strong", "quick", "words", "words_quick"] = "standard",
    out: Path = Path("runs/claims"),
    workers: PositiveInt = os.cpu_count() or 1,
):
    """Measure claims, and write the report after each.

    Args:
        claims: numbers with commas; 1 to 8 are the paper's, 9 compares all losses, 10 some
            (default: the paper's that the regime shows)
        seeds: number of seeds, each with its own base policy and data (default: 5, or 2 if quick);
            one alone has no interval over seeds
        regime: the embedded setting; strong has a strong base policy of high entropy, and SGD;
            words is a real model; quick and words_quick are no evidence
        out: folder; the report is in a folder under it
        workers: number of processes
    """
    setting = SETTINGS[regime]
    known = dict.fromkeys([*setting["claims"].split(","), "9", "10"])
    numbers = (claims or setting["claims"]).split(",")
    for text in numbers:
        if text not in known:
            raise InputError(f"--claims has {text!r}; this regime has {','.join(known)}")
    check_folder("--out", out)
    lock(out / "cache")
    base = str(setting["base"])  # a file or a folder, perhaps: known by its content
    commands = Commands(out / "cache", base, f"{base}/*")
    study = Study(commands, workers, setting, list(range(1, 1 + (seeds or setting["seeds"]))))
    commit = subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty")
    report: dict = {
        "made": f"`python {shlex.join(sys.argv)}`, commit {commit}",
        "setting": setting,
        "claims": [],
    }
    template = Template((ROOT / "data/claims/claims.md.jinja").read_text())
    folder = out / regime
    for number in numbers:
        claim, drawn = measure(study, int(number))
        report["claims"].append(claim)
        write_text(folder / "claims.md", template.render(report, table=table))
        write_text(folder / "claims.json", json.dumps(report, indent=1) + "\n")
        draw(folder / f"claim_{number}.png", drawn)
        print(f"{number}. {claim['statement']}: {claim['holds']}")
    print(f"wrote claims.json, claims.md and figures under {folder}")


def measure(study: Study, number: int) -> tuple[dict, dict]:
    """The report of a claim, and the rows of its figure."""
    claim = load_claim(number, study.setting, {})
    tuning = study.tune(claim["runs"], claim["tuning"])
    rates = {label: best(gains) for label, gains in tuning.items()}
    claim = load_claim(number, study.setting, rates)
    runs = {label: {"rate": rates.get(label)} | run for label, run in claim["runs"].items()}
    results = study.run(claim["experiment"], runs, study.seeds, "test", claim["samples"])
    add_peaks(results, runs)
    parts = check(claim["parts"], results)
    metrics = claim["metrics"]
    report = {
        "claim": number,
        "statement": claim["statement"],
        "paper": claim["paper"],
        "seeds": study.seeds,
        "holds": verdict(parts),
        "measured": summarise(results, claim["rows"] or ["before training", *runs], metrics),
        "differences": summarise(results, claim["differences"], metrics),
        "parts": parts,
        "tuning": tuning,
        "rates": rates,
    }
    return report, summarise(results, results.filter(regex=claim["drawn"]), metrics)


if __name__ == "__main__":
    with command():
        auto_cli(reproduce, as_positional=False, parser_class=ArgumentParser)
