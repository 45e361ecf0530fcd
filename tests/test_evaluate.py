"""evaluate.py end to end on tiny policies, its errors, tables and figures."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, make_policy, rejected
from matplotlib.figure import Figure

import evaluate
from topr.evaluation.metrics import per_problem, summarise
from topr.evaluation.pipeline import read_parts
from topr.evaluation.report import cell, draw, table
from topr.sampling import Sampling
from topr.tasks import Grade, Task
from topr.trajectories import read_trajectories

ARITHMETIC = ROOT / "data" / "arithmetic"
HALVES = (slice(136), slice(136, None))  # 34 problems with 4 responses each
SHARE = {"mean": 0.25, "interval": [0.125, 0.5]}


class Parity(Task):
    """Right are responses of an even number of characters, leniently those of two at least. What
    stands behind a stop text is not graded."""

    sampling = Sampling(top_k=0, stop=["1", "2", "3"])

    def grade(self, response, gold):
        return Grade(1.0 if len(response) % 2 == 0 else -1.0, True, str(len(response)))

    def grade_leniently(self, response, gold):
        return Grade(1.0 if len(response) >= 2 else -1.0, True, "")


@pytest.fixture
def problems(tmp_path):
    """34 problems, which are sampled in two parts."""
    path = tmp_path / "problems.jsonl"
    lines = (ARITHMETIC / "test.jsonl").read_text().splitlines(True)
    path.write_text("".join(lines[:34]))
    return path


@pytest.fixture
def command(run, policy, problems):
    """Run evaluate.py: the row of the last policy in results.json, and what was printed."""

    def command(out, *more, policies=(policy,)):
        benchmark = f"arithmetic={problems}"
        given = ["--policy", *policies, "--benchmark", benchmark, "--out", out]
        sizes = ["--samples", 4, "--max_new_tokens", 8]
        code, output, error = run(evaluate.main, *given, *sizes, *more)
        assert code == 0, error
        results = json.loads((run.folder / out / "results.json").read_text())
        return list(results.values())[-1]["arithmetic"], output

    command.folder = run.folder
    return command


def test_results_are_those_of_the_responses(command):
    policy = ARITHMETIC / "base"
    more = ["--k", 2, 4, "--seed", 3, "--max_new_tokens", 40]
    row, output = command("out", *more, policies=[policy])
    folder = command.folder / "out"
    rows = read_trajectories(folder / "responses.parquet")
    assert (row.pop("problems"), row.pop("samples"), len(rows)) == (34, 4, 136)
    values = per_problem(rows, [2, 4])
    assert row == summarise(values, seed=3) != summarise(values)
    assert {t.group for t in rows} == {f"{policy}, arithmetic, {t.prompt_id}" for t in rows}
    markdown = (folder / "results.md").read_text()
    assert markdown.startswith("| | problems | samples | pass@1 | pass@2 | maj@2 | pass@4 |")
    assert markdown in output and cell("maj@2", row["maj@2"]) in markdown


def test_differences_to_the_first_policy_are_paired(command, policy):
    other = make_policy(command.folder / "other", seed=1, scale=0.5)
    alone, _ = command("alone", policies=[other])
    both, output = command("both", policies=[policy, other])
    assert both == alone  # the same seed, the same responses
    results = json.loads((command.folder / "both" / "results.json").read_text())
    difference = results[str(other)]["arithmetic, difference to first"]
    rows = read_trajectories(command.folder / "both" / "responses.parquet")
    assert difference == summarise(per_problem(rows[136:]) - per_problem(rows[:136]))
    assert difference["length"]["mean"] != 0
    assert cell("length", difference["length"]) in output


@pytest.mark.slow
def test_several_seeds_are_averaged_and_their_spread_is_shown(run, command, policy, problems):
    other = make_policy(command.folder / "other", seed=1, scale=0.5)
    policies = [policy, other]
    alone, _ = command("out", "--seed", 3)
    rows = {}  # of both policies with each seed
    for seed in (3, 4):
        command(f"{seed}", "--seed", seed, policies=policies)
        rows[seed] = read_trajectories(command.folder / f"{seed}" / "responses.parquet")
    given = ["--policy", policy, "--benchmark", f"arithmetic={problems}", "--out", "out"]
    given += ["--samples", 4, "--max_new_tokens", 8, "--seed", 3]
    rejected(run, "holds results of other", *given, "--seeds", 2, main=evaluate.main)
    command("out", "--seed", 3, "--seeds", 2, "--overwrite", "true", policies=policies)
    out = command.folder / "out"
    assert len(list(out.glob("responses/*"))) == 4  # one was there
    first, second = [[per_problem(rows[seed][part]) for seed in rows] for part in HALVES]
    results = json.loads((out / "results.json").read_text())
    row = results[str(other)]
    assert row["arithmetic"].items() >= summarise((second[0] + second[1]) / 2, 3).items()
    means = pd.DataFrame([values.mean() for values in second])
    assert row["arithmetic, over seeds"] == summarise(means, 3)
    low, high = sorted(means["length"])
    assert row["arithmetic, over seeds"]["length"]["interval"] == [low, high] != [low, low]
    difference = (second[0] + second[1]) / 2 - (first[0] + first[1]) / 2
    assert row["arithmetic, difference to first"] == summarise(difference, 3)
    assert alone.items() >= summarise(first[0], 3).items()
    assert len(read_trajectories(out / "responses.parquet")) == 2 * 2 * 136


def test_each_file_of_a_benchmark_has_a_row(command, problems):
    first = "".join(problems.read_text().splitlines(True)[:3])
    (command.folder / "first.jsonl").write_text(first)
    other = "arithmetic=./first.jsonl"
    command("out", "--benchmark", f"arithmetic={problems}", other)
    out = command.folder / "out"
    (rows,) = json.loads((out / "results.json").read_text()).values()
    assert {name: row["problems"] for name, row in rows.items()} == {"arithmetic": 34, other: 3}
    assert len(list(out.glob("responses/*/part-00000.parquet"))) == 2


def test_a_killed_evaluation_resumes(command):
    whole, _ = command("out")
    out = command.folder / "out"
    first, second = sorted(out.glob("responses/*/*.parquet"))
    written = first.stat().st_mtime_ns
    second.unlink()
    (out / "results.json").unlink()
    assert command("out")[0] == whole
    assert first.stat().st_mtime_ns == written and second.exists()
    command("out", "--seed", 5, "--overwrite", "true")  # other responses lie beside them
    assert len(list(out.glob("responses/*/*.parquet"))) == 4


@pytest.mark.slow
def test_a_verifier_weighs_the_votes(command):
    verifier = ARITHMETIC / "verifier" / "base"
    more = ["--verifier", verifier, "--critiques", 2, "--max_new_tokens", 30, "--seed", 4]
    row, _ = command("out", *more, policies=[ARITHMETIC / "base"])
    folders = (command.folder / "out" / "responses").iterdir()
    rows, critiques = map(read_parts, sorted(folders, key=lambda path: "verifier" in path.name))
    assert len(critiques) == 2 * len(rows)
    approvals = np.array([critique.answer == "1" for critique in critiques])
    weights = approvals.reshape(-1, 2).mean(axis=1).tolist()
    expected = summarise(per_problem(rows, weights=weights), seed=4)
    assert row["weighted@4"] == expected["weighted@4"] != row["maj@4"]


def test_the_lenient_score_is_of_the_second_grade(run, policy, problems):
    benchmark = f"test_evaluate.Parity={problems}"
    given = ["--policy", policy, "--benchmark", benchmark, "--samples", 4, "--out", "out"]
    assert run(evaluate.main, *given, "--max_new_tokens", 4)[0] == 0
    rows = read_trajectories(run.folder / "out" / "responses.parquet")
    right = [len(re.split("[123]", row.response)[0]) >= 2 for row in rows]
    expected = summarise(pd.DataFrame({"lenient": np.reshape(right, (-1, 4)).mean(axis=1)}))
    results = json.loads((run.folder / "out" / "results.json").read_text())
    row = results[str(policy)]["test_evaluate.Parity"]
    assert row["lenient"] == expected["lenient"] != row["pass@1"]


def test_greedy_takes_the_likeliest_token_once(command):
    row, _ = command("out", "--greedy", "--log_probs", "true")
    rows = read_trajectories(command.folder / "out" / "responses.parquet")
    assert len(rows) == 34 and row["samples"] == 1
    for row in rows:  # every token has at least the probability of an average one
        assert min(row.ref_logprobs) > -np.log(20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--benchmark", "algebra"], "'algebra' is unknown"),
        (["--benchmark", "test_evaluate.Parity"], "has no problems of its own"),
        (["--benchmark", "arithmetic=nowhere.jsonl"], "nowhere.jsonl"),
        (["--verifier", "nowhere"], "neither a folder nor a model"),
        (["--k", "5"], "--k 5 exceeds --samples 4"),
        (["--max_new_tokens", "90"], "exceed the policy's context"),
        (["--sample", "4"], "--sample"),
    ],
)
def test_wrong_arguments_are_found_before_sampling(run, policy, problems, arguments, words):
    given = ["--policy", policy, "--benchmark", f"arithmetic={problems}", "--samples", 4]
    rejected(run, words, *given, *arguments, main=evaluate.main)  # the last of an option counts


def test_a_metric_that_one_row_lacks_leaves_its_cell_empty():
    rows = {"one": {"n": 3, "pass@1": SHARE, "length": SHARE}, "two": {"n": 4, "ungraded": SHARE}}
    lines = table(rows).splitlines()
    assert lines[0] == "| | n | pass@1 | length | ungraded |"
    assert lines[2] == "| one | 3 | 25.0 [12.5, 50.0] | 0.2 [0.1, 0.5] |  |"
    assert lines[3] == "| two | 4 |  |  | 25.0 [12.5, 50.0] |"


def test_a_figure_shows_the_interval_of_each_share(tmp_path, monkeypatch):
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: figures.append(self))
    high = {"mean": 0.8, "interval": [0.7, 0.9]}
    rows = {"p": {"problems": 3, "pass@1": SHARE, "length": SHARE}}
    rows["q"] = {"samples": 2, "pass@1": high, "ungraded": high}
    with pytest.raises(FileNotFoundError):  # nothing was written
        draw(tmp_path / "a.png", rows)
    lines = [(*line.get_xdata(), line.get_ydata()[0]) for line in figures[0].axes[0].lines]
    expected = [(0.125, 0.25, 0.5, "pass@1 of p"), (0.7, 0.8, 0.9, "pass@1 of q")]
    assert lines == [*expected, (0.7, 0.8, 0.9, "ungraded of q")]


@pytest.mark.slow
def test_two_devices_evaluate_as_one_does(run, policy, problems):
    verifier = ROOT / "data" / "arithmetic" / "verifier" / "base"
    given = ["--policy", policy, "--benchmark", f"arithmetic={problems}", "--samples", 2]
    given += ["--verifier", verifier, "--critiques", 2]
    assert run(evaluate.main, *given, "--out", "one")[0] == 0
    command = [sys.executable, ROOT / "evaluate.py", *given, "--out", "two", "--devices", 2]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, command)), cwd=run.folder, env=environment, check=True)
    one = run.folder / "one"
    two = run.folder / "two"
    assert (one / "results.json").read_text() == (two / "results.json").read_text()
