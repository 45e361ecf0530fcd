"""The claims: intervals, criteria, commands and their cache, the report, what is shipped."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import ROOT, rejected
from jsonargparse import auto_cli
from scipy import stats

from data.claims import commands, reproduce
from data.claims.commands import Commands, inputs_hash
from data.claims.criteria import check, holds, load_claim, over_units, verdict
from data.claims.experiments import Experiment, without_gradient
from data.claims.reproduce import SETTINGS
from data.claims.study import Study, add_peaks, best
from topr.evaluation.report import cell as report_cell
from topr.io import InputError
from topr.io.commands import ArgumentParser, command

CLAIMS = ROOT / "data" / "claims"
REGIMES = ["standard", "strong"]
NEW_ROWS = ["rises (on validation)", "and then falls", "up to a quarter"]  # older reports lack them


def report_of(regime: str) -> dict:
    return json.loads((CLAIMS / regime / "claims.json").read_text())


def table(rows: dict[str, dict[str, list[float]]]) -> pd.DataFrame:
    """Results from the values of each row and metric."""
    columns = {}
    for label, metrics in rows.items():
        columns[label] = pd.concat({0: pd.DataFrame(metrics)}).swaplevel().stack()
    return pd.DataFrame(columns).rename_axis(["seed", "problem", "metric"])


def by_seed(values) -> pd.Series:
    """Values by seed and, of two dimensions, by problem."""
    values = np.array(values)
    rows = pd.DataFrame(values.reshape(len(values), -1))
    return rows.rename_axis("seed").rename_axis("problem", axis="columns").stack()


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.7062), (12, 2.20099)])
def test_intervals_over_one_kind_are_students_at_95_per_cent(n, quantile):
    values = np.random.default_rng(n).normal(size=n)
    half = quantile * values.std(ddof=1) / np.sqrt(n)
    expected = pytest.approx([values.mean() - half, values.mean() + half], rel=1e-4)
    assert over_units(by_seed(values))["interval"] == expected
    assert over_units(by_seed([values]))["interval"] == expected  # over problems


def test_intervals_over_seeds_and_problems_are_those_of_a_two_way_table():
    """Mean squares by loops, as textbooks on analysis of variance write them."""
    values = np.random.default_rng(0).normal(size=(3, 20))
    values += np.array([[0.0], [1.0], [3.0]]) + np.arange(20) / 10
    mean = values.sum() / 60
    rows = [sum(values[i]) / 20 for i in range(3)]
    columns = [sum(values[:, j]) / 3 for j in range(20)]
    of_seeds = 20 * sum((row - mean) ** 2 for row in rows) / 2
    of_problems = 3 * sum((column - mean) ** 2 for column in columns) / 19
    rest = 0.0
    for i in range(3):
        for j in range(20):
            rest += (values[i, j] - rows[i] - columns[j] + mean) ** 2 / 38
    total = of_seeds + of_problems - rest
    freedom = total**2 / (of_seeds**2 / 2 + of_problems**2 / 19 + rest**2 / 38)
    half = stats.t.ppf(0.975, freedom) * (total / 60) ** 0.5
    found = over_units(by_seed(values))
    assert found["interval"] == pytest.approx([mean - half, mean + half])
    assert found["values"] == pytest.approx(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "least"), [(0.0, 0.93), (0.05, 0.91)])
def test_intervals_over_seeds_and_problems_hold_the_truth(seeds, least):
    """Three seeds that differ by so much, 160 problems, noise of eight responses; the truth is 0.

    Of 95% with the seeds level, a little less with so few that differ: Satterthwaite's degrees are
    an approximation."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(2000):
        values = seeds * rng.normal(size=(3, 1)) + 0.1 * rng.normal(size=160)
        low, high = over_units(by_seed(values + 0.2 * rng.normal(size=(3, 160))))["interval"]
        inside += low < 0 < high
    assert least < inside / 2000 < 0.99


def test_equal_values_have_an_interval_of_no_width():
    for values in ([0.0, 0.0, 0.0], np.zeros((2, 4))):
        assert over_units(by_seed(values))["interval"] == [0, 0]


@pytest.mark.parametrize(
    ("bound", "above", "below"),
    [("(-0.3)", "yes", "no"), ("(-0.2)", "undecided", "undecided"), ("0", "no", "yes")],
)
def test_an_interval_that_contains_the_bound_decides_nothing(bound, above, below):
    # the difference of each seed is about -0.2, although the seeds differ more
    rows = {"one": [0.1, 0.5, 0.9], "other run": [0.3, 0.71, 1.09]}
    results = table({label: {"x": values} for label, values in rows.items()})
    assert holds({"row": f"one - `other run` - {bound}", "metric": "x"}, results) == above
    assert holds({"row": f"{bound} - (one - `other run`)", "metric": "x"}, results) == below


