"""The claims: intervals, criteria, commands and their cache, the report, what is shipped."""

import json
import re
import shutil
import subprocess
import sys
import time
from itertools import product

import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import ROOT, rejected

from data.claims import commands, reproduce
from data.claims.commands import Commands, inputs_hash
from data.claims.criteria import CLAIMS as CRITERIA
from data.claims.criteria import check, holds, over_seeds, verdict
from data.claims.experiments import SETTINGS, Experiment, without_gradient
from data.claims.measures import curves, measured, other_peak
from data.claims.study import Study, best
from topr.evaluation.report import cell

CLAIMS = ROOT / "data" / "claims"
REGIMES = ["standard", "strong"]


def report_of(regime: str) -> dict:
    return json.loads((CLAIMS / regime / "claims.json").read_text())


# intervals, criteria, learning rates


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.7062), (3, 4.30265), (12, 2.20099)])
def test_intervals_over_seeds_are_students_at_95_per_cent(n, quantile):
    values = np.random.default_rng(n).normal(size=n)
    half = quantile * values.std(ddof=1) / np.sqrt(n)
    found = over_seeds(values)
    assert found["mean"] == pytest.approx(values.mean(), abs=1e-5)
    expected = [values.mean() - half, values.mean() + half]
    assert found["interval"] == pytest.approx(expected, abs=1e-4)
    assert found["values"] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(
    ("bound", "above", "below"),
    [(-0.3, "yes", "no"), (-0.2, "undecided", "undecided"), (0, "no", "yes")],
)
def test_an_interval_that_contains_the_bound_decides_nothing(bound, above, below):
    metrics = {"x": over_seeds([-0.2, -0.21, -0.19])}
    assert holds({"metric": "x", "above": bound}, metrics) == above
    assert holds({"metric": "x", "below": bound}, metrics) == below


def test_a_condition_can_subtract_a_metric_seed_by_seed():
    metrics = {"x": over_seeds([0.1, 0.5, 0.9]), "y": over_seeds([0.0, 0.4, 0.8])}
    assert holds({"metric": "x", "minus": "y", "above": 0}, metrics) == "yes"


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
    curves = 0.3 + 0.02 * np.random.default_rng(0).normal(size=(400, 11))
    peaks = [curves[seed, other_peak(curves, seed)] for seed in range(400)]
    assert abs(np.mean(peaks - curves[:, 0])) < 0.004
    assert np.mean(curves.max(axis=1) - curves[:, 0]) > 0.02


# the claims, on results made up


class MadeUp(Study):
    """A study whose pass@1 is made up by `accuracy(run, seed)`."""

    def __init__(self, accuracy, **changes):
        self.accuracy = accuracy
        self.setting = SETTINGS["standard"] | changes
        self.seeds = [1, 2, 3]
        self.asked = []

    def run(self, experiment, runs, seeds, **given):
        frames = {}
        for label, run in runs.items():
            self.asked += [(label, run | given, seed) for seed in seeds]
            end = pd.Series([self.accuracy(run, seed) for seed in seeds])
            frame = pd.DataFrame({"pass@1": end, "maj": end + 0.1, "invalid": 0.8 - end})
            frame[["up to a quarter", "up to a half"]] = 0.1
            if run["rate"]:
                frame[["updates", "CPU seconds"]] = 10
            frame["more than half"] = end
            if label.startswith("PPO"):
                frame["without gradient"] = end
            frame["val/pass@1"] = [[0.3, 0.4 + x / 1000, x] for x in end]
            frame["val/invalid"] = frame["val/pass@1"]
            frames[label] = frame
            if experiment == "iterate":
                shares = dict.fromkeys([f"iteration {i}" for i in range(1, 5)], end)
                frames[f"positives, {label}"] = pd.DataFrame(shares)
                for i in range(5):
                    frames[f"{label} at iteration {i}"] = frame[["pass@1", "maj", "invalid"]]
        if experiment == "verify":
            names = ["accuracy", "invalid", "maj@4", "weighted@4", "maj@8", "weighted@8"]
            before = pd.DataFrame({name: [0.5, 0.51, 0.52] for name in names})
            votes = pd.DataFrame({"@4": [0.1, 0.1, 0.1], "@8": [0.1, 0.1, 0.1]})
            return {"before": before, "after": before + 0.1, "votes": votes}
        return frames


