"""The reproduction of the claims: intervals, criteria, cached jobs, the command, and what is shipped."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import yaml
from conftest import ROOT

import topr.reproduce.__main__ as command
from topr import losses
from topr.evaluation.report import cell, is_summary
from topr.io import DivergedError, InputError
from topr.reproduce import claims, experiments
from topr.reproduce.experiments import DIVERGED, Experiment
from topr.reproduce.study import (
    SETTINGS,
    SHIPPED,
    START,
    Study,
    above,
    below,
    best,
    code_digest,
    differences,
    over_seeds,
    verdict,
)
from topr.tasks import Arithmetic

CLAIMS = ROOT / "data" / "claims"
METRICS = ["pass@1", "maj", "invalid"]
REGIMES = ["standard", "strong"]


def setting(regime: str = "standard", **changes) -> SimpleNamespace:
    return SimpleNamespace(**SETTINGS["standard"] | SETTINGS[regime] | changes)


# intervals and verdicts


@pytest.mark.parametrize(
    ("n", "quantile"), [(2, 12.7062), (3, 4.30265), (5, 2.77645), (12, 2.20099)]
)
def test_intervals_over_seeds_are_students_at_95_per_cent(n, quantile):
    values = np.random.default_rng(n).normal(size=n)
    found = over_seeds(values)
    half = quantile * values.std(ddof=1) / np.sqrt(n)
    assert found["mean"] == pytest.approx(values.mean(), abs=1e-5)
    assert found["interval"] == pytest.approx(
        [values.mean() - half, values.mean() + half], abs=1e-4
    )
    assert found["values"] == pytest.approx(values, abs=1e-5)


def test_equal_values_have_an_interval_of_no_width():
    assert over_seeds([0.5, 0.5, 0.5])["interval"] == [0.5, 0.5]


def test_an_interval_that_contains_the_bound_decides_nothing():
    summary = over_seeds([-0.2, -0.21, -0.19])
    assert below(summary) is True and above(summary) is False
    assert below(summary, -0.3) is False and above(summary, -0.3) is True
    assert below(summary, -0.2) is None and above(summary, -0.2) is None


@pytest.mark.parametrize(
    ("parts", "holds"),
    [
        ([True, True], "yes"), ([True, None], "undecided"), ([None, None], "undecided"),
        ([True, False], "in part"), ([False, None], "no"), ([False, True, None], "in part"),
    ],
)  # fmt: skip
def test_a_verdict_needs_every_part_of_its_criterion(parts, holds):
    assert verdict(dict(enumerate(parts))) == holds


def test_differences_are_paired_by_seed():
    runs = {
        name: [{"result": {metric: [value, value + 0.2] for metric in METRICS}} for value in values]
        for name, values in (("a", [0.1, 0.5, 0.3]), ("b", [0.0, 0.4, 0.2]))
    }
    assert differences(runs, ("a", "b"))["a minus b"]["maj"]["interval"] == pytest.approx(
        [0.1, 0.1], abs=1e-5
    )


def test_a_peak_of_noise_is_no_rise():
    """Flat curves with noise do not rise to a peak, whatever their number of points."""
    rng = np.random.default_rng(0)
    curves = [list(0.3 + 0.02 * rng.normal(size=11)) for _ in range(400)]
    rises = [curve[claims.other_peak(curves, i)] - curve[0] for i, curve in enumerate(curves)]
    assert abs(np.mean(rises)) < 0.004 < np.mean([max(curve) - curve[0] for curve in curves])
    assert (
        claims.other_peak([[0, 1, 0], [0, 0, 1]], 0) == 2 and claims.other_peak([[0, 1, 0]], 0) == 1
    )


# the claims' criteria, on results made up


class Results(Study):
    """A study whose results are made up by `make(experiment, arguments, seed)`."""

    def __init__(self, make, given, seeds):
        self.make, self.setting, self.seeds, self.asked = make, given, seeds, []

    def run(self, experiment, runs, seeds):
        self.asked += [
            (experiment.__name__, label, run, seed) for label, run in runs.items() for seed in seeds
        ]
        return {
            label: [self.make(experiment.__name__, run, seed) for seed in seeds]
            for label, run in runs.items()
        }

    def provenance(self):
        return {"commit": "abc", "cpu_minutes": 1}


def scores(value: float, invalid: float = 0.1, seed: int = 0) -> dict[str, list[float]]:
    """Four problems of all difficulties, seeds a little apart."""
    solved = [value + 0.001 * seed + apart for apart in (-0.1, 0.1, 0.25, -0.25)]
    return {"pass@1": solved, "maj": [value + 0.1] * 4, "invalid": [invalid] * 4}


def fitted(experiment, run, seed):
    """TOPR gains most, at 3e-4, REINFORCE collapses in a second epoch or at a high rate, the others gain a little."""
    name = run["loss"] and run["loss"][0] if experiment == "train" else None
    if name is None:
        end = scores(0.3, 0.4, seed)
    elif name == "REINFORCE" and (run.get("epochs") == 2 or run["rate"] > 1e-4):
        end = scores(0.01, 0.8, seed)
    else:
        end = scores(
            {"TOPR": 0.7, "PositivesOnly": 0.5}.get(name, 0.35) - abs(run["rate"] - 3e-4), 0.1, seed
        )
    curve = [{"pass@1": 0.3, "invalid": 0.4}, {"pass@1": 0.4 + 0.001 * seed, "invalid": 0.3}]
    curve.append({"pass@1": np.mean(end["pass@1"]), "invalid": end["invalid"][0]})
    logged = {
        "weight/positives_truncated": [0.0] * 8 + [0.2, 0.4],
        "weight/negatives_truncated": [0.0] * 9 + [1.0],
    }
    return {
        "result": end,
        "curve": curve,
        "logged": logged,
        "steps": 10,
        "train_cpu_s": 4.9,
        "positive_share": 0.25,
    }


def study(make=fitted, **changes) -> Study:
    return Results(make, setting(**changes), [1, 2, 3])


def test_the_chosen_rate_has_the_best_mean_of_those_at_which_no_seed_falls():
    gains = {1e-4: [0.1, 0.2], 3e-4: [0.3, 0.2], 1e-3: [0.9, -0.051]}
    assert best(gains) == 3e-4 and best(gains | {1e-3: [0.9, -0.05]}) == 1e-3
    assert best({1e-4: [-0.1, 0.0], 3e-4: [-0.06, 0.9]}) == 1e-4  # none is safe


def test_each_method_is_measured_at_its_own_best_rate():
    of = study(rates=(1e-4, 3e-4, 1e-3))
    runs, grid = of.methods
    assert best(grid["TOPR"]) == 3e-4 and best(grid["REINFORCE"]) == 1e-4
    assert grid["TOPR"][1e-3] == pytest.approx(3 * [0.7 - 0.3 - 0.0007], abs=1e-5)
    asked = {label: run for name, label, run, _ in of.asked if name == "train" and "points" in run}
    assert asked["TOPR"] == {
        "loss": ["TOPR", {}],
        "rate": 3e-4,
        "points": 8,
        "split": "test",
        "samples": 16,
    }
    assert (
        asked["REINFORCE, two epochs"]["epochs"] == 2
        and asked["REINFORCE, two epochs"]["rate"] == 1e-4
    )
    assert asked["REINFORCE, TOPR's rate"]["rate"] == 3e-4 and list(runs) == [START, *asked]
    tuned = {seed for _, _, run, seed in of.asked if run["split"] == "val"}
    measured = {seed for _, _, run, seed in of.asked if run["split"] == "test"}
    assert tuned == {101, 102, 103} and measured == {1, 2, 3}
    budget = study(budget=8).method("TOPR")
    assert budget == {"curation": {"way": "uniform", "budget": 8}, "loss": ["TOPR", {}]}


@pytest.mark.parametrize("claim", [claims.effective_share, claims.iterations])
def test_every_claim_chooses_rates_on_seeds_that_it_does_not_report(claim):
    def make(experiment, run, seed):
        found = {"result": scores(0.3, seed=seed), "results": [scores(0.3)] * 5}
        return found | {"shares": [0.5] * 4, "updates": [1] * 4}

    of = study(make)
    claim(of)
    assert {seed for *_, run, seed in of.asked if run["split"] == "val"} == {101, 102, 103}
    assert {seed for *_, run, seed in of.asked if run["split"] == "test"} == {1, 2, 3}


def test_claim_1_is_a_rise_and_a_collapse():
    claim = claims.collapse(study())
    assert verdict(claim.parts) == "yes" and len(claim.parts) == 6
    row = claim.measured["REINFORCE, two epochs, on validation"]
    assert (
        row["rise to its peak"]["mean"] == pytest.approx(0.102)
        and row["fall from its peak"]["mean"] < -0.3
    )
    steady = claims.collapse(study(lambda *of: fitted(*of) | {"result": scores(0.5, seed=of[2])}))
    assert (
        verdict(steady.parts) == "in part" and steady.parts["with most responses invalid"] is False
    )


def test_claim_2_weighs_the_lost_gradient_by_the_signs_shares():
    claim = claims.clipping(study())
    # the last fifth of ten updates: positives .3, negatives .5
    assert claim.measured["PPO"]["without gradient"]["mean"] == pytest.approx(
        0.25 * 0.3 + 0.75 * 0.5
    )
    assert claim.parts["at the end of PPO, most of the data has no gradient"] is False
    assert claim.parts["PPO gains less than half of what TOPR gains"] is True
    gain = claim.differences["PPO: gain minus half of TOPR's"]["pass@1"]["mean"]
    assert gain == pytest.approx((0.35 - 0.3) - (0.7 - 0.3) / 2, abs=1e-3)


def test_claim_3_halves_invalid_responses_and_compares_every_pair():
    claim = claims.comparison(study())
    assert claim.parts["TOPR more than halves the share of invalid responses"] is True
    assert claim.parts["DPO does not"] is False and len(claim.differences) == 6 + 15 + 6
    assert claim.differences["TOPR: invalid minus half of the start's"]["invalid"][
        "mean"
    ] == pytest.approx(-0.1)


def test_claim_4_splits_problems_by_how_often_the_base_policy_is_right():
    solved = [0.25, 0.5, 0.75, 0.1]
    gains = {"TOPR": [0.9, 0.6, 0.5, 0.7], "PositivesOnly": [0.5, 0.5, 0.5, 0.5]}

    def make(experiment, run, seed):
        name = run["loss"] and run["loss"][0] if experiment == "train" else None
        values = np.add(gains.get(name, solved), 0.001 * seed * (name == "TOPR"))
        return fitted(experiment, run, seed) | {"result": scores(0.1) | {"pass@1": values.tolist()}}

    claim = claims.positives_only(study(make))
    rescued = claim.differences["TOPR minus positives only, by how often the base policy is right"]
    means = [
        rescued[name]["mean"] for name in ("up to a quarter", "up to a half", "more than half")
    ]
    assert means == pytest.approx([0.3 + 0.002, 0.1 + 0.002, 0.002])
    assert claim.parts["positives only ends below TOPR in pass@1"] is True
    assert (
        claim.parts["negatives help most where the base policy is right in up to a quarter"] is True
    )


@pytest.mark.parametrize(
    ("values", "answers"),
    [
        ({0.05: 0.2, 0.15: 0.5, 0.5: 0.4, 0.9: 0.3}, [True, True]),
        ({0.05: 0.6, 0.15: 0.5, 0.5: 0.4, 0.9: 0.3}, [False, True]),
        ({0.05: 0.2, 0.15: 0.5, 0.5: 0.6, 0.9: 0.7}, [False, False]),
        ({0.05: 0.2, 0.15: 0.5, 0.5: 0.5, 0.9: 0.5}, [None, None]),
    ],
)
def test_claim_5_needs_15_per_cent_to_beat_both(values, answers):
    def make(experiment, run, seed):
        share = run["loss"][1]["positive_share"] if run.get("loss") else 0.5
        small = run.get("rate") == 1e-5
        return {"result": scores(values[share] + 0.01 * np.sin(7 * seed + 9 * share) - 0.2 * small)}

    claim = claims.effective_share(study(make, shares=tuple(values), small_rate=1e-5))
    assert list(claim.parts.values()) == 4 * answers
    low, high = (claim.measured[f"data with 10% positives{small} at effective share 15%"]["pass@1"]["mean"]
                 for small in (", rate 1e-05,", ""))  # fmt: skip
    assert high - low == pytest.approx(0.2)


def test_claim_6_compares_at_topr_s_rate_and_at_the_next_larger():
    def make(experiment, run, seed):
        if not run.get("loss"):
            return {"result": scores(0.3, 0.2, seed)}
        loose, sampling = run["loss"][1]["b_minus"] == 100, run["loss"][1]["a_plus"] == 0
        broken = run["rate"] == 1e-3 and loose and sampling
        return {
            "result": scores(0.05 if broken else 0.6 - run["rate"], 0.6 if broken else 0.1, seed)
        }

    claim = claims.loose_clipping(study(make, rates=(1e-4, 1e-3, 1e-2)))
    own, larger = list(claim.parts.values())[:4], list(claim.parts.values())[4:]
    assert own == [False, False, True, None] and larger == [True, True, True, True]
    assert (
        "at TOPR's own rate, 0.0001" in list(claim.parts)[0]
        and "at the next larger, 0.001" in list(claim.parts)[4]
    )
    assert len(claims.loose_clipping(study(make, rates=(1e-4,))).parts) == 4


def test_claim_7_compares_chains_iteration_by_iteration():
    def make(experiment, run, seed):
        step = 0.1 if run.get("way") == "uniform" else 0.05
        ends = [scores(0.3 + step * i, seed=seed) for i in range(5)]
        end = scores(0.5 - run.get("rate", 0) * (1 if run.get("way") == "uniform" else -1))
        return {
            "results": ends,
            "result": end,
            "shares": [0.1 * i for i in range(4)],
            "updates": [seed] * 4,
        }

    claim = claims.iterations(study(make, rates=(1e-4, 1e-3)))
    assert list(claim.parts.values()) == [True, True, True, False, False]
    gap = claim.differences["Anna Karenina at iteration 4 minus uniform at iteration 4"]["pass@1"][
        "mean"
    ]
    assert gap == pytest.approx(-0.2) and claim.updates["uniform"] == [4, 8, 12]
    assert all(" at iteration " in label for label in claim.figure)
    assert claim.measured["positives, uniform"]["iteration 4"]["mean"] == pytest.approx(0.3)


def test_claim_8_compares_the_weighted_vote_with_the_majority():
    def make(experiment, run, seed):
        if experiment != "verify":
            return fitted(experiment, run, seed)
        votes = {"maj@4": [0.4], "maj@8": [0.5 + 0.01 * seed], "weighted@4": [0.4]}
        before = {"accuracy": 0.5, "invalid": 0.2, "weighted@8": [0.45]} | votes
        return {
            "before": before,
            "after": before | {"accuracy": 0.7, "invalid": 0.01, "weighted@8": [0.6, 0.8]},
        }

    claim = claims.verifier(study(make))
    assert verdict(claim.parts) == "yes"
    assert claim.differences["after: weighted minus majority"]["@8"]["mean"] == pytest.approx(
        0.7 - 0.52
    )
    assert claim.differences["after minus before"]["accuracy"]["mean"] == pytest.approx(0.2)


def test_every_loss_is_ranked_beside_the_start():
    of = study(rates=(1e-4, 3e-4))
    claim = claims.losses(of)
    names = [name for name in SETTINGS["losses"] if name not in claims.LOOSE]
    assert set(claim.measured) == {START, *names} and len(names) == 21 and claim.parts == {}
    assert list(claim.measured)[0].startswith("TOPR") and verdict(claim.parts) == "not a claim"
    means = [row["pass@1"]["mean"] for row in claim.measured.values()]
    assert means == sorted(means, reverse=True)
    found = claim.measured["DPO"]
    assert found["minus TOPR"]["mean"] == pytest.approx(0.35 - 0.7) and found["updates"] == 10
    assert found["CPU seconds"] == 5 and found["largest fall"]["mean"] == pytest.approx(
        0.4 - 0.35, abs=2e-3
    )
    assert "minus TOPR" not in claim.measured["TOPR"] and best(claim.tuning["KTO"]) == 3e-4


def test_the_comparison_holds_every_shipped_loss():
    overlays = [
        yaml.safe_load(path.read_text())["model"]["loss"]
        for path in (ROOT / "configs/loss").glob("*.yaml")
    ]
    shipped = [
        attributes(loss["class_path"].split(".")[-1], loss["init_args"]) for loss in overlays
    ]
    compared = {
        name: attributes(*loss)
        for name, loss in SETTINGS["losses"].items()
        if name not in claims.LOOSE
    }
    assert all(loss in compared.values() for loss in shipped)
    extra = [name for name, loss in compared.items() if loss not in shipped]
    assert extra == ["TOPR, effective share 20%", "PPO, sequence ratio"]


def attributes(name: str, arguments: dict) -> tuple[str, dict]:
    return name, vars(getattr(losses, name)(**arguments))


# the jobs


def make_base(experiment, **base):
    experiment.folder.mkdir(parents=True)
    return {}


def job(experiment, value=1, fail=False):
    """An experiment that notes its calls beside the base policies, and its scratch folder in its result."""
    calls = experiment.folder.parent
    assert experiment.folder.exists()
    with (calls / "calls").open("a") as file:
        file.write(f"{experiment.seed}")
    (experiment.scratch / "file").write_text("")
    print("not shown")
    if fail and not (calls / "fixed").exists():
        raise InputError("too bad")
    return {"value": value, "scratch": str(experiment.scratch)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Makes job caches one after another under one folder; base policies are empty folders."""
    monkeypatch.setattr(Experiment, "make_base", make_base)
    return lambda regime="standard", **changes: Study(
        tmp_path, 1, setting(regime, **changes), [1, 2]
    )