def test_results_can_be_by_seed_and_problem(monkeypatch):
    class Experiment:
        def __init__(self, commands, setting, seed, split, samples):
            self.values = pd.DataFrame({"x": [0.0, 1.0]}) + seed

        def train(self, label, gain):
            return {"start": self.values.stack(), label: (self.values + gain).stack()}

    monkeypatch.setattr("data.claims.study.Experiment", Experiment)
    runs = {"one": {"gain": 3}, "other": {"gain": 5}}
    results = Study(None, 1, {}, []).run("train", runs, [10, 20], "test", 4)
    expected = [(10, 0, "x"), (10, 1, "x"), (20, 0, "x"), (20, 1, "x")]
    assert results.index.tolist() == expected  # seed, problem and metric
    assert results["start"].tolist() == [10, 11, 20, 21]
    assert results["one"].tolist() == [13, 14, 23, 24]
    assert (results["other"] - results["one"]).tolist() == [2, 2, 2, 2]


def test_one_unit_has_no_interval_and_decides_nothing():
    results = table({"one": {"x": [0.3]}})
    assert np.isnan(over_units(by_seed([0.3]))["interval"]).all()
    assert holds({"row": "one", "metric": "x"}, results) == "undecided"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["yes", "yes"], "yes"), (["yes", "undecided"], "undecided"), (["yes", "no"], "in part"),
        (["no", "undecided"], "no"), ([], "not a claim"),
    ],
)  # fmt: skip
def test_a_verdict_needs_every_part_of_its_criterion(parts, expected):
    assert verdict(dict(enumerate(parts))) == expected


def test_the_chosen_rate_has_the_best_mean_of_those_at_which_no_seed_falls():
    gains = {1e-4: [0.1, 0.2], 3e-4: [0.3, 0.2], 1e-3: [0.9, -0.051]}
    assert best(gains) == 3e-4
    assert best(gains | {1e-3: [0.9, -0.05]}) == 1e-3
    assert best({1e-4: [-0.1, 0.0], 3e-4: [-0.06, 0.9]}) == 1e-4  # none is safe


def test_a_peak_of_noise_is_no_rise():
    curve = 0.3 + 0.02 * np.random.default_rng(0).normal(size=(11, 400))
    names = [f"A at validation {i}" for i in range(11)]
    results = table({name: {"x": values} for name, values in zip(names, curve, strict=True)})
    assert abs((results.max(axis=1) - results[names[0]]).mean()) > 0.02
    add_peaks(results, {"A": {}})
    assert abs((results["A at its peak"] - results[names[0]]).mean()) < 0.004


def test_the_lost_gradient_is_weighed_by_the_signs_shares():
    zeros = 8 * [0.0]
    metrics = pd.DataFrame({
        "train/loss": 10 * [1.0],
        "train/positive_share": 10 * [0.25],
        "weight/positives_truncated": [*zeros, 0.2, 0.4],
        "weight/negatives_truncated": [*zeros, 0.0, 1.0],
    })  # fmt: skip
    # the last fifth of ten updates: positives .3, negatives .5
    assert without_gradient(metrics) == pytest.approx(0.25 * 0.3 + 0.75 * 0.5)


class MadeUp(Study):
    """A study whose pass@1 is made up by `accuracy(label, run, seed)`."""

    def __init__(self, accuracy, **changes):
        super().__init__(None, 1, SETTINGS["standard"] | changes, [1, 2, 3])
        self.accuracy = accuracy
        self.asked = []

    def run(self, experiment, runs, seeds, split, samples):
        rows = {"before training": {"pass@1": [0.3 + 0.001 * seed for seed in seeds]}}
        for label, run in runs.items():
            self.asked += [(split, label, run["rate"], seed) for seed in seeds]
            ends = np.array([self.accuracy(label, run, seed) for seed in seeds])
            rows[label] = {"pass@1": ends}
            rows[f"{label} at validation 0"] = {"pass@1": 0.3 + 0.001 * np.array(seeds)}
            rows[f"{label} at validation 1"] = {"pass@1": ends / 1000 + 0.4}
            rows[f"{label} at validation, end"] = {"pass@1": ends}
        for metrics in rows.values():
            metrics["maj"] = metrics["pass@1"]
            metrics["invalid"] = 0.8 - np.array(metrics["pass@1"])
        return table(rows)


def fitted(label, run, seed):
    """TOPR gains most, at 3e-4; REINFORCE collapses in a second epoch or at a high rate."""
    distance = abs(run["rate"] - 3e-4)
    if label.startswith("TOPR"):
        return 0.7 - distance + 0.002 * seed
    if label.startswith("REINFORCE,") or label.startswith("REINFORCE") and run["rate"] > 1e-4:
        return 0.01
    return 0.35 - distance + 0.003 * seed