def fitted(run, seed):
    """TOPR gains most, at 3e-4; REINFORCE collapses in a second epoch or at a high rate."""
    noise = 0.001 * seed
    loss = run.get("loss", "")
    distance = abs(run["rate"] - 3e-4)
    if run["rate"] == 0:
        return 0.3 + noise
    if loss.startswith("TOPR"):
        return 0.7 - distance + 2 * noise
    if loss == "REINFORCE" and (run.get("epochs") == "2" or run["rate"] > 1e-4):
        return 0.01
    return 0.35 - distance + 3 * noise


def test_each_method_is_measured_at_its_own_best_rate_on_other_seeds():
    study = MadeUp(fitted, rates=[1e-4, 3e-4, 1e-3])
    tuning = measured(study, 1)[0]["tuning"]
    assert best(tuning["TOPR"]) == 3e-4 and best(tuning["REINFORCE"]) == 1e-4
    expected = [0.7 - 0.3 - 0.0007 + 0.001 * seed for seed in (101, 102, 103)]
    assert tuning["TOPR"][1e-3] == pytest.approx(expected, abs=1e-5)
    rates = {label: run["rate"] for label, run, _ in study.asked if run["split"] == "test"}
    assert rates["TOPR"] == 3e-4 and rates["REINFORCE, two epochs"] == 1e-4
    assert rates["REINFORCE, TOPR's rate"] == 3e-4
    seeds = {(run["split"], seed) for _, run, seed in study.asked}
    assert seeds == {*product(["val"], [101, 102, 103]), *product(["test"], [1, 2, 3])}


def test_claim_1_is_a_rise_and_a_collapse():
    report, figure = measured(MadeUp(fitted), 1)
    assert report["holds"] == "yes" and len(report["parts"]) == 6
    row = report["measured"]["REINFORCE, two epochs, on validation"]
    assert row["rise to its peak"]["mean"] == pytest.approx(0.1, abs=1e-4)
    assert row["fall from its peak"]["mean"] == pytest.approx(0.01 - 0.4, abs=1e-4)
    assert figure["TOPR at validation 1"]["pass@1"]["mean"] == pytest.approx(0.4007)
    steady = measured(MadeUp(lambda run, seed: 0.5 + 0.001 * seed), 1)[0]
    assert steady["parts"]["with most responses invalid"] == "no"


def test_a_diverged_curve_keeps_its_last_value():
    frame = pd.DataFrame({"val/invalid": [[0.1, 0.2, 0.3], [0.1, 1.0]]})
    assert curves(frame, "val/invalid").iloc[1].tolist() == [0.1, 1.0, 1.0]


def test_the_lost_gradient_is_weighed_by_the_signs_shares():
    zeros = 8 * [0.0]
    metrics = pd.DataFrame({
        "weight/positives_truncated": [*zeros, 0.2, 0.4],
        "weight/negatives_truncated": [*zeros, 0.0, 1.0],
    })  # fmt: skip
    # the last fifth of ten updates: positives .3, negatives .5
    assert without_gradient(metrics, 0.25) == pytest.approx(0.25 * 0.3 + 0.75 * 0.5)


def test_combinations_are_weighted_sums_of_rows():
    differences = measured(MadeUp(fitted), 2)[0]["differences"]
    gain = differences["PPO: gain minus half of TOPR's"]["pass@1"]["mean"]
    assert gain == pytest.approx((0.35 - 0.3) - (0.7 - 0.3) / 2, abs=6e-3)


