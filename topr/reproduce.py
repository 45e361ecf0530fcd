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
from topr.study import METRICS, Study, best

QUICK = {"scale": {"samples": 4}, "rates": [1e-4, 1e-3], "grid_seeds": 1, "samples": 4, "points": 5, "total": 800}
QUICK |= {"shares": [0.05, 0.15, 0.5, 0.9], "gradients": 300, "prompts": 100, "pool": 16, "verifier_steps": 100}


def parse() -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m topr.reproduce", description=__doc__.splitlines()[0])
    parser.add_argument("--claims", help="numbers from 1 to 8, with commas (default: all that the regime carries)")
    parser.add_argument(
        "--seeds", type=int, help="number of seeds, each with a base policy and data of its own (default 5; --quick: 2)"
    )
    parser.add_argument(
        "--regime",
        choices=REGIMES,
        default="standard",
        help="the embedded setting: standard (default), strong (a strong base policy of high entropy, SGD), "
        "strong_adamw (the same with AdamW) or plain (a strong one of low entropy, SGD)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/claims"),
        help="folder (default runs/claims); the report is in one under it",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="some minutes: the shipped base policy for all seeds, short curves, few samples, a grid of two rates",
    )
    args = parser.parse_args()
    known = REGIMES[args.regime].claims
    try:
        args.claims = sorted({int(number) for number in args.claims.split(",")}) if args.claims is not None else known
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
        + f" --regime {args.regime}" * (args.regime != "standard")
        + " --quick" * args.quick,
        "hardware": cpu,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
    }


def markdown(found: dict[str, Any]) -> str:
    """The verdicts, and behind them a table for each claim."""
    lines = ["# The paper's claims on the embedded task", ""]
    lines += [f"`{found['command']}`, verdicts of commit {found['commit']}, measured at {found['measured_at']};"]
    lines += [f"{found['cpu_minutes']} CPU minutes on {found['hardware']}.", ""]
    lines += ["Per cent; 95% t-intervals over seeds in brackets, differences paired by seed. A part of a claim is"]
    lines += ["undecided where its interval holds the bound.", ""]
    lines += ["| claim | paper | holds here | its parts |", "|---|---|---|---|"]
    for claim in found["claims"]:
        lines.append(
            f"| {claim['claim']}. {claim['statement']} | {claim['paper']} | **{claim['holds']}** | {headline(claim)} |"
        )
    for claim in found["claims"]:
        lines += ["", f"## Claim {claim['claim']}: {claim['statement']}", "", f"![](claim_{claim['claim']}.png)", ""]
        lines += [f"Holds here: **{claim['holds']}**.", ""]
        lines += [f"- {part}: {answer}" for part, answer in claim["parts"].items()]
        shown = {"maj": f"maj@{claim['settings']['samples']}"}
        for title in ("measured", "differences"):
            names = list(dict.fromkeys(name for row in claim[title].values() for name in row))
            tables = [METRICS] if set(names) <= set(METRICS) else [METRICS, [n for n in names if n not in METRICS]]
            for columns in tables:
                rows = {label: row for label, row in claim[title].items() if set(row) & set(columns)}
                columns = [name for name in columns if any(name in row for row in rows.values())]
                if rows:
                    lines += [
                        "",
                        f"| {title} | {' | '.join(shown.get(name, name) for name in columns)} |",
                        "|---" * (len(columns) + 1) + "|",
                    ]
                    lines += [
                        f"| {label} | {' | '.join(cell(row.get(name)) for name in columns)} |"
                        for label, row in rows.items()
                    ]
        lines += [""] * ("explanation" in claim)
        lines += [f"- {name}: {number(row)}" for name, row in claim.get("explanation", {}).items()]
        lines += ["", *rates(claim["settings"]), f"Settings: `{json.dumps(claim['settings'])}`"]
    return "\n".join(lines) + "\n"


def rates(settings: dict[str, Any]) -> list[str]:
    """The learning rates that were chosen, and which of them a wider grid might have left."""
    chosen = [f"{name} {float(best(scores)):g}" for name, scores in settings["validation"].items()]
    edge = f"; at an end of the grid: {', '.join(settings['at_edge'])}" if settings["at_edge"] else ""
    return [f"Learning rates, chosen on {settings['grid_seeds']} of the seeds: {', '.join(chosen)}{edge}.", ""]


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


def write(found: dict[str, Any], folder: Path) -> None:
    """Write the report under a folder."""
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    for name, content in (("claims.json", text), ("claims.md", markdown(json.loads(text)))):
        with atomic(folder / name) as path:
            path.write_text(content)


def run(args: argparse.Namespace) -> None:
    # a quick study shares nothing with a full one
    place, regime = args.out / "quick" if args.quick else args.out, REGIMES[args.regime]
    lab, folder = Laboratory(place / "kept", args.workers), place / args.regime
    given = {"scale": regime.scale, "rates": regime.rates} | regime.study | (QUICK if args.quick else {})
    study = Study(lab, args.regime, list(range(1, args.seeds + 1)), **given)
    lab.agree(args.regime, regime.settings | {"scale": study.scale})
    found = origin(args) | {"claims": []}
    try:
        for number in args.claims:
            print(f"claim {number}: {CLAIMS[number].__doc__.splitlines()[0]}", flush=True)
            claim = CLAIMS[number](study)
            statement = CLAIMS[number].__doc__.splitlines()[0].rstrip(".")
            claim = {"claim": number, "statement": statement, "seeds": study.seeds} | claim
            found["claims"].append(claim)
            draw(number, study, claim, folder / f"claim_{number}.png")
            write(found | lab.account(), folder)
            print(f"claim {number} holds: {claim['holds']} ({headline(claim)})", flush=True)
    finally:
        lab.close()
    print(f"\n{markdown(found | lab.account()).split('## ')[0]}wrote claims.json, claims.md and figures under {folder}")


def main() -> None:
    with command():
        run(parse())


if __name__ == "__main__":
    main()