def test_each_method_is_measured_at_its_own_best_rate_on_other_seeds():
    study = MadeUp(fitted, rates=[1e-4, 3e-4, 1e-3])
    report, drawn = reproduce.measure(study, 1)
    assert report["rates"]["TOPR"] == 3e-4 and report["rates"]["REINFORCE"] == 1e-4
    expected = [0.7 - 0.3 - 0.0007 + 0.001 * seed for seed in (101, 102, 103)]
    assert report["tuning"]["TOPR"][1e-3] == pytest.approx(expected, abs=1e-5)
    rates = {label: rate for split, label, rate, _ in study.asked if split == "test"}
    assert rates["TOPR"] == 3e-4 and rates["REINFORCE, two epochs"] == 1e-4
    assert rates["REINFORCE, TOPR's rate"] == 3e-4
    seeds = {(split, seed) for split, _, _, seed in study.asked}
    assert seeds == {("val", n) for n in (101, 102, 103)} | {("test", n) for n in (1, 2, 3)}
    assert report["holds"] == "yes" and len(report["parts"]) == 6
    assert len(drawn) == 9  # three validations of three runs
    assert drawn["TOPR at validation, end"]["invalid"] == report["measured"]["TOPR"]["invalid"]


def test_every_shipped_loss_is_compared():
    overlays = {f"--config=configs/loss/{path.name}" for path in (ROOT / "configs/loss").glob("*")}
    losses = SETTINGS["standard"]["losses"]
    assert {arguments.split()[0] for arguments in losses.values()} == overlays


def test_a_command_runs_once_and_is_known_by_its_arguments(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(commands, "start", lambda output, words: started.append(words))
    monkeypatch.setitem(commands.TEMPLATES, "a", "A --seed {seed} --out {out}")
    cache = Commands(tmp_path)
    one = cache.run("a", seed=1)
    assert cache.run("a", seed=1, unused=2) == one and one.is_dir()
    assert len({one, cache.run("a", seed=2), cache.run("a", "--more", seed=1)}) == 3
    assert started[2] == ["A", "--seed", "1", "--out", started[2][4], "--more"]
    assert len(started) == 3


@pytest.mark.slow
def test_a_command_that_fails_says_why_and_leaves_what_it_printed_and_no_output(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(commands.TEMPLATES, "a", "topr.trajectories inspect absent.parquet")
    with pytest.raises(InputError, match=r"failed \(2\), see .*txt: error: absent") as error:
        Commands(tmp_path).run("a")
    output = Path(re.search("see (.*?): ", str(error.value))[1])
    assert "absent.parquet" in output.read_text() and not (output.parent / "output").exists()
    with output.open("a") as log:  # a start that diverged, and was killed before it was known
        log.write("error: update 1: the loss is NaN or infinite\n")
    with pytest.raises(InputError):  # as another thread, or the same study again, would start it
        Commands(tmp_path).run("a")
    assert output.read_text().count("python -m topr.trajectories inspect absent.parquet") == 2


def test_other_code_has_other_outputs(tmp_path):
    base = "data/arithmetic/base/model.safetensors"
    (tmp_path / "topr").mkdir()
    (tmp_path / base).parent.mkdir(parents=True)
    hashes = []
    for name, text in [
        ("topr/a.py", "1"),
        ("README.md", ""),
        ("topr/a.pyc", ""),
        ("topr/a.py", "2"),
        (base, "3"),
    ]:
        (tmp_path / name).write_text(text)
        hashes.append(inputs_hash(tmp_path))
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3] != hashes[4]


@pytest.mark.slow
def test_a_training_that_diverges_is_a_result(tmp_path):
    setting = SETTINGS["quick"] | {"val_check_interval": 0.5}
    one = Experiment(Commands(tmp_path), setting, 1, "test", 2)
    arguments = setting["losses"]["IS"]
    rows = one.train("IS", 1e30, arguments, curation="uniform --budget=1", validate=True)
    assert rows["IS"]["pass@1"] == 0 and rows["IS"]["invalid"] == 1
    assert rows["IS at validation 0"]["pass@1"] > 0.2
    assert rows["IS at validation, end"]["pass@1"] == 0


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_small_quick_study_survives_a_kill(tmp_path):
    sizes = {"curation": "uniform --budget=1", "rates": [1e-3], "samples": 1}
    sizes |= {"trajectories": 1, "methods": SETTINGS["strong"]["methods"]}
    sizes |= {"val_check_interval": 1.0}
    script = "from data.claims import reproduce as r\n"
    script += "if __name__ == '__main__':\n"
    script += (
        f"    r.SETTINGS['quick'] |= {sizes!r}\n    r.auto_cli(r.reproduce, as_positional=False)\n"
    )
    (tmp_path / "small.py").write_text(script)
    start = [sys.executable, str(tmp_path / "small.py"), "--claims", "4", "--regime", "quick"]
    start += ["--workers", "2", "--out", str(tmp_path)]
    given = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    killed = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **given)

    def complete() -> dict:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*/output")}

    while len(complete()) < 3 and killed.poll() is None:
        time.sleep(0.05)
    time.sleep(1)  # the next commands have begun
    children = psutil.Process(killed.pid).children(recursive=True)
    commands = [child for child in children if child.ppid() != killed.pid]
    killed.kill()
    killed.wait()
    time.sleep(2)
    assert commands and not any(map(alive, commands))  # they end with it
    before = complete()
    done = subprocess.run(start, capture_output=True, text=True, timeout=290, **given)
    assert done.returncode == 0, done.stderr[-2000:]
    assert before.items() <= complete().items()
    assert (tmp_path / "quick/claims.json").exists()


