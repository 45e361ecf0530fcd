"""What iterations of sampling and training gave: figures with intervals, a table, a plot, one TensorBoard run."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from topr.evaluation import cell, per_problem, summarise
from topr.io import InputError, atomic
from topr.trajectories import read_trajectories

TITLE = "{problems:,} problems, {samples} responses each; bars and brackets: 95% bootstrap intervals over problems"


def measure(folder: Path) -> dict[str, Any]:
    """Each metric's value for each problem, from the responses in a folder of trajectory files.

    Returns:
        `problems`, their names, `samples`, the responses of each, and `values`, a list for each metric.

    Raises:
        InputError: there is no response.
    """
    rows = [row for path in sorted(folder.glob("part-*.parquet")) for row in read_trajectories(path)]
    if not rows:
        raise InputError(f"{folder} holds no responses to measure; look at the sampler's warnings")
    problems = list(dict.fromkeys(row.prompt_id for row in rows))
    values = {name: column.tolist() for name, column in per_problem(rows).items()}
    return {"problems": problems, "samples": len(rows) // len(problems), "values": values}


def summary(tests: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The last of several measurements: each metric with its interval, and the differences to the first and previous.

    Differences are paired by problem.
    """
    last = tests[-1]
    result = {"problems": len(last["problems"]), "samples": last["samples"]}
    result |= summarise(_arrays(last), seed)
    if len(tests) > 1:
        for name, other in (("difference_to_first", tests[0]), ("difference_to_previous", tests[-2])):
            result[name] = summarise(_paired(last, other), seed)
    return result


def _arrays(test: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in test["values"].items()}


def _paired(one: dict[str, Any], other: dict[str, Any]) -> dict[str, np.ndarray]:
    """Differences of the metrics that both have, on the problems that both have: a server may leave one out."""
    _, here, there = np.intersect1d(one["problems"], other["problems"], return_indices=True)
    values, before = _arrays(one), _arrays(other)
    return {name: values[name][here] - before[name][there] for name in values if name in before}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table, one row an iteration, with what its figures mean."""
    majority = _majority(rows)
    names = ["iteration", "updates before", "pass@1", majority, "invalid", "pass@1 minus previous", "minus iteration 0"]
    lines = ["| " + " | ".join([*names, "trajectories then trained on", "positives sampled", "kept"]) + " |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for row in rows:
        cells = [str(row["iteration"]), f"{row['updates']:,}"]
        cells += [cell(row.get(name)) for name in ("pass@1", majority, "invalid")]
        cells += [cell(row.get(f"difference_to_{to}", {}).get("pass@1"), sign="+") for to in ("previous", "first")]
        if data := row["curation"]:
            cells.append(f"{data['after']['trajectories']:,}")
            cells += [f"{100 * data[when]['positive_share']:.1f}" for when in ("before", "after")]
        else:
            cells += [""] * 3
        lines.append("| " + " | ".join(cells) + " |")
    about = TITLE.format(**rows[-1]).replace("bars and brackets", "in brackets")
    return "\n".join(lines) + f"\n\nPer cent; {about}, differences paired by problem.\n"


def _majority(rows: list[dict[str, Any]]) -> str:
    """maj@k with the largest k; a server may leave responses out, so that k can differ."""
    return max((name for row in rows for name in row if name.startswith("maj@")), key=lambda name: int(name[4:]))


def figure(path: Path, rows: list[dict[str, Any]], name: str) -> None:
    """pass@1 and maj@k over the iterations, the share of invalid responses below, with intervals, as PNG."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = drawn.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    curves = [(axes[0], "pass@1", "C0", -22), (axes[0], _majority(rows), "C1", 14), (axes[1], "invalid", "C3", 14)]
    for axis, metric, colour, above in curves:
        place = [row["iteration"] for row in rows if metric in row]
        found = [row[metric] for row in rows if metric in row]
        mean = [100 * value["mean"] for value in found]
        ends = [[100 * abs(value["interval"][end] - value["mean"]) for value in found] for end in (0, 1)]
        axis.errorbar(place, mean, ends, marker="o", capsize=3, color=colour, label=metric)
        for x, y in zip(place, mean, strict=True):
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": colour}
            axis.annotate(f"{y:.1f}", (x, y), (0, above), **style)
    for axis, label in zip(axes, ("correct, per cent", "invalid, per cent"), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower right", frameon=False)
    axes[1].set_xticks([row["iteration"] for row in rows])
    axes[1].set_xlabel("iterations of sampling and training behind the policy (0: the one that it began with)")
    axes[0].set_title(f"{name}\n" + TITLE.format(**rows[-1]).replace("bars and brackets", "bars"), fontsize=9)
    with atomic(path) as temporary:
        drawn.savefig(temporary, format="png", dpi=150)


def write_results(out: Path, rows: list[dict[str, Any]]) -> None:
    """results.json, results.md and results.png."""
    for name, text in (
        ("results.json", json.dumps({"iterations": rows}, indent=2) + "\n"),
        ("results.md", table(rows)),
    ):
        with atomic(out / name) as path:
            path.write_text(text)
    figure(out / "results.png", rows, out.name)


def write_events(folder: Path, row: dict[str, Any], when: float, version: Path | None) -> None:
    """One iteration of a TensorBoard run over all of them, as a file of its own.

    It holds the test figures of the policy that the iteration began with, and what its fit logged, the steps counted on
    from the updates before.

    Args:
        folder: of the TensorBoard run.
        row: of results.json.
        when: time of the test, in seconds since 1970.
        version: folder of the fit; None for the last policy, from which none began.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    scalars = {}
    for name, value in row.items():
        if isinstance(value, dict) and "interval" in value:
            scalars[f"test/{name}"] = value["mean"]
            ends = zip(("low", "high"), value["interval"], strict=True)
            scalars |= {f"test_interval/{name}_{end}": bound for end, bound in ends}
    figures = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    events = [Event(wall_time=when, file_version="brain.Event:2")]
    events.append(Event(wall_time=when, summary=Summary(value=figures)))
    events += logged(version) if version else []
    # readers take the files of a run in the order of their names
    path = folder / f"events.out.tfevents.{row['iteration']:010d}.iteration"
    with atomic(path) as temporary, temporary.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            event.step += row["updates"]
            writer.write(event.SerializeToString())


def logged(version: Path) -> list:
    """The events that a fit logged, without those that it forgot when it was resumed, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    events = []
    for path in sorted(version.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                events = [earlier for earlier in events if earlier.step < event.step]
            elif event.HasField("summary"):
                events.append(event)
    return events
