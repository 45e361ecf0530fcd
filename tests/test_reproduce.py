"""The reproduction of the claims: its statistics, its jobs, one claim anew, and what is shipped."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

from topr import experiments, reproduce
from topr.claims import CLAIMS, other_peak
from topr.figures import COLOURS, draw
from topr.io import InputError
from topr.laboratory import Job, Laboratory
from topr.study import METHODS, STUDENT, above, below, over_seeds, verdict

SHIPPED = ROOT / "data" / "claims" / "standard" / "claims.json"


def test_intervals_over_seeds_are_students():
    found = over_seeds([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert found["mean"] == 3 and found["values"] == [1, 2, 3, 4, 5]
    assert found["interval"] == pytest.approx([3 - half, 3 + half], abs=1e-4)
    assert over_seeds([0.5])["interval"] is None
    assert below(over_seeds([0.5]), 1) is None and above(over_seeds([0.5]), 0) is None
    # coverage: of 95% intervals of normal samples, 95% hold the mean
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 8):
        held = [
            low <= 0 <= high for low, high in (over_seeds(list(rng.normal(size=n)))["interval"] for _ in range(4000))
        ]
        assert np.mean(held) == pytest.approx(0.95, abs=0.015), n
    assert sorted(STUDENT, reverse=True) == STUDENT
    for n, quantile in ((12, 2.20099), (16, 2.13145), (30, 2.04523)):  # beyond the table
        low, high = over_seeds(list(values := rng.normal(size=n)))["interval"]
        assert (high - low) / 2 == pytest.approx(quantile * values.std(ddof=1) / math.sqrt(n), rel=1e-3)


def test_a_verdict_needs_every_part_of_its_criterion():
    told = {(True, True): "yes", (True, False): "in part", (False, None): "no", (True, None): "undecided"}
    for checks, holds in told.items():
        found = verdict(dict(zip("ab", checks, strict=True)))
        assert found["holds"] == holds
        assert found["parts"]["a"] == {True: "yes", False: "no"}[checks[0]]
    summary = over_seeds([-0.2, -0.21, -0.19])
    assert below(summary) is True and above(summary) is False
    assert below(summary, -0.3) is False and above(summary, -0.3) is True
    assert below(summary, -0.2) is None and above(summary, -0.2) is None


@pytest.fixture
def job() -> Job:
    return Job(experiments.base, "base policy", {"regime": "standard", "seed": 3, "scale": {"samples": 2}})


def test_a_job_is_known_by_what_it_does_and_done_once(tmp_path, job, capfd):
    assert job.digest == job._replace(label="another word").digest
    assert job.digest != job._replace(arguments=job.arguments | {"seed": 4}).digest
    lab = Laboratory(tmp_path, 1)
    first = lab.run([job])
    kept = tmp_path / "jobs" / f"{job.digest}.json"
    written = kept.stat().st_mtime_ns
    assert lab.run([job, job]) == [*first, *first] and kept.stat().st_mtime_ns == written
    with pytest.raises(InputError, match="another command is at work"):
        Laboratory(tmp_path, 1)
    lab.close()
    assert capfd.readouterr().out.count("base policy") == 1
    assert not list((tmp_path / "work").iterdir()) and (tmp_path / "bases" / "standard-3" / "train.parquet").exists()


def test_a_study_that_was_killed_goes_on_where_it_stood(tmp_path):
    command = [
        sys.executable,
        "-m",
        "topr.reproduce",
        "--quick",
        "--claims",
        "1",
        "--workers",
        "1",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kept = tmp_path / "quick" / "kept"
    while len(list(kept.glob("jobs/*.json"))) < 2 and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in kept.glob("jobs/*.json")}
    assert len(done) >= 2
    deadline = time.monotonic() + 20  # its worker ends with it
    while (left := workers_of(kept)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    lab, rows = Laboratory(kept, 1), [json.loads(path.read_text()) for path in done]
    lab.run(Job(getattr(experiments, row["function"]), row["label"], row["arguments"]) for row in rows)
    lab.close()
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_a_training_that_diverges_is_a_result(tmp_path, monkeypatch):
    lab = tmp_path / "lab"
    monkeypatch.setitem(
        experiments.REGIMES, "standard", experiments.REGIMES["standard"]._replace(optimizer=torch.optim.SGD)
    )
    common = {"regime": "standard", "seed": 1}
    experiments.base(lab, tmp_path, **common, scale={"samples": 1})
    how = common | {"loss": ["IS", {}], "rate": 1e30, "split": "val", "samples": 2, "points": 2}
    found = experiments.train(lab, tmp_path, **how)
    json.dumps(found, allow_nan=False)
    assert len(found["curve"]) == 3 and found["curve"][0]["pass@1"] > 0.1 and found["curve"][-1]["pass@1"] == 0
    assert found["steps"] < 8 and [point["step"] for point in found["curve"]] == [0, 4, 8]
    assert found["diverged"] and np.mean(found["result"]["pass@1"]) == 0 and len(found["result"]["pass@1"]) == 200
    assert np.mean(found["result"]["invalid"]) == 1
    how |= {"share": [0.3, 300], "epochs": 2, "samples": 1}
    for rate in (1e-6, 1e30):
        curve = experiments.train(lab, tmp_path, **how | {"rate": rate})["curve"]
        # five updates an epoch: the last of the evenly spaced validations is after the ninth
        assert [point["step"] for point in curve] == [0, 2, 4, 7, 9, 10]
        assert all(point["pass@1"] > 0.1 for point in curve) == (rate < 1)
    chain = common | {"way": "uniform", "rate": 1e30, "count": 2, "prompts": 20, "budget": 8, "pool": 8}
    found = experiments.iterations(lab, tmp_path, **chain, split="val", samples=2)
    assert len(found["results"]) == 3 and len(found["shares"]) == 2 and np.mean(found["result"]["invalid"]) == 1


def workers_of(folder) -> list[str]:
    """Processes whose environment names a study's cache."""
    found = []
    for process in os.listdir("/proc"):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                environment = file.read()
        except OSError:
            continue
        if f"HF_DATASETS_CACHE={folder}/cache".encode() in environment and int(process) != os.getpid():
            found.append(process)
    return found