def test_a_job_is_done_once_and_known_by_its_arguments_and_seed(cache, capsys):
    jobs = cache()
    found = jobs.run(job, {"a": {"value": 1}, "b": {"value": 2}, "c": {"value": 1}}, [1, 2])
    assert [result["value"] for result in found["b"]] == [2, 2] and found["a"] == found["c"]
    shown = capsys.readouterr().out
    assert "[4/4] b, seed 2 (0 s)" in shown and "not shown" not in shown
    assert shown.index("[2/2] base policy, seed 2 (0 s)") < shown.index("[1/4]")
    assert (calls := jobs.folder / "bases" / "calls").read_text() == "1212"
    again = cache().run(job, {"another label": {"value": 2}, "new": {"value": 3}}, [2])
    assert again["another label"][0] == found["b"][1] and calls.read_text() == "12122"
    assert capsys.readouterr().out.count("\n") == 1
    scratch = {Path(result["scratch"]) for result in found["a"] + found["b"]}
    assert len(scratch) == 4 and not any(folder.exists() for folder in scratch)


def test_other_settings_have_other_results(cache):
    one = cache()
    one.run(job, {"a": {}}, [1])
    few = cache(base=SETTINGS["standard"]["base"] | {"samples": 2})
    assert few.folder != one.folder and cache("strong").folder != one.folder
    assert cache(optimizer="SGD").folder != one.folder
    assert cache(samples=3, rates=[1.0]).folder == one.folder  # arguments of the jobs