@pytest.mark.parametrize(
    ("values", "answers"),
    [
        ({0.05: 0.2, 0.15: 0.5, 0.5: 0.4, 0.9: 0.3}, ["yes", "yes"]),
        ({0.05: 0.2, 0.15: 0.5, 0.5: 0.6, 0.9: 0.7}, ["no", "no"]),
        ({0.05: 0.2, 0.15: 0.5, 0.5: 0.5, 0.9: 0.5}, ["undecided", "undecided"]),
    ],
)
def test_claim_5_needs_15_per_cent_to_beat_both(values, answers):
    def accuracy(run, seed):
        share = float(run.get("more", "=0.5").rpartition("=")[2])
        return values[share] + 0.01 * np.sin(7 * seed + 9 * share)

    report, _ = measured(MadeUp(accuracy, shares=list(values), small_rates=[1e-5]), 5)
    assert list(report["parts"].values()) == 4 * answers


def test_every_shipped_loss_is_ranked_beside_the_start():
    rows = measured(MadeUp(fitted, rates=[1e-4, 3e-4]), 9)[0]["measured"]
    means = [row["pass@1"]["mean"] for row in rows.values()]
    assert len(rows) == 22 and means == sorted(means, reverse=True)
    row = rows["DPO"]
    assert row["minus TOPR"]["mean"] == pytest.approx(0.35 - 0.7, abs=3e-3)
    assert row["largest fall"]["mean"] == pytest.approx(0.4 - 0.35, abs=7e-3)
    overlays = {f"--config=configs/loss/{path.name}" for path in (ROOT / "configs/loss").glob("*")}
    assert {arguments.split()[0] for arguments in SETTINGS["losses"].values()} == overlays


@pytest.mark.parametrize("regime", REGIMES)
def test_what_is_measured_has_the_labels_of_what_is_shipped(regime):
    """Rows, metrics, differences and parts of every claim, in their order."""
    for shipped in report_of(regime)["claims"]:
        number = shipped["claim"]
        report, _ = measured(MadeUp(fitted, **SETTINGS[regime]), number)
        assert report.keys() == shipped.keys() - {"updates"}
        assert set(report["tuning"]) == set(shipped["tuning"])
        for key in ("differences", "measured"):
            found = {label: list(row) for label, row in report[key].items()}
            expected = {label: list(row) for label, row in shipped[key].items()}
            assert found == expected, number
            if number != 9:  # it is ranked
                assert list(found) == list(expected)
        if number != 6:  # it names the rate that was best
            assert list(report["parts"]) == list(shipped["parts"])


# commands and their cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache whose commands note that they ran, and fail unless `fixed` exists."""
    notes = tmp_path / "notes"

    def start(folder, words):
        with notes.open("a") as file:
            file.write(words[0])
        if "fail" in words and not (tmp_path / "fixed").exists():
            raise commands.InputError("too bad")
        folder.mkdir(parents=True)
        (folder / "command.json").write_text(json.dumps({"cpu_s": 80.0}))

    monkeypatch.setattr(commands, "start", start)
    monkeypatch.setattr(commands, "TEMPLATES", {"a": "A --seed {seed} --out OUT", "b": "B {file}"})
    return Commands(tmp_path / "cache"), notes


def test_a_command_runs_once_and_is_known_by_its_arguments(cache, tmp_path):
    made, notes = cache
    one = made.run("a", seed=1)
    assert made.run("a", seed=1) == one != made.run("a", seed=2)
    assert made.run("b", file=one) != made.run("b", "--more", file=one)
    assert notes.read_text() == "AABB" and sum(made.cpu_s.values()) == 4 * 80
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    moved = Commands(tmp_path / "moved")
    assert moved.run("b", file=moved.run("a", seed=1)).name == made.run("b", file=one).name
    assert notes.read_text() == "AABB" + "B"  # the last one, in the old place


def test_other_code_or_data_has_other_outputs(tmp_path):
    (tmp_path / "topr").mkdir()
    source = tmp_path / "topr" / "loss.py"
    source.write_text("x = 1")
    before = inputs_hash(tmp_path)
    (tmp_path / "README.md").write_text("")
    (tmp_path / "topr" / "loss.pyc").write_text("")
    assert inputs_hash(tmp_path) == before
    source.write_text("x = 2")
    assert inputs_hash(tmp_path) != before


