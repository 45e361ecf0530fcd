"""evaluate.py end to end on tiny policies, and its errors."""

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, make_policy, rejected
from matplotlib.figure import Figure

import evaluate
from topr.evaluation import per_problem, pipeline, report, summarise
from topr.evaluation.pipeline import read_parts
from topr.evaluation.report import cell, draw, table
from topr.policy import load_policy
from topr.trajectories import read_metadata, read_trajectories

ARITHMETIC = ROOT / "data" / "arithmetic"
FAST = ["--max-new-tokens", 8, "--samples", 4]
SKILLED = ["--max-new-tokens", 40]  # tokens for the shipped policy, which solves some problems


@pytest.fixture
def problems(run, monkeypatch):
    monkeypatch.setattr(pipeline, "PART", 2)
    path = run.folder / "problems.jsonl"
    path.write_text("".join((ARITHMETIC / "test.jsonl").read_text().splitlines(True)[:5]))
    return path


@pytest.fixture
def command(run, policy, problems, monkeypatch):
    """Run evaluate.py: results.json, and what was printed. No figures are drawn, which takes long."""
    monkeypatch.setattr(report, "draw", lambda *_: None)

    def command(out, *more, policies=(policy,)):
        given = [
            "--policy",
            *policies,
            "--benchmark",
            f"arithmetic={problems}",
            *FAST,
            "--out",
            out,
            *more,
        ]
        code, output, error = run(evaluate.main, *given)
        assert code == 0, error
        return json.loads((run.folder / out / "results.json").read_text()), output

    command.folder = run.folder
    return command


@pytest.fixture
def written(monkeypatch):
    """Names of the files of responses that are written; `written.limit`: the number after which the program dies."""

    class Written(list):
        limit = None

    names, write = Written(), pipeline.write_trajectories

    def record(path, *arguments):
        if len(names) == names.limit:
            raise KeyError("killed here")
        names.append(path.name)
        write(path, *arguments)

    monkeypatch.setattr(pipeline, "write_trajectories", record)
    return names


def test_results_are_those_of_the_responses(command):
    policy = ARITHMETIC / "base"
    results, output = command("out", "--k", 4, 2, "--seed", 3, *SKILLED, policies=[policy])
    row, folder = results[str(policy)]["arithmetic"], command.folder / "out"
    rows = read_trajectories(folder / "responses.parquet")
    assert (row["problems"], row["samples"], len(rows)) == (5, 4, 20)
    values = per_problem(rows, [2, 4])
    assert {name: value for name, value in row.items() if isinstance(value, dict)} == summarise(
        values, seed=3
    )
    assert summarise(values, seed=3) != summarise(values)
    assert (
        row["pass@1"]["mean"] == pytest.approx(np.mean([t.reward > 0 for t in rows]))
        and row["pass@1"]["mean"] > 0
    )
    assert row["invalid"]["mean"] == pytest.approx(np.mean([not t.valid for t in rows]))
    assert {t.group for t in rows} == {f"{policy}/arithmetic/{t.prompt_id}" for t in rows}
    assert all(len(t.ref_logprobs) == len(t.response_ids) <= 40 for t in rows)
    markdown = (folder / "results.md").read_text()
    assert markdown.startswith("| | problems | samples | pass@1 | pass@2 | maj@2 | pass@4 |")
    assert markdown in output and cell(row["maj@2"]) in markdown
    metadata = read_metadata(folder / "responses.parquet")
    assert (
        metadata["sampling"]["seed"] == 3
        and metadata["sampling"]["max_new_tokens"] == 40
        and metadata["policy"]
    )


def test_differences_to_the_first_policy_are_paired(command, policy):
    other = make_policy(command.folder / "other", seed=1, scale=0.5)
    alone, _ = command("alone")
    both, output = command("both", policies=(policy, other))
    mine, theirs = both[str(policy)]["arithmetic"], both[str(other)]["arithmetic"]
    assert mine == alone[str(policy)]["arithmetic"]  # the same seed, the same samples
    values = [
        per_problem(read_parts(folder))
        for folder in sorted((command.folder / "both" / "responses").iterdir())
    ]
    first, second = values if values[0]["length"].mean() == mine["length"]["mean"] else values[::-1]
    paired = {name: second[name] - first[name] for name in first}
    assert theirs["difference"] == summarise(paired) and theirs["difference"]["length"]["mean"] != 0
    assert f"Difference to {policy}, paired by problem" in output
    assert cell(theirs["difference"]["length"], 1, "+") in output