def test_a_command_that_fails_resumes_at_the_missing_jobs(cache):
    jobs = cache()
    runs = {"a": {"value": 1}, "b": {"fail": True}, "c": {"value": 3}}
    with pytest.raises(InputError, match="b, seed 1: too bad"):
        jobs.run(job, runs, [1])
    (jobs.folder / "bases" / "fixed").touch()
    resumed = cache()
    assert [len(found) for found in resumed.run(job, runs, [1]).values()] == [1, 1, 1]
    assert (jobs.folder / "bases" / "calls").read_text() == "11" + "11"  # a, b that failed; b, c


def test_the_report_names_the_cpu_time_of_what_was_used(cache):
    jobs = cache()
    jobs.run(job, {"a": {"value": 1}, "b": {"value": 2}}, [1])
    for file in (jobs.folder / "results").glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"cpu_s": 80.0}))
    later = cache()
    later.run(job, {"a": {"value": 1}, "b": {"value": 2}, "again": {"value": 1}}, [1])
    assert later.provenance()["cpu_minutes"] == 4


def test_results_depend_on_the_code_that_computes_them_alone(tmp_path):
    package = tmp_path / "topr"
    (package / "losses").mkdir(parents=True)
    (package / "reproduce").mkdir()
    (package / "evaluation").mkdir()
    source = package / "losses" / "topr.py"
    source.write_text('"""Loss."""\n\n\ndef loss(x):\n    """Of x."""\n    return 2 * x\n')
    (package / "reproduce" / "experiments.py").write_text("POINTS = 2\n")
    before = code_digest.__wrapped__(package)
    assert before == code_digest.__wrapped__(package)
    source.write_text(
        '"""Loss."""\n\ndef loss(x):  # doubled\n    """Of x."""\n    return (2 * x)\n'
    )
    (package / "reproduce" / "__main__.py").write_text("print(1)\n")
    (package / "reproduce" / "claims.py").write_text("print(1)\n")
    (package / "evaluation" / "report.py").write_text("print(1)\n")
    assert code_digest.__wrapped__(package) == before
    source.write_text(source.read_text().replace("2 *", "3 *"))
    changed = code_digest.__wrapped__(package)
    (package / "reproduce" / "experiments.py").write_text("POINTS = 3\n")
    assert len({before, changed, code_digest.__wrapped__(package)}) == 3