def is_summary(value) -> bool:
    return set(value) == {"mean", "interval", "values"} and len(value["values"]) >= 2


def check_schema(found: dict) -> None:
    assert {"command", "commit", "measured_at", "hardware", "versions", "cpu_minutes", "claims"} <= set(found)
    for claim in found["claims"]:
        assert claim["statement"] == CLAIMS[claim["claim"]].__doc__.splitlines()[0].rstrip(".")
        assert claim["holds"] in ("yes", "in part", "undecided", "no") and claim["paper"]
        assert len(claim["parts"]) >= 2 and set(claim["parts"].values()) <= {"yes", "no", "undecided"}
        assert claim["settings"]["seeds"] == claim["seeds"]
        for table in (claim["measured"], claim["differences"]):
            assert table
            for row in table.values():
                assert all(is_summary(value) if isinstance(value, dict) else 0 <= value <= 1 for value in row.values())
        for row in claim["differences"].values():
            assert all(len(value["values"]) == len(claim["seeds"]) for value in row.values() if "pass@1" in row)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "data" / "claims").glob("*/claims.json")), ids=lambda path: path.parts[-2]
)
def test_the_shipped_claims_have_the_schema_and_their_figures(path):
    found = json.loads(path.read_text())
    check_schema(found)
    assert [claim["claim"] for claim in found["claims"]] == experiments.REGIMES[path.parent.name].claims
    text = (path.parent / "claims.md").read_text()
    for claim in found["claims"]:
        assert (path.parent / f"claim_{claim['claim']}.png").stat().st_size > 5000
        assert f"{claim['claim']}. {claim['statement']} | {claim['paper']} | **{claim['holds']}**" in text
    assert text == reproduce.markdown(found)


@pytest.mark.skipif(not SHIPPED.exists(), reason="no claims are shipped")
def test_one_claim_anew_agrees_with_what_is_shipped(tmp_path):
    """TOPR and REINFORCE from the shipped base policy: their gap lies where a further seed's should."""
    claim = json.loads(SHIPPED.read_text())["claims"][0]
    rate = max(claim["settings"]["validation"]["TOPR"].items(), key=lambda pair: pair[1])[0]
    lab, common = Laboratory(tmp_path, 1), {"regime": "standard", "seed": 9}
    lab.run([Job(experiments.base, "", common | {"scale": {"samples": 16}})])
    how = common | {"rate": float(rate), "split": "test", "samples": 4}
    jobs = [Job(experiments.train, name, how | {"loss": [name, {}]}) for name in ("TOPR", "REINFORCE")]
    topr, reinforce = (np.mean(found["result"]["pass@1"]) for found in lab.run(jobs))
    lab.close()
    measured = claim["measured"]
    for name, again in (("TOPR", topr), ("REINFORCE, TOPR's rate", reinforce)):
        values = measured[name]["pass@1"]["values"]
        wide = STUDENT[len(values) - 2] * max(np.std(values, ddof=1), 0.01) * math.sqrt(1 + 1 / len(values))
        assert abs(again - np.mean(values)) <= wide, name