def test_a_killed_evaluation_resumes_and_a_second_one_samples_nothing(command, written):
    whole, _ = command("whole")
    written.clear()
    written.limit = 2
    with pytest.raises(KeyError, match="killed here"):
        command("cut")
    assert not (command.folder / "cut" / "results.json").exists()
    written.clear()
    written.limit = None
    assert command("cut")[0] == whole and written == ["part-00002.parquet"]
    written.clear()
    assert command("cut")[0] == whole and written == []
    command("cut", "--temperature", 0.5)
    assert len(written) == 3  # other responses lie beside them


def test_a_verifier_weighs_the_votes(command):
    verifier = ARITHMETIC / "verifier" / "base"
    more = ["--verifier", verifier, "--critiques", 2, "--max_new_tokens", 30, "--seed", 4]
    results, _ = command("out", *more, policies=[ARITHMETIC / "base"])
    folders = (command.folder / "out" / "responses").iterdir()
    rows, judged = map(read_parts, sorted(folders, key=lambda path: "verifier" in path.name))
    assert (
        len(judged) == 2 * len(rows) and judged[0].prompt == f"{rows[0].prompt}{rows[0].response}>"
    )
    weights = [
        sum(t.answer == "1" for t in judged[i : i + 2]) / 2 for i in range(0, len(judged), 2)
    ]
    expected, (row,) = summarise(per_problem(rows, weights=weights), seed=4), results.values()
    assert row["arithmetic"]["weighted@4"] == expected["weighted@4"] != row["arithmetic"]["maj@4"]


def test_greedy_takes_the_likeliest_token_once(command):
    results, _ = command("out", "--greedy")
    rows = read_trajectories(command.folder / "out" / "responses.parquet")
    assert len(rows) == 5 and next(iter(results.values()))["arithmetic"]["samples"] == 1
    assert (
        read_metadata(command.folder / "out" / "responses.parquet")["sampling"]["temperature"] == 0
    )
    for row in rows:  # every token has at least the probability of an average one
        assert min(row.ref_logprobs) > -np.log(20)