# the experiments


@pytest.fixture
def experiment(tmp_path) -> Experiment:
    """Experiments with the shipped base policy and data, and few problems to measure on."""
    folder = tmp_path / "base"
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("strong", "verifier"))
    for split in ("val", "test"):
        file = folder / f"{split}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Experiment(folder, Arithmetic(), torch.optim.AdamW, 1, scratch)


def test_a_base_policy_is_made_whole_and_once(tmp_path, monkeypatch):
    made = []

    def make(task, out, seed, **base):
        (out / "base").mkdir(parents=True)
        made.append((seed, base))
        if len(made) == 1:
            raise KeyError("killed here")

    monkeypatch.setattr(experiments, "make", make)
    experiment, base = (
        Experiment(tmp_path / "bases" / "7", Arithmetic(), torch.optim.SGD, 7),
        setting("strong").base,
    )
    with pytest.raises(KeyError, match="killed here"):
        experiment.make_base(**base)
    assert not experiment.folder.exists()
    for _ in range(2):  # the second time as after a kill before the result was written
        experiment.make_base(**base)
        assert (experiment.folder / "base").exists()
    assert made == 2 * [(7, base)] and base["steps"] == [1000, 800, 700] and base["samples"] == 32


def test_a_quick_study_starts_from_what_is_shipped(cache):
    found = cache("quick").run(
        lambda experiment: {"folder": str(experiment.folder)}, {"a": {}}, [3]
    )
    assert found["a"][0]["folder"] == str(SHIPPED)


