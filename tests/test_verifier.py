"""Verifiers judge candidate solutions: problems from trajectories, verdicts, weights."""

import pytest
from conftest import ROOT, make_trajectories, write

from topr.io import InputError
from topr.policy import encode_prompt, load_tokenizer
from topr.tasks import GSM8K, Arithmetic, ArithmeticVerifier, Verifier
from topr.tasks.task import Grade, Problem
from topr.trajectories import read_trajectories

INVALID = Grade(-1.0, False, None)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6 * 5 is 30.\nVerdict: correct", Grade(1.0, True, "correct")),
        ("Verdict: correct? No. Verdict: incorrect", Grade(-1.0, True, "incorrect")),
        ("<think>Verdict: correct</think>Verdict: incorrect", Grade(-1.0, True, "incorrect")),
        ("**Verdict**: **Correct**.", Grade(1.0, True, "correct")),
        ("Verdict: correct or incorrect?", INVALID),
        ("Verdict: correct\nThank you.", Grade(1.0, True, "correct")),
        ("correct", INVALID),
    ],
)
def test_the_last_verdict_counts(text, expected):
    assert Verifier().grade(text, "correct") == expected


def test_problems_are_balanced_trajectories_always_the_same(tmp_path, policy):
    rows = make_trajectories(policy, count=23)
    path = write(tmp_path / "a.parquet", policy, rows)
    everything = Verifier().candidates(rows)
    assert [p.solution for p in everything] == [row.response for row in rows]
    assert [p.gold == "correct" for p in everything] == [row.reward > 0 for row in rows]
    problems = Verifier().problems(path)
    golds, rewards = [p.gold for p in problems], [row.reward for row in rows]
    rarer = min(rewards.count(1), rewards.count(-1))
    assert golds.count("correct") == golds.count("incorrect") == rarer
    assert problems == Verifier().problems(path)
    solutions = iter(row.response for row in rows)
    assert all(p.solution in solutions for p in problems)  # in the file's order
    assert len({p.id for p in problems}) == len(problems)
    for row in rows:
        row.reward = 1.0
    with pytest.raises(InputError, match="23 positives and 0 negatives are too few"):
        Verifier().problems(write(tmp_path / "b.parquet", policy, rows))


@pytest.mark.parametrize("template", [None, CHAT])
def test_the_question_stands_alone_in_the_prompt(policy, template):
    tokenizer = load_tokenizer(str(policy))
    tokenizer.chat_template = template
    problem = Problem("0", "How many eggs?", "5")
    asked, _ = encode_prompt(GSM8K().prompt(problem, tokenizer), tokenizer)
    verifier = Verifier(GSM8K())
    assert verifier.question(asked, tokenizer) == "How many eggs?"
    candidate = Problem("0", asked, "correct", "It is 5.<eos>Verdict: correct")
    text, _ = encode_prompt(verifier.prompt(candidate, tokenizer), tokenizer)
    assert text.count("How many eggs?\n\nSolution: It is 5.") == 1
    assert "The answer is" not in text.split("eggs?")[1]
    assert "<eos>" not in text  # a candidate cannot end its own message


def test_worked_examples_end_in_a_verdict(policy):
    prompt = Verifier().prompt(Problem("0", "Q", "correct", "S"), load_tokenizer(str(policy)))
    for example in prompt.split("\n\nQuestion: ")[1:-1]:
        assert Verifier().grade(example, "correct").valid


def test_the_embedded_verifier_judges_every_step():
    task = ArithmeticVerifier()
    problem = Problem("0", "9+3*2>", "1", "9+3=12;12*2=24;#24")
    assert task.prompt(problem, None) == "9+3*2>9+3=12;12*2=24;#24>"
    assert task.grade("11#1", "1") == Grade(1.0, True, "1")
    assert task.grade("10#0", "1") == Grade(-1.0, True, "0")
    for response in ("11", "11#1#1", "2#1"):
        assert task.grade(response, "1") == INVALID


def test_shipped_candidates_come_from_the_shipped_base():
    rows = read_trajectories(ROOT / "data" / "arithmetic" / "verifier" / "test.parquet")
    assert len(rows) == 4 * 300
    for row in rows:
        grade = Arithmetic().grade(row.response, row.gold) if row.finished else INVALID
        assert (row.reward, row.valid, row.answer) == grade