def test_a_config_holds_the_same_keys(command, run, policy, problems):
    expected, _ = command("given", "--k", 2, "--stop", "5", "--top-k", 3, "--seed", 2)
    config = {
        "policy": [str(policy)],
        "benchmark": [f"arithmetic={problems}"],
        "k": [2],
        "stop": ["5"],
        "top_k": 3,
    }
    config |= {"seed": 2, "max_new_tokens": 8, "samples": 16, "out": "config"}
    (run.folder / "config.yaml").write_text(json.dumps(config))
    code, _, error = run(evaluate.main, "--config", "config.yaml", "--samples", 4)
    assert (
        code == 0 and json.loads((run.folder / "config" / "results.json").read_text()) == expected
    ), error
    stops = read_metadata(run.folder / "config" / "responses.parquet")["sampling"]
    assert (stops["stop"], stops["top_k"]) == (["5"], 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "nowhere"], "neither a folder nor a model"),
        (["--policy", "POLICY", "POLICY"], "twice"),
        (["--benchmark", "algebra"], "'algebra' is unknown"),
        (["--benchmark", "arithmetic=nowhere.jsonl"], "nowhere.jsonl"),
        (["--verifier", "nowhere"], "neither a folder nor a model"),
        (["--samples", "0"], "samples"),
        (["--k", "5"], "--k 5 is more than the --samples 4"),
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "90"], "exceed the policy's context"),
        (["--sample", "4"], "--sample"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_arguments_are_found_before_sampling(
    run, command, policy, problems, arguments, words
):
    given = {
        "--policy": ["POLICY"],
        "--benchmark": [f"arithmetic={problems}"],
        "--samples": ["4"],
        "--out": ["out"],
    }
    given[arguments[0]] = arguments[1:]  # the others are those of `command`, which pass
    flat = [
        str(policy) if part == "POLICY" else part for name in given for part in (name, *given[name])
    ]
    rejected(run, words, *flat, main=evaluate.main)


def test_out_of_memory_names_the_options_to_lower(run, command, policy, problems, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(pipeline, "sample_and_grade", fail)
    code, _, error = run(
        evaluate.main, "--policy", policy, "--benchmark", f"arithmetic={problems}", "--rows", 9
    )
    assert code == 2 and "lower --rows, now 9, or --microbatch-tokens, now 16384" in error


def test_one_policy_at_a_time_is_in_memory(command, policy, monkeypatch):
    seen = []

    def load(name):
        assert not [reference for reference in seen if reference() is not None]
        seen.append(weakref.ref(loaded := load_policy(name)))
        return loaded

    monkeypatch.setattr(evaluate, "load_policy", load)
    gc.disable()  # whether it runs by itself in time is chance
    try:
        command("out", policies=(policy, make_policy(command.folder / "other", seed=1)))
    finally:
        gc.enable()
    assert len(seen) == 2


def test_a_metric_that_one_row_lacks_leaves_its_cell_empty():
    value = {"mean": 0.25, "interval": [0.125, 0.5]}
    lines = table(
        {"one": {"n": 3, "pass@1": value, "length": value}, "two": {"n": 4, "ungraded": value}}
    ).splitlines()
    assert lines[0] == "| | n | pass@1 | length | ungraded |"
    assert lines[2] == "| one | 3 | 25.0 [12.5, 50.0] | 0.2 [0.1, 0.5] |  |"
    assert lines[3] == "| two | 4 |  |  | 25.0 [12.5, 50.0] |"
    assert cell(value, sign="+") == "+25.0 [12.5, 50.0]"


def test_the_figure_has_a_panel_for_each_share(tmp_path):
    value = {"mean": 0.25, "interval": [0.125, 0.5]}
    rows = {
        "p": {"a": {"pass@1": value, "length": value, "n": 3}, "b": {"pass@1": value}},
        "q": {"a": {"ungraded": value}},
    }
    draw(tmp_path / "one.png", rows)
    draw(tmp_path / "two.png", {"p": {"a": {"pass@1": value}}})
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    widths = [
        int.from_bytes((tmp_path / name).read_bytes()[16:20], "big")
        for name in ("one.png", "two.png")
    ]
    assert widths == [150 * 7.4, 150 * 3.9]


def test_every_panel_shows_all_of_its_intervals(tmp_path, monkeypatch):
    figures: list[Figure] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: (figures.append(figure), path.touch())
    )
    summaries = [{"mean": mean, "interval": [mean - 0.1, mean + 0.1]} for mean in (0.2, 0.8, 0.5)]
    row = dict(zip(("pass@1", "maj", "invalid"), summaries, strict=True))
    draw(tmp_path / "a.png", {"p": {"1": row, "2": row}}, "rate")
    for panel, summary in zip(figures[0].axes, summaries, strict=True):
        low, high = panel.get_ylim()
        assert low <= 100 * summary["interval"][0] and high >= 100 * summary["interval"][1]


@pytest.mark.slow
def test_two_devices_evaluate_as_one_does(run, policy, tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(50)))
    given = [
        "--policy",
        policy,
        "--benchmark",
        f"arithmetic={problems}",
        "--samples",
        "2",
        "--rows",
        "64",
    ]
    given += ["--verifier", ROOT / "data" / "arithmetic" / "verifier" / "base", "--critiques", "2"]
    assert run(evaluate.main, *given, "--out", "one")[0] == 0
    command = [sys.executable, ROOT / "evaluate.py", *given, "--out", "two", "--devices", "2"]
    options: dict = {"cwd": run.folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    done = subprocess.run(
        list(map(str, command)), **options, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    one, two = run.folder / "one", run.folder / "two"
    assert (one / "results.json").read_text() == (two / "results.json").read_text()
    assert "weighted@2" in (two / "results.json").read_text()
    folders = (sorted((path / "responses").iterdir()) for path in (one, two))
    for some, others, files in zip(
        *folders, (2, 4), strict=True
    ):  # of 50 problems, of 100 responses to judge
        assert read_parts(some) == read_parts(others) and len(list(others.iterdir())) == files
    assert done.stdout.count("wrote results.json") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_second_device_ends_with_the_first(policy, tmp_path):
    problems = tmp_path / "many.jsonl"
    problems.write_text(
        "".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(2000))
    )
    given = [
        "--policy",
        policy,
        "--benchmark",
        f"arithmetic={problems}",
        "--out",
        "out",
        "--devices",
        "2",
    ]
    first = subprocess.Popen(
        [sys.executable, ROOT / "evaluate.py", *map(str, given)],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
    while not list(tmp_path.glob("out/responses/*/*.parquet")):
        assert first.poll() is None
        time.sleep(0.1)
    (second,) = [
        int(pid) for pid in children.read_text().split() if b"evaluate.py" in command_line(pid)
    ]
    first.kill()
    first.wait()
    for _ in range(100):
        if not command_line(second):
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def command_line(pid: int | str) -> bytes:
    """The command of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