@pytest.mark.slow
def test_a_training_that_diverges_is_a_result(tmp_path):
    one = Experiment(Commands(tmp_path), SETTINGS["standard"] | SETTINGS["quick"], 1)
    few = {"curation": "uniform --budget=1", "points": "2", "loss": "IS"}
    found = one.train("test", 2, rate=1e30, **few)["{}"]
    accuracy = found["val/pass@1"]
    assert accuracy[0] > 0.2 and accuracy[-1] == 0
    assert found["updates"] < 8 and found["invalid"] == 1


@pytest.mark.slow
def test_a_small_quick_study_survives_a_kill(tmp_path):
    sizes = {"budget": 1, "rates": [1e-3], "samples": 1, "points": 1}
    sizes |= {"methods": SETTINGS["strong"]["methods"]}
    script = "from data.claims import reproduce as r\n"
    script += f"if __name__ == '__main__': r.SETTINGS['quick'] |= {sizes!r}; r.main()"
    (tmp_path / "small.py").write_text(script)
    start = [sys.executable, str(tmp_path / "small.py"), "--claims", "4", "--quick"]
    start += ["--workers", "2", "--out", str(tmp_path)]
    given = {"cwd": ROOT, "env": {**commands.os.environ, "PYTHONPATH": str(ROOT)}}
    killed = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **given)

    def complete():
        found = tmp_path.glob("cache/*/command.json")
        return {path for path in found if path.parent.suffix != ".partial"}

    while len(complete()) < 3 and killed.poll() is None:
        time.sleep(0.05)
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.wait()
    assert children and not psutil.wait_procs(children, timeout=20)[1]  # they end with it
    before = {path: path.stat().st_mtime_ns for path in complete()}
    done = subprocess.run(start, capture_output=True, text=True, timeout=290, **given)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    found = json.loads((tmp_path / "quick/standard/claims.json").read_text())
    assert "4. holds:" in done.stdout and found["claims"][0]["seeds"] == [1, 2]


# the command


def test_the_command_writes_its_report_and_figures(run, tmp_path, monkeypatch):
    def study(cache, workers, setting, seeds):
        made = MadeUp(fitted)
        made.seeds, made.commands = seeds, Commands(cache)
        return made

    monkeypatch.setattr(reproduce, "Study", study)
    given = ["--claims", "4,1", "--seeds", "3", "--out", tmp_path]
    code, _, err = run(reproduce.main, *given)
    assert code == 0, err
    found = json.loads((tmp_path / "standard/claims.json").read_text())
    text = (tmp_path / "standard/claims.md").read_text()
    words = "--claims 1,4 --seeds 3 --regime standard"
    assert found["command"] == f"python data/claims/reproduce.py {words}"
    assert {"hardware", "torch", "setting", "commit", "cpu_minutes"} <= set(found)
    assert [claim["claim"] for claim in found["claims"]] == [1, 4]
    assert "| 1. Naive REINFORCE improves, then collapses | Figures 1 and 3" in text
    assert "| TOPR | 70.4 [69.9, 70.9] | 80.4 [79.9, 80.9] | 9.6 [9.1, 10.1] |" in text
    assert "TOPR 0.0003, positives only" in text
    for number in (1, 4):
        assert (tmp_path / f"standard/claim_{number}.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--claims", "1,10"], "--claims has '10'; this regime has 1,2,3,4,5,6,7,8,9"),
        (["--claims", ""], "--claims has ''"),
        (
            ["--regime", "strong", "--claims", "1,2"],
            "--claims has '2'; this regime has 1,4,5,6,7,9",
        ),
        (["--regime", "strong", "--quick"], "--quick needs --regime standard"),
        (["--seeds", "1"], "seeds"),
        (["--workers", "0"], "workers"),
    ],
)
def test_bad_arguments_get_a_sentence(run, arguments, words):
    rejected(run, words, *arguments, main=reproduce.main)