def main():
    with command():
        auto_cli(reproduce.reproduce, as_positional=False, parser_class=ArgumentParser)


@pytest.mark.slow
def test_the_command_writes_its_report_and_figures(run, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "Study", lambda *_: MadeUp(fitted))
    code, _, err = run(main, "--claims", "1,9", "--seeds", "3", "--out", tmp_path)
    assert code == 0, err
    found = json.loads((tmp_path / "standard/claims.json").read_text())
    assert [claim["claim"] for claim in found["claims"]] == [1, 9]
    text = (tmp_path / "standard/claims.md").read_text()
    assert "## 1. Naive REINFORCE improves, then collapses\n\nPaper: Figures 1 and 3" in text
    assert "| TOPR | 70.4 [69.9, 70.9] | 70.4 [69.9, 70.9] | 9.6 [9.1, 10.1] |" in text
    assert "- TOPR: 0.0003\n" in text
    assert len(list(tmp_path.glob("standard/*.png"))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--claims", "1,11"], "--claims has '11'; this regime has 1,2,3,4,5,6,7,8,9,10"),
        (["--regime", "strong", "--claims", "1,2"], "'2'; this regime has 1,4,5,6,7,9,10"),
        (["--seeds", "0"], "seeds"),
    ],
)
def test_bad_arguments_get_a_sentence(run, arguments, words):
    rejected(run, words, *arguments, main=main)


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_the_shipped_reports_agree_with_their_values_and_criteria(regime):
    """Each interval again from the values of the seeds, each verdict again from the intervals."""
    for shipped in report_of(regime)["claims"]:
        rows = {}
        for label, row in shipped["measured"].items():
            summaries = {name: value for name, value in row.items() if isinstance(value, dict)}
            rows[label] = {name: summary["values"] for name, summary in summaries.items()}
            for summary in summaries.values():
                again = over_units(by_seed(summary["values"]))
                assert again["interval"] == pytest.approx(summary["interval"], abs=1e-4)
        rates = {}
        for label, gains in shipped["tuning"].items():
            rates[label] = best({float(rate): values for rate, values in gains.items()})
        parts = load_claim(shipped["claim"], SETTINGS[regime], rates)["parts"]
        assert list(parts) == list(shipped["parts"])
        assert verdict(shipped["parts"]) == shipped["holds"]
        for text, conditions in parts.items():
            if not any(words in text for words in NEW_ROWS):
                assert check({text: conditions}, table(rows))[text] == shipped["parts"][text]


def check_tables(text: str, claims: dict[str, dict]) -> int:
    """Compare tables whose first cell names a setting, cell by cell; the number of figures."""
    checked = 0
    for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [re.split(r" *\| *", line)[1:-1] for line in found.splitlines()]
        regime, *metrics = lines[0]
        for label, *cells in lines[2:] if regime in claims else []:
            row = claims[regime]["measured"][label]
            for name, shown in zip(metrics, cells, strict=True):
                value = row.get(name, row.get(name.partition("@")[0], ""))
                assert shown == report_cell(name, value), label
                checked += 1
    return checked


def test_the_tables_on_the_pages_are_measured():
    page = (CLAIMS / "README.md").read_text()
    sections = re.split(r"^## \d", page, flags=re.MULTILINE)
    checked = 0
    for regime in REGIMES:
        for claim in report_of(regime)["claims"]:
            checked += check_tables(sections[claim["claim"]], {regime: claim})
    assert checked > 350
    results = (ROOT / "README.md").read_text().partition("## Results\n")[2]
    first, _, third, *_ = report_of("standard")["claims"]
    measured = third["measured"] | first["measured"]
    assert check_tables(results, {"standard": {"measured": measured}}) == 8
