"""Measure the paper's claims on the embedded task: `python -m topr.reproduce`.

Writes claims.json, claims.md and a figure for each claim. What was measured is kept under the folder, so a command
that was killed goes on where it stood, and more claims cost only what they add.
"""

import argparse
import json
import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from topr.claims import CLAIMS
from topr.figures import draw
from topr.io import ArgumentParser, InputError, atomic, check_counts, check_folder, command
from topr.laboratory import Laboratory
from topr.regimes import REGIMES
from topr.study import METRICS, Study

QUICK = {"scale": {"samples": 5}, "rates": [1e-4, 1e-3], "grid_seeds": 1, "samples": 4, "points": 5, "total": 1200}
QUICK |= {"prompts": 100, "pool": 16, "verifier_steps": 100}


def parse() -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m topr.reproduce", description=__doc__.splitlines()[0])
    parser.add_argument("--claims", help="of 1 to 8, with commas (default: all of the regime)")
    parser.add_argument("--seeds", type=int, help="base policies, data, orders (default 5; with --quick 2)")
    parser.add_argument("--regime", choices=REGIMES, default="quick", help="the embedded setting (default quick)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/claims"), help="folder (default runs/claims); a regime's under it"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few minutes: the shipped base policy for all seeds, short curves, few samples, a grid of two rates",
    )
    args = parser.parse_args()
    known = REGIMES[args.regime].claims
    try:
        args.claims = sorted({int(number) for number in args.claims.split(",")}) if args.claims else known
    except ValueError:
        raise InputError(f"--claims {args.claims!r} is no list of numbers; write for example 1,2,3") from None
    if unknown := set(args.claims) - set(known):
        raise InputError(
            f"--claims names {min(unknown)}; choose from {', '.join(map(str, known))}, those of the regime"
        )
    args.seeds = (2 if args.quick else 5) if args.seeds is None else args.seeds
    check_counts("--", least=2, seeds=args.seeds)  # one has no interval
    check_counts("--", workers=args.workers)
    check_folder("--out", args.out)
    return args


def origin(args: argparse.Namespace) -> dict[str, Any]:
    """Where and with what the claims were measured."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "command": f"python -m topr.reproduce --claims {','.join(map(str, args.claims))} --seeds {args.seeds}"
        + f" --regime {args.regime}" * (args.regime != "quick")
        + " --quick" * args.quick,
        "hardware": cpu,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
    }


def markdown(found: dict[str, Any]) -> str:
    """The verdicts, and behind them a table for each claim."""
    lines = ["# The paper's claims on the embedded task", ""]
    lines += [
        f"`{found['command']}`, commit {found['commit']}; {found['cpu_minutes']} CPU minutes on {found['hardware']}."
    ]
    lines += [""]
    lines += ["Per cent; 95% t-intervals over seeds in brackets, differences paired by seed.", ""]
    lines += ["| claim | paper | holds here | |", "|---|---|---|---|"]
    for claim in found["claims"]:
        lines.append(
            f"| {claim['claim']}. {claim['statement']} | {claim['paper']} | **{claim['holds']}** | {headline(claim)} |"
        )
    for claim in found["claims"]:
        lines += ["", f"## Claim {claim['claim']}: {claim['statement']}", "", f"![](claim_{claim['claim']}.png)", ""]
        lines += [f"Holds here: **{claim['holds']}**.", ""]
        lines += [f"- {part}: {answer}" for part, answer in claim["parts"].items()]
        for title in ("measured", "differences"):
            names = list(dict.fromkeys(name for row in claim[title].values() for name in row))
            tables = [METRICS] if set(names) <= set(METRICS) else [METRICS, [n for n in names if n not in METRICS]]
            for columns in tables:
                rows = {label: row for label, row in claim[title].items() if set(row) & set(columns)}
                if rows:
                    lines += ["", f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
                    lines += [
                        f"| {label} | {' | '.join(cell(row.get(name)) for name in columns)} |"
                        for label, row in rows.items()
                    ]
        lines += [""] * ("explanation" in claim)
        lines += [f"- {name}: {number(row)}" for name, row in claim.get("explanation", {}).items()]
        lines += ["", f"Settings: `{json.dumps(claim['settings'])}`"]
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """A summary in per cent, or a number as it stands."""
    if not isinstance(value, dict):
        return "" if value is None else f"{value:g}"
    ends = value["interval"] and " [{:.1f}, {:.1f}]".format(*(100 * end for end in value["interval"]))
    return f"{100 * value['mean']:.1f}{ends or ''}"


def number(row: dict[str, Any]) -> str:
    """A summary in its own units."""
    return f"{row['mean']:.2f}" + (" [{:.2f}, {:.2f}]".format(*row["interval"]) if row["interval"] else "")


def headline(claim: dict[str, Any]) -> str:
    """What holds of a claim."""
    return "; ".join(f"{part}: {answer}" for part, answer in claim["parts"].items())


def run(args: argparse.Namespace) -> None:
    # a quick study shares no result with a full one
    lab = Laboratory(args.out / "kept" / ("quick" if args.quick else "full"), args.workers)
    regime = REGIMES[args.regime]
    given = {"scale": regime.scale, "rates": regime.rates} | regime.study | (QUICK if args.quick else {})
    study = Study(lab, args.regime, list(range(1, args.seeds + 1)), **given)
    folder = args.out / args.regime if args.regime != "quick" else args.out
    found = origin(args) | {"claims": []}
    try:
        for number in args.claims:
            print(f"claim {number}: {CLAIMS[number].__doc__.splitlines()[0]}", flush=True)
            claim = CLAIMS[number](study)
            statement = CLAIMS[number].__doc__.splitlines()[0].rstrip(".")
            claim = {"claim": number, "statement": statement, "seeds": study.seeds} | claim
            found["claims"].append(claim)
            draw(number, study, claim, folder / f"claim_{number}.png")
            print(f"claim {number} holds: {claim['holds']} ({headline(claim)})", flush=True)
    finally:
        lab.close()
    commits, seconds = zip(*lab.used.values(), strict=True)
    found |= {"commit": ", ".join(sorted(set(map(str, commits)))), "cpu_minutes": round(sum(seconds) / 60)}
    for name, text in (("claims.json", json.dumps(found, indent=1) + "\n"), ("claims.md", markdown(found))):
        with atomic(folder / name) as path:
            path.write_text(text)
    print(f"\n{markdown(found).split('## ')[0]}wrote claims.json, claims.md and figures under {folder}")


def main() -> None:
    with command():
        run(parse())


if __name__ == "__main__":
    main()