def test_a_diverged_policy_has_no_valid_responses(experiment):
    found = experiment.measure(None, "test", 4)
    assert found["result"] == {k: [v] * 5 for k, v in DIVERGED.items()}


def test_a_training_that_diverges_has_a_whole_curve(experiment, monkeypatch):
    """Five validations of a run of two epochs, of which one was made, and one behind the last update."""

    class Trainer:
        num_training_batches, val_check_batch = 5, 2

        def __init__(self, logger, **_):
            self.logger = logger

        def fit(self, module, data):
            data.reward = np.array([1.0, -1.0])
            self.logger.log_metrics({"val/pass@1": 0.3, "val/invalid": 0.2}, 0)
            self.logger.log_metrics({"weight/positives_truncated": 0.5, "train/loss": 1.0}, 0)
            raise DivergedError("nan")

    monkeypatch.setattr(experiments.lightning, "Trainer", Trainer)
    found = experiment.train("test", 2, ["IS", {}], rate=1e30, points=2, epochs=2)
    assert [point["pass@1"] for point in found["curve"]] == [0.3, 0, 0, 0, 0, 0] and found["curve"][
        1
    ]["invalid"] == 1
    assert np.mean(found["result"]["invalid"]) == 1
    assert found["logged"]["weight/positives_truncated"] == [0.5] and found["positive_share"] == 0.5
    json.dumps(found, allow_nan=False)
    monkeypatch.setattr(
        experiment, "measure", lambda policy, *_: {"result": {"pass@1": policy is None}}
    )
    monkeypatch.setattr(experiments, "sample_to", lambda *_: None)
    monkeypatch.setattr(experiments, "curate", lambda *_: {"after": {"positive_share": 0.25}})
    chain = experiment.iterate("test", 2, "uniform", 1e30, count=3, prompts=2, budget=2, pool=2)
    assert [result["pass@1"] for result in chain["results"]] == [False, True, True, True]
    assert chain["shares"] == [0.25, 0.0, 0.0] and len(chain["updates"]) == 3


