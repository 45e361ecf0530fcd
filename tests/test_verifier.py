"""Verifiers judge candidate solutions: problems from trajectories, verdicts, weights, and the embedded task's own."""

import json

import numpy as np
import pytest
from conftest import ROOT, make_trajectories, write

import evaluate
from topr.io import InputError
from topr.policy import encode_prompt, load_tokenizer
from topr.reproduce.making import critique
from topr.tasks import GSM8K, Arithmetic, ArithmeticVerifier, Verifier
from topr.tasks.task import Grade, Problem

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6 * 5 is 30.\nVerdict: correct", Grade(1.0, True, "correct")),
        ("Verdict: **Correct**.", Grade(1.0, True, "correct")),
        ("Verdict: incorrect", Grade(-1.0, True, "incorrect")),
        ("Verdict: correct? No. Verdict: incorrect", Grade(-1.0, True, "incorrect")),
        ("<think>Verdict: correct</think>Verdict: incorrect", Grade(-1.0, True, "incorrect")),
        ("<think>Verdict: correct</think>", Grade(-1.0, False, None)),
        ("**Verdict**: correct", Grade(1.0, True, "correct")),
        (r"Verdict: \boxed{incorrect}", Grade(-1.0, True, "incorrect")),
        ("Verdict: correct or incorrect?", Grade(-1.0, False, None)),
        ("Verdict: correct\nThank you.", Grade(1.0, True, "correct")),
        ("<think>Verdict: incorrect</think>correct", Grade(-1.0, False, None)),
        ("correct", Grade(-1.0, False, None)),
        ("Verdict: perhaps correct", Grade(-1.0, False, None)),
        ("Verdict:", Grade(-1.0, False, None)),
        ("", Grade(-1.0, False, None)),
    ],
)
def test_the_last_verdict_counts(text, expected):
    assert Verifier().grade(text, "correct") == expected


def test_problems_are_balanced_trajectories_always_the_same(run, policy):
    rows = make_trajectories(policy, count=23)
    right = sum(row.reward > 0 for row in rows)
    path = write(run.folder / "a.parquet", policy, rows)
    problems = Verifier().problems(path)
    assert len(problems) == 2 * min(right, 23 - right) and problems == Verifier().problems(path)
    assert [p.gold for p in problems].count("correct") == len(problems) // 2
    everything = Verifier(balance=False).problems(path)
    assert [p.solution for p in everything] == [row.response for row in rows]
    assert all(
        (p.gold == "correct") == (row.reward > 0) for p, row in zip(everything, rows, strict=True)
    )
    assert len({p.id for p in everything}) == 23
    for row in rows:
        row.reward = 1.0
    with pytest.raises(InputError, match="no solution has the verdict 'incorrect'"):
        Verifier().problems(write(run.folder / "b.parquet", policy, rows))


@pytest.mark.parametrize("template", [None, CHAT])
def test_the_question_stands_alone_in_the_prompt(policy, template):
    tokenizer = load_tokenizer(str(policy))
    tokenizer.chat_template = template
    asked, _ = encode_prompt(
        GSM8K().prompt(Problem("0", "How many eggs?", "5"), tokenizer), tokenizer
    )
    verifier = Verifier(GSM8K())
    assert verifier.question(asked, tokenizer) == "How many eggs?"
    text, _ = encode_prompt(
        verifier.prompt(Problem("0", asked, "correct", "It is 5."), tokenizer), tokenizer
    )
    assert (
        text.count("How many eggs?\n\nSolution: It is 5.") == 1
        and "The answer is" not in text.split("eggs?")[1]
    )
    assert verifier.question("another prompt", tokenizer) == "another prompt"


def test_worked_examples_end_in_a_verdict(policy):
    tokenizer = load_tokenizer(str(policy))
    for example in (
        Verifier()
        .prompt(Problem("0", "Q", "correct", "S"), tokenizer)
        .split("\n\nQuestion: ")[1:-1]
    ):
        assert Verifier().grade(example, "correct").valid


def test_weights_are_mean_verdicts(policy):
    rows = make_trajectories(policy, count=4)
    for row, answer in zip(rows, ["correct", "incorrect", None, "correct"], strict=True):
        row.answer, row.valid = answer, answer is not None
    assert Verifier().weight(rows) == 0.5  # an invalid critique does not speak for a solution


def test_the_embedded_verifier_judges_every_step():
    task, rng = ArithmeticVerifier(), np.random.default_rng(0)
    assert (
        task.prompt(Problem("0", "9+3*2>", "1", "9+3=12;12*2=24;#24"), None)
        == "9+3*2>9+3=12;12*2=24;#24>"
    )
    assert task.grade("11#1", "1") == Grade(1.0, True, "1")
    assert task.grade("10#0", "1") == Grade(-1.0, True, "0")
    assert (
        task.grade("11", "1")
        == task.grade("11#1#1", "1")
        == task.grade("2#1", "1")
        == Grade(-1.0, False, None)
    )
    found = [
        critique("9+3=12;12*2=24;24-4=20;#20", "9+3=12;12*2=25;25-4=21;#21", False, rng)
        for _ in range(2000)
    ]
    steps = [text.split("#")[0] for text in found if text[0] != "#"]
    assert np.mean([text == "100" for text in steps]) == pytest.approx(0.9**3, abs=0.04)
    assert np.mean([text[0] == "#" for text in found]) == pytest.approx(0.20, abs=0.03)
    assert np.mean(["#" not in text for text in found]) == pytest.approx(0.8 * 0.12, abs=0.03)
    assert np.mean(
        [task.grade(text, "0").reward > 0 for text in found if "#" in text]
    ) == pytest.approx(0.9, abs=0.03)


def test_evaluate_weighs_votes_by_a_verifier(run):
    data = ROOT / "data" / "arithmetic"
    (run.folder / "few.jsonl").write_text(
        "".join((data / "test.jsonl").read_text().splitlines(True)[:12])
    )
    code, out, err = run(
        evaluate.main, "--policy", data / "base", "--benchmark", "arithmetic=few.jsonl", "--samples", 4,
        "--verifier", data / "verifier" / "base", "--critiques", 2, "--out", "out",
    )  # fmt: skip
    assert code == 0, err
    row = json.loads((run.folder / "out" / "results.json").read_text())[str(data / "base")][
        "arithmetic"
    ]
    assert 0 <= row["weighted@4"]["mean"] <= 1 and "weighted@4" in out
    folders = sorted(
        path.name.rsplit("-", 1)[0] for path in (run.folder / "out" / "responses").iterdir()
    )
    assert folders == ["arithmetic", "arithmetic-verifier"]


def test_shipped_candidates_come_from_the_shipped_base():
    from topr.trajectories import read_trajectories

    for split, count in (("val", 200), ("test", 300)):
        rows = read_trajectories(ROOT / "data" / "arithmetic" / "verifier" / f"{split}.parquet")
        assert len(rows) == 4 * count
        for row in rows:
            grade = (
                Arithmetic().grade(row.response, row.gold)
                if row.finished
                else Grade(-1.0, False, None)
            )
            assert (row.reward, row.valid, row.answer) == grade