def test_a_quick_claim_writes_its_report_and_figure(tmp_path, run, monkeypatch):
    monkeypatch.setattr(reproduce, "QUICK", reproduce.QUICK | {"scale": {"samples": 1}, "samples": 1, "total": 100})
    code, out, err = run(
        reproduce.main, "--quick", "--claims", "6", "--seeds", "2", "--workers", "2", "--out", tmp_path / "claims"
    )
    assert code == 0, err
    found = json.loads((tmp_path / "claims" / "quick" / "standard" / "claims.json").read_text())
    check_schema(found)
    assert [claim["claim"] for claim in found["claims"]] == [6] and found["claims"][0]["seeds"] == [1, 2]
    assert (tmp_path / "claims" / "quick" / "standard" / "claim_6.png").exists() and "claim 6 holds:" in out
    assert (tmp_path / "claims" / "quick" / "standard" / "claims.md").read_text() == reproduce.markdown(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--claims", "1,9"], "--claims names 9"),
        (["--claims", "one"], "no list of numbers"),
        (["--claims", ""], "no list of numbers"),
        (["--regime", "strong", "--claims", "1,2"], "--claims names 2; choose from 1, 4, 5, 6, 7"),
        (["--regime", "strong", "--claims", "6", "--quick", "--workers", "1"], "ships no trajectories"),
        (["--seeds", "1"], "--seeds is 1"),
        (["--workers", "0"], "--workers is 0"),
    ],
)
def test_bad_arguments_get_a_sentence(run, arguments, words):
    code, _, err = run(reproduce.main, *arguments)
    assert code == 2 and words in err and err.count("\n") == 1


def test_a_peak_of_noise_is_no_rise():
    """Flat curves with noise do not rise to a peak, whatever their number of points."""
    rng = np.random.default_rng(0)
    curves = [list(0.3 + 0.02 * rng.normal(size=11)) for _ in range(400)]
    rises = [curve[other_peak(curves, i)] - curve[0] for i, curve in enumerate(curves)]
    assert abs(np.mean(rises)) < 0.004 < np.mean([max(curve) - curve[0] for curve in curves])
    assert other_peak([[0, 1, 0], [0, 0, 1]], 0) == 2 and other_peak([[0, 1, 0]], 0) == 1


def test_results_of_other_settings_are_refused(tmp_path):
    lab = Laboratory(tmp_path, 1)
    settings = experiments.REGIMES["standard"].settings | {"scale": {"samples": 2}}
    lab.agree("standard", settings)
    lab.agree("standard", settings)
    lab.agree("strong", settings | {"batch_size": 1})
    with pytest.raises(InputError, match="other settings of standard"):
        lab.agree("standard", settings | {"scale": {"samples": 3}})
    lab.close()


def test_figures_bear_batches_without_a_sign_and_runs_that_diverged(tmp_path):
    def run(points: int, updates: int, diverged: bool = False) -> dict:
        logged = {
            f"weight/{sign}_truncated": [0.2] * (updates - i) for i, sign in enumerate(("positives", "negatives"))
        }
        curve = [{"step": i * updates // points, "pass@1": 0.3, "invalid": 0.2} for i in range(points + 1)]
        ratios = None if diverged else {sign: [1] * (len(experiments.BINS) - 1) for sign in ("positives", "negatives")}
        return {"curve": curve, "logged": logged, "ratios": ratios, "steps": updates}

    runs = [run(10, 40), run(11, 37, diverged=True)]
    grid = dict.fromkeys(METHODS, {1e-4: 0.5, 1e-3: 0.4})
    bases = [{"positive_share": 0.3}] * 2
    study = SimpleNamespace(seeds=[1, 2], bases=bases, ends=dict.fromkeys(COLOURS, runs), grid=grid)
    row = {metric: over_seeds([0.1, 0.2]) for metric in ("pass@1", "maj", "invalid")}
    claim = {"holds": "in part", "measured": {"before training": row} | dict.fromkeys(METHODS, row)}
    for number in (1, 2, 3):
        draw(number, study, claim, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000