@pytest.mark.slow
def test_a_training_that_diverges_is_a_result(experiment, monkeypatch):
    monkeypatch.setattr(experiment, "optimizer", torch.optim.SGD)
    few = {"way": "uniform", "budget": 1}
    for rate in (1e-6, 1e30):
        found = experiment.train("test", 2, ["IS", {}], rate=rate, curation=few, points=2, epochs=2)
        accuracy = [point["pass@1"] for point in found["curve"]]
        assert len(accuracy) == 5 and (found["steps"] == 16) == (rate < 1)
        assert (accuracy[-1] == 0) == (np.mean(found["result"]["invalid"]) == 1) == (rate > 1)


# the command


@pytest.fixture
def reported(tmp_path, monkeypatch, run):
    """Run the command on results made up, and return its report."""

    def report(*arguments) -> tuple[dict, str, str]:
        monkeypatch.setattr(
            command, "Study", lambda out, workers, given, seeds: Results(fitted, given, seeds)
        )
        code, out, err = run(command.main, "--out", tmp_path / "out", *arguments)
        assert code == 0, err
        folder = next(path.parent for path in (tmp_path / "out").rglob("claims.json"))
        return (
            json.loads((folder / "claims.json").read_text()),
            (folder / "claims.md").read_text(),
            out,
        )

    return report


def test_the_command_writes_its_report_and_figures(reported, tmp_path):
    found, text, out = reported("--claims", "4,1", "--seeds", "3")
    assert found["command"] == "python -m topr.reproduce --claims 1,4 --seeds 3 --regime standard"
    assert {"hardware", "torch", "setting", "commit", "cpu_minutes"} <= set(found)
    assert [claim["claim"] for claim in found["claims"]] == [1, 4] and found["claims"][0][
        "seeds"
    ] == [1, 2, 3]
    claim = found["claims"][0]
    assert claim["statement"] == "Naive REINFORCE improves, then collapses" and claim[
        "paper"
    ].startswith("Figures 1")
    assert claim["holds"] == "yes" and set(claim["parts"].values()) == {"yes"}
    assert claim["tuning"]["TOPR"]["0.0003"] == pytest.approx(3 * [0.4])
    assert found["setting"]["base"]["batch_size"] == 96
    assert (
        "| 1. Naive REINFORCE improves, then collapses | Figures 1 and 3" in text
        and "| **yes** |" in text
    )
    assert "| TOPR | 70.2 [70.0, 70.4] | 80.0 [80.0, 80.0] | 10.0 [10.0, 10.0] |" in text
    assert (
        "TOPR 0.0003, positives only" in text
        and "REINFORCE 0.0001," in text
        and "1. holds: yes\n" in out
    )
    for number in (1, 4):
        assert (tmp_path / f"out/standard/claim_{number}.png").stat().st_size > 5000


def test_rows_with_a_place_in_their_label_are_points_of_a_series(reported, monkeypatch):
    rows = {"IS, clip 1 at rate 0.1": {"a": 1}, "IS, clip 1 at rate 0.2": {"a": 2}, START: {"a": 0}}
    figures = []
    monkeypatch.setattr(command, "draw", lambda path, *figure: figures.append(figure))
    monkeypatch.setattr(
        command, "CLAIMS", [lambda study: claims.Claim({}, {}, {}, {}, figure=rows)]
    )
    reported("--claims", "1")
    assert figures == [
        ({"IS, clip 1": {"0.1": {"a": 1}, "0.2": {"a": 2}}, START: {"": {"a": 0}}}, "rate")
    ]