# what is shipped


@pytest.mark.parametrize("regime", REGIMES)
def test_the_shipped_reports_agree_with_their_values_and_criteria(regime):
    """Each interval again from the values of the seeds, each verdict again from the intervals."""
    report = report_of(regime)
    text = (CLAIMS / regime / "claims.md").read_text()
    assert reproduce.markdown(report) == text
    setting = SETTINGS["standard"] | SETTINGS[regime]
    assert [claim["claim"] for claim in report["claims"]] == [*setting["claims"], 9]
    for key in setting.keys() - {"config", "base", "small_rates"}:
        assert report["setting"][key] == setting[key]
    for claim in report["claims"]:
        number = claim["claim"]
        criteria = CRITERIA[number]
        assert (claim["statement"], claim["paper"]) == (criteria["statement"], criteria["paper"])
        table = claim["measured"] | claim["differences"]
        for summary in (value for row in table.values() for value in row.values()):
            if isinstance(summary, dict) and "interval" in summary:
                again = over_seeds(summary["values"])
                assert again["interval"] == pytest.approx(summary["interval"], abs=1.01e-4)
                assert again["mean"] == pytest.approx(summary["mean"], abs=1.1e-5)
        parts = {}
        for words in variants(number, claim):
            parts |= check(criteria["parts"], table, words | report["setting"])
        assert parts == claim["parts"] and verdict(parts) == claim["holds"]
        assert (CLAIMS / regime / f"claim_{number}.png").stat().st_size > 5000


def variants(number: int, claim: dict) -> list[dict]:
    """The words in braces of a claim's criteria, from its parts."""
    pattern = {5: r"(?P<data>.*?): an", 6: r"with clip 100 (?P<when>.*), (?P<rate>.*?):"}.get(
        number
    )
    if pattern is None:
        return [{}]
    return [re.match(pattern, part).groupdict() for part in claim["parts"]]


def plain(text: str) -> str:
    """Numbers as Python writes them, and no markup."""
    return re.sub(r"[`*+]", "", text.replace("−", "-")).strip()


def check_tables(text: str, claims: dict[str, dict]) -> int:
    """Compare tables whose first cell names a setting, cell by cell; the number of figures."""
    checked = 0
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[plain(part) for part in line.split("|")[1:-1]] for line in table.splitlines()]
        regime, *metrics = lines[0]
        if regime not in claims:
            continue
        rows = claims[regime]["measured"] | claims[regime]["differences"]
        for label, *cells in lines[2:]:
            names = [
                name if name in rows[label] else re.sub(r"@\d+$", "", name) for name in metrics
            ]
            assert cells == [cell(name, rows[label].get(name, "")) for name in names], label
            checked += len(cells)
    return checked


def test_the_tables_on_the_page_of_claims_are_measured():
    page = (CLAIMS / "README.md").read_text()
    reports = {}
    for regime in REGIMES:
        reports[regime] = {claim["claim"]: claim for claim in report_of(regime)["claims"]}
    checked = 0
    for section in re.split(r"^## (?=\d)", page, flags=re.MULTILINE)[1:]:
        number = int(section[0])
        claims = {name: found[number] for name, found in reports.items() if number in found}
        checked += check_tables(section, claims)
        for claim in claims.values() if number != 9 else ():
            row = re.search(rf"^\| {number}\..*", page, re.MULTILINE)[0]
            assert f"**{claim['holds']}**" in row, number
    assert checked > 350


def test_the_readme_quotes_what_is_shipped():
    readme = (ROOT / "README.md").read_text()
    report = report_of("standard")
    results = re.search(r"^## Results\n.*?^## ", readme, re.DOTALL | re.MULTILINE)[0]
    rows = report["claims"][2]["measured"] | report["claims"][0]["measured"]
    assert check_tables(results, {"standard": {"measured": rows, "differences": {}}}) > 10
    assert report["commit"] in results and report["hardware"] in results
