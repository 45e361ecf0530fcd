"""Measure the paper's claims on the embedded task; write claims.json, claims.md and a figure for each claim."""

import json
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from topr.evaluation.report import draw, table
from topr.io import ArgumentParser, InputError, check_folder, command, write_text
from topr.reproduce.claims import CLAIMS
from topr.reproduce.study import SETTINGS, Rows, Study, best, verdict


def reproduce(
    claims: str | None = None,
    seeds: int | None = None,
    regime: Literal["standard", "strong"] = "standard",
    out: Path = Path("runs/claims"),
    workers: PositiveInt = os.cpu_count() or 1,
    quick: bool = False,
) -> None:
    """Measure claims, and write the report after each.

    Args:
        claims: numbers with commas: 1 to 8 are the paper's (default: those of the regime), 9 compares all losses
        seeds: number of seeds, each with its own base policy and data (default: 5, or 2 with --quick)
        regime: the embedded setting; strong has a strong base policy of high entropy, and SGD
        out: folder; the report is in a folder under it
        workers: number of processes
    """
    if quick and regime != "standard":
        raise InputError(
            f"--quick needs --regime standard: no trajectories of {regime} are shipped; leave one out"
        )
    setting = SimpleNamespace(**SETTINGS["standard"] | SETTINGS["quick" if quick else regime])
    default = [str(number) for number in setting.claims]
    known = [*default, "9"]
    wanted = default if claims is None else sorted(set(claims.split(",")))
    if unknown := set(wanted) - set(known):
        raise InputError(f"--claims has {min(unknown)!r}; this regime has {','.join(known)}")
    seeds = seeds if seeds is not None else 2 if quick else 5
    if seeds < 2:
        raise InputError(f"--seeds is {seeds}, which has no interval; it must be at least 2")
    check_folder("--out", out)
    folder = (out / "quick" if quick else out) / regime
    study = Study(out / "cache", workers, setting, list(range(1, seeds + 1)))
    options = f"--claims {','.join(wanted)} --seeds {seeds} --regime {regime}" + " --quick" * quick
    cpu = Path("/proc/cpuinfo")  # of Linux
    processor = re.search("model name.*: (.*)", cpu.read_text()) if cpu.exists() else None
    hardware = processor[1] if processor else platform.machine()
    report: dict[str, Any] = {
        "command": f"python -m topr.reproduce {options}",
        "hardware": hardware,
    }
    report |= {name: version(name) for name in ("torch", "transformers")} | {
        "setting": vars(setting),
        "claims": [],
    }
    for number in map(int, wanted):
        measure = CLAIMS[number - 1]
        statement, _, paper = " ".join(str(measure.__doc__).split()).strip(".)").rpartition(" (")
        print(f"{number}. {statement}", flush=True)
        claim = measure(study)
        found: dict[str, Any] = {
            "claim": number,
            "statement": statement,
            "paper": paper,
            "seeds": study.seeds,
        }
        found |= {"holds": verdict(claim.parts)} | claim._asdict()
        found["parts"] = {part: verdict({part: check}) for part, check in claim.parts.items()}
        axis, figure = (
            "",
            dict[str, Rows](),
        )  # by series (`TOPR`) and place on the horizontal axis (`0.1`)
        for label, row in (
            found.pop("figure") or claim.measured
        ).items():  # such as `TOPR at rate 0.1`
            name, _, where = label.partition(" at ")
            *words, place = where.rsplit(" ", 1)
            axis = (words or [axis])[0]
            figure.setdefault(name.strip(","), {})[place] = row
        draw(folder / f"claim_{number}.png", figure, axis)
        report["claims"].append(found)
        text = markdown(report | study.provenance())
        write_text(folder / "claims.md", text)
        write_text(
            folder / "claims.json",
            json.dumps(report | study.provenance(), indent=1, allow_nan=False) + "\n",
        )
        print(f"{number}. holds: {found['holds']}", flush=True)
    print(f"\n{text.split('## ')[0]}wrote claims.json, claims.md and figures under {folder}")


def markdown(report: dict[str, Any]) -> str:
    """The report for reading: verdicts, then the tables of each claim."""
    lines = [
        "# The paper's claims on the embedded task\n",
        "`{command}`, commit {commit}; {cpu_minutes} CPU minutes on {hardware}.\n".format_map(
            report
        ),
        "Per cent; 95% t-intervals over seeds in brackets, differences paired by seed. A part of a claim is",
        "undecided where its interval contains the bound.\n",
        "| claim | paper | holds here |\n|---|---|---|",
        *(
            f"| {c['claim']}. {c['statement']} | {c['paper']} | **{c['holds']}** |"
            for c in report["claims"]
        ),
    ]
    for claim in report["claims"]:
        lines.append(
            f"\n## {claim['claim']}. {claim['statement']}\n\n![](claim_{claim['claim']}.png)\n"
        )
        lines += [f"- {part}: {answer}" for part, answer in claim["parts"].items()]
        lines += [
            f"\n{title.capitalize()}:\n\n{table(claim[title])}".rstrip()
            for title in ("measured", "differences")
        ]
        rates = {
            name: (best(gains), (min(gains), max(gains))) for name, gains in claim["tuning"].items()
        }
        found = [
            f"{name} {rate:g}" + " (an end of the grid)" * (rate in ends)
            for name, (rate, ends) in rates.items()
        ]
        lines.append(f"\nLearning rates, chosen on other seeds: {', '.join(found)}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(prog="python -m topr.reproduce", description=__doc__)
    parser.add_function_arguments(reproduce, as_group=False, skip={"quick"})
    parser.add_argument(
        "--quick",
        action="store_true",
        help="minutes: the shipped base policy, two rates, few samples",
    )
    with command():
        reproduce(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