def test_a_quick_report_is_kept_apart(reported, tmp_path):
    found, _, _ = reported("--claims", "1", "--quick")
    assert found["command"].endswith("--quick") and found["claims"][0]["seeds"] == [1, 2]
    assert (tmp_path / "out/quick/standard/claims.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--claims", "1,10"], "--claims has '10'; this regime has 1,2,3,4,5,6,7,8,9"),
        (["--claims", "one"], "--claims has 'one'"),
        (["--claims", ""], "--claims has ''"),
        (
            ["--regime", "strong", "--claims", "1,2"],
            "--claims has '2'; this regime has 1,4,5,6,7,9",
        ),
        (["--regime", "strong", "--quick"], "--quick needs --regime standard"),
        (["--regime", "plain"], "plain"),
        (["--seeds", "1"], "--seeds is 1"),
        (["--workers", "0"], "workers"),
    ],
)
def test_bad_arguments_get_a_sentence(run, arguments, words):
    code, _, err = run(command.main, *arguments)
    assert code == 2 and words in err and err.count("\n") == 1


# what is shipped


def rows_of(report: dict) -> list[dict]:
    return [
        row
        for claim in report["claims"]
        for title in ("measured", "differences")
        for row in claim[title].values()
    ]


@pytest.mark.parametrize("regime", REGIMES)
def test_the_shipped_reports_agree_with_their_values(regime):
    """Each interval, computed again from the values of the seeds, is the shipped one to .01 per cent."""
    report, text = report_of(regime), (CLAIMS / regime / "claims.md").read_text()
    assert [claim["claim"] for claim in report["claims"]] == [*setting(regime).claims, 9]
    assert (
        report["setting"] == SETTINGS["standard"] | SETTINGS[regime]
        and "dirty" not in report["commit"]
    )
    for summary in (
        value for row in rows_of(report) for value in row.values() if is_summary(value)
    ):
        again = over_seeds(summary["values"])
        assert (
            again["interval"] == pytest.approx(summary["interval"], abs=1.01e-4)
            and cell(summary) in text
        )
        assert again["mean"] == pytest.approx(summary["mean"], abs=1.1e-5)
    for claim in report["claims"]:
        assert len(claim["seeds"]) >= {"standard": 10, "strong": 6}[regime]
        answers = {"yes": True, "no": False, "undecided": None}
        assert (
            verdict({part: answers[answer] for part, answer in claim["parts"].items()})
            == claim["holds"]
        )
        measure = command.CLAIMS[claim["claim"] - 1]
        assert claim["statement"] in " ".join(measure.__doc__.split())
        assert (CLAIMS / regime / f"claim_{claim['claim']}.png").stat().st_size > 5000


def plain(text: str) -> str:
    """Numbers as Python writes them, and no markup."""
    return re.sub(r"[`*+]", "", text.replace("−", "-")).strip()


def numbers_of(claim: dict) -> set[str]:
    """What a sentence on a claim may quote: means, ends of intervals, learning rates, and what labels hold."""
    rows = [*claim["measured"].values(), *claim["differences"].values()]
    labels = " ".join([claim["statement"], claim["paper"], *claim["measured"], *claim["parts"]])
    found = re.findall(r"\d+\.\d+", labels)
    for value in (value for row in rows for value in row.values() if is_summary(value)):
        found += [f"{abs(100 * number):.1f}" for number in (value["mean"], *value["interval"])]
        negated = {
            "mean": -value["mean"],
            "interval": [-end for end in reversed(value["interval"])],
        }
        found += [cell(value), cell(negated)]
    for rate, gains in (item for grid in claim.get("tuning", {}).values() for item in grid.items()):
        found += [f"{float(rate):g}", *(f"{abs(100 * gain):.1f}" for gain in gains)]
    return set(found)


def check_tables(text: str, claims: dict[str, dict]) -> int:
    """Compare tables whose first cell names a setting, cell by cell; the number of figures in them."""
    checked = 0
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        (regime, *metrics), _, *rows = (
            [plain(part) for part in line.split("|")[1:-1]] for line in table.splitlines()
        )
        for label, *cells in rows if regime in claims else ():
            row = (claims[regime]["measured"] | claims[regime]["differences"])[label]
            expected = [
                cell(row.get(metric, row.get(re.sub(r"^maj@\d+$", "maj", metric), "")))
                for metric in metrics
            ]
            assert cells == expected, (label, cells)
            checked += len(cells)
    return checked


def check_sentences(text: str, claims: list[dict]) -> None:
    allowed = set().union(*map(numbers_of, claims))
    sentences = plain(
        re.sub(r"^\|.*\n|`[^`]*`|\]\([^)]*\)|arXiv:[\d.]+", "", text, flags=re.MULTILINE)
    )
    quoted = re.findall(r"-?\d+\.\d%? \[[^\]]*\]|\d+\.\d+|\de-\d+", sentences)
    unknown = [number for number in quoted if number.replace("%", "") not in allowed]
    assert not unknown, unknown


def test_every_number_on_the_page_of_claims_is_measured():
    """The tables cell by cell; in the sentences on a claim whatever has a decimal point or is a learning rate."""
    page = (CLAIMS / "README.md").read_text()
    for link in re.findall(r"\]\((?!http)([^)]*)\)", page):
        assert (CLAIMS / link).exists(), link
    reports = {
        name: {claim["claim"]: claim for claim in report_of(name)["claims"]} for name in REGIMES
    }
    _, head, *sections = re.split(r"^\| claim \||^## ", page, flags=re.MULTILINE)
    for row in head.splitlines()[2:11]:
        text, _, *verdicts = (part.strip() for part in row.split("|")[1:-1])
        number = int(text.split(".")[0])
        for claims_of, said in zip(reports.values(), verdicts, strict=True):
            found = claims_of.get(number)
            begins = ("" if number == 9 else f"**{found['holds']}**") if found else "not measured"
            assert said.startswith(begins), (number, said)
            check_sentences(said, [found] if found else [])
    (how,) = (section for section in sections if section.startswith("How it was measured"))
    for report in map(report_of, REGIMES):
        for key in ("command", "commit", "hardware", "cpu_minutes"):
            assert str(report[key]) in how, report[key]
    checked = 0
    for section in sections[2:]:
        claims_of = {
            name: found[int(section[0])]
            for name, found in reports.items()
            if int(section[0]) in found
        }
        checked += check_tables(section, claims_of)
        check_sentences(section, list(claims_of.values()))
        for paragraph in section.split("\n\n"):
            assert paragraph.startswith("|") or paragraph.count("\n") < 5, paragraph
    assert checked > 350


def test_the_readme_quotes_what_is_shipped():
    readme, report = (ROOT / "README.md").read_text(), report_of("standard")
    results = re.search(r"^## Results\n.*?^## ", readme, re.DOTALL | re.MULTILINE)[0]
    rows = report["claims"][2]["measured"] | report["claims"][0]["measured"]
    assert check_tables(results, {"standard": {"measured": rows, "differences": {}}}) > 10
    advice = re.search(r"^\*\*Which to choose.*?\n\n", readme, re.DOTALL | re.MULTILINE)[0]
    check_sentences(advice, [report_of(regime)["claims"][-1] for regime in REGIMES])
    for key in ("command", "commit", "hardware"):
        assert report[key] in results


def report_of(regime: str) -> dict:
    return json.loads((CLAIMS / regime / "claims.json").read_text())


@pytest.mark.slow
def test_a_minimal_quick_study_survives_a_kill(tmp_path, monkeypatch):
    """`--claims 4 --quick` on smaller sizes in two processes: killed, resumed, reported."""
    sizes = {
        "budget": 1,
        "rates": [1e-3],
        "samples": 1,
        "points": 1,
        "methods": SETTINGS["strong"]["methods"],
    }
    script = f"import topr.reproduce.__main__ as m; m.SETTINGS['quick'] |= {sizes!r}; m.main()"
    arguments = ["--claims", "4", "--quick", "--workers", "2", "--out", str(tmp_path)]
    start = [sys.executable, "-c", script, *arguments]
    killed = subprocess.Popen(start, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = lambda: sorted(tmp_path.glob("cache/*/results/*.json"))  # noqa: E731
    while len(results()) < 3 and killed.poll() is None:
        time.sleep(0.05)
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = {path: path.stat().st_mtime_ns for path in results()}
    assert len(before) >= 3 and children
    assert not psutil.wait_procs(children, timeout=20)[1]  # the workers end with their parent
    done = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path: path.stat().st_mtime_ns for path in before} == before and len(results()) > len(
        before
    )
    found = json.loads((tmp_path / "quick/standard/claims.json").read_text())
    assert "4. holds:" in done.stdout and found["claims"][0]["seeds"] == [1, 2]
    assert (tmp_path / "quick/standard/claim_4.png").exists()


@pytest.mark.slow
def test_one_claim_measured_again_agrees_with_what_is_shipped(tmp_path):
    """TOPR and REINFORCE from the shipped base policy: each ends where a further seed should."""
    measured = report_of("standard")["claims"][0]["measured"]
    experiment = Experiment(SHIPPED, Arithmetic(), torch.optim.AdamW, 9)
    for loss, label in (("TOPR", "TOPR"), ("REINFORCE", "REINFORCE, TOPR's rate")):
        again = np.mean(experiment.train("test", 4, [loss, {}], rate=3e-4)["result"]["pass@1"])
        values = measured[label]["pass@1"]["values"]
        wide = 2.776 * max(np.std(values, ddof=1), 0.01) * np.sqrt(1 + 1 / len(values))
        assert abs(again - np.mean(values)) <= wide, label
