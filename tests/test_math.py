r"""The MATH task: which answers count as equal, hostile answers, and the process that compares."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, SHARED

from topr.io import InputError
from topr.metrics import maj_at_k
from topr.tasks import MATH, Grade, judge
from topr.tasks.equivalence import MEMORY
from topr.tasks.math import EXAMPLES, INSTRUCTION, last_box, refused

MATH500 = SHARED / "math500.jsonl"
HANGS = r"\left((999!)^{999}\right)^{999}"  # a number of seven million digits in twenty characters


def grade(answer: str, gold: str) -> Grade:
    return MATH().grade(rf"So it is $\boxed{{{answer}}}$.", gold)


def pairs() -> list[tuple[str, str, bool]]:
    found = []
    for line in (ROOT / "tests" / "math_pairs.txt").read_text().splitlines()[1:]:
        rest, _, different = line.partition(" != ")
        gold, _, equal = rest.partition(" == ")
        found += [(gold, answer, True) for answer in equal.split(" ¦ ") if answer]
        found += [(gold, answer, False) for answer in different.split(" ¦ ") if answer]
    return found


@pytest.mark.parametrize(("gold", "answer", "equal"), pairs())
def test_equal_answers_and_no_others_are_right(gold, answer, equal):
    assert grade(answer, gold)[:2] == (1.0 if equal else -1.0, True)
    assert grade(answer, gold).valid is not None


def test_the_pairs_are_many_of_either_kind():
    equal = [pair[2] for pair in pairs()]
    assert len(equal) >= 300 and sum(equal) >= 150 and len(equal) - sum(equal) >= 120


@pytest.mark.skipif(not MATH500.exists(), reason=f"needs MATH-500 at {MATH500}")
def test_every_gold_of_math500_equals_itself_and_is_a_problem():
    problems = MATH().problems(MATH500)
    assert len(problems) == 500 and problems[0].id == json.loads(MATH500.read_text().splitlines()[0])["unique_id"]
    for problem in problems:
        same = grade(problem.gold, problem.gold)
        assert same.reward == 1 and not refused(same.answer), problem
    neighbours = [(a.gold, b.gold) for a, b in zip(problems, problems[1:], strict=False) if a.gold != b.gold]
    assert [pair for pair in neighbours if grade(*pair).reward == 1] == [("5", "x=5")]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{4} but in fact \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{5}", "5"),
        (r"\boxed{4}, \fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"the answer is $\boxed 5$.", "5"),
        (r"\boxed{4} or \boxed 12", "12"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{5 + \boxed{6}", "6"),
        (r"\boxed{\boxed{6}}", "6"),
        (r"\boxed{5}, to be put in \boxed{}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a } b}} }", r"\text{a } b"),
        (r"\boxed{5", None),
        (r"\boxedx{5} boxed{5} {5}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_complete_box_holds_the_answer(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize("text", ["The answer is 5.", "$5$", r"\boxed{}", r"\boxed{ }", r"\boxed{5</think>", ""])
def test_without_a_box_a_response_is_invalid(text):
    assert MATH().grade(text, "5") == Grade(-1.0, False, None)


def test_an_overlong_box_is_invalid():
    assert grade("0" * 400 + "5", "5") == Grade(-1.0, False, None)
    assert grade("0" * 399 + "5", "5").reward == 1


def test_thoughts_are_not_graded():
    assert MATH().grade(r"<think>\boxed{5}</think> It is 5.", "5") == Grade(-1.0, False, None)
    assert MATH().grade(r"<think>\boxed{4}</think> It is \boxed{5}.", "5") == Grade(1.0, True, "5")


def test_neighbouring_boxes_are_not_one_answer():
    assert MATH().grade(r"\boxed{1}, \boxed{2}", "1,2").reward == -1
    assert MATH().grade(r"\boxed{1}, \boxed{2}", "2").reward == 1


def test_answers_have_one_spelling():
    spellings = [r"\frac12", r"\dfrac{1}{2}", "1/2", r" \frac 1 2 ", r"$\frac{1}{2}$.", r"\tfrac12\text{ cm}"]
    assert {grade(spelling, "7").answer for spelling in spellings} == {r"\frac{1}{2}"}
    assert grade("10,080", "7").answer == grade(r"10\,080", "7").answer == "10080"


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9", "2**3", "a__b", "9^{9^{9^9}}", "9^{9^9}", "x^{x^{x^x}}", "9^{99999}",
        r"\left(9^{9}\right)^{123456}", "1000000!",
        "(9!)!", r"1000\%!", "9!!", r"\binom{1000000}{500000}", "{" * 150 + "5" + "}" * 150, "(" * 30 + "5" + ")" * 30,
        r"\sqrt{" * 40 + "5" + "}" * 40, "٥", "５", r"\frac{٥}{1}",
    ],
)  # fmt: skip
def test_costly_answers_are_wrong_without_being_computed(answer, monkeypatch):
    monkeypatch.setattr(judge, "same", lambda *_: pytest.fail("it was computed"))
    assert grade(answer, "5")[:2] == (-1.0, True)


@pytest.mark.parametrize("answer", ["2^{2^3}", "e^{x^2}", "100!", "2^{100}", r"\binom{20}{10}", "n!", "x^{n+1}"])
def test_ordinary_powers_and_factorials_are_computed(answer):
    assert not refused(answer)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**6, "{" * 5000 + "5" + "}" * 5000, r"\boxed{" * 50_000, r"\sqrt{" * 5000 + "5" + "}" * 5000,
        "5 " + "square " * 55 + "!", "5" + r"\text{a}" * 40 + "!", "5" + r"\text" * 70, r"\frac" * 79, " " * 390 + "!",
        "+".join(["1"] * 199), "(x+1)" * 79, r"\sum_{k=1}^{9999999} \sin k", r"\prod_{k=1}^{99999} (x+k)",
        "(x+y+z+w)^{9999}", HANGS, r"\int_0^1 e^{x^{x}} dx", r"\sqrt{" * 18 + "5" + "}" * 18, r"\binom{9999}{5000}",
        "1," * 199 + "1", r"\pm" * 130, r"\gamma(1000000)", r"\tan(10^{9999})", r"2^{9999}+\sqrt{2}", "a" * 400,
    ],
)  # fmt: skip
def test_hostile_answers_cost_little_time_and_memory(text):
    start = time.perf_counter()
    assert grade(text, "5").reward == -1
    assert time.perf_counter() - start < 10
    child = judge.judge.child
    if child is not None and Path(f"/proc/{child.pid}/limits").exists():
        limit = re.search(r"Max address space\s+(\d+)", Path(f"/proc/{child.pid}/limits").read_text())
        assert not judge.judge.ready or int(limit[1]) == MEMORY


def test_a_comparison_without_end_is_left_unjudged_and_the_next_is_judged(monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 1)
    judge._decided.cache_clear()
    unjudged = grade(HANGS, "6")
    assert (unjudged.reward, unjudged.valid) == (-1.0, None)
    assert grade("2+4", "6") == Grade(1.0, True, "6")


def test_a_killed_child_is_replaced():
    child = judge.Judge()
    assert child.same("6", "1+5") is True
    first = child.child.pid
    os.kill(first, signal.SIGKILL)
    assert child.same("6", "2+5") is False and child.child.pid != first
    # in the middle of a comparison: that one is tried once more
    threading.Timer(0.5, lambda pid: os.kill(pid, signal.SIGKILL), [child.child.pid]).start()
    assert child.same("6", HANGS) is None
    assert child.same("6", "3+3") is True
    child.stop()


def test_a_child_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="math-verify"):
        judge.Judge().same("6", "1+5")


def test_threads_get_their_own_answers():
    wrong = []

    def ask(offset: int):
        wrong.extend(n for n in range(40) if judge.judge.same(str(n), f"{n - offset}+{5}") is not (offset == 5))

    threads = [threading.Thread(target=ask, args=[offset]) for offset in (5, 6, 5, 7)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


def test_the_child_ends_with_its_parent_even_in_the_middle_of_a_comparison():
    program = (
        "import threading, time; from topr.tasks import judge; judge.judge.same('1', '2-1')\n"
        f"threading.Thread(target=judge.judge.same, args=['6', {HANGS!r}]).start()\n"
        "print(judge.judge.child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + judge.SECONDS + 6
    while time.monotonic() < deadline and _running(child):
        time.sleep(0.1)
    assert not _running(child)


def _running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_child_needs_no_folder_and_no_torch(tmp_path, monkeypatch):
    (tmp_path / "math.py").write_text("raise ImportError")
    (tmp_path / "json.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    child = judge.Judge()
    assert child.same("6", "1+5") is True
    assert "torch" not in Path(f"/proc/{child.child.pid}/maps").read_text()
    child.stop()


def test_a_thousand_ordinary_gradings_take_seconds():
    start = time.perf_counter()
    for n in range(2, 202):
        assert grade(rf"\frac{{{2 * n}}}{{2}}", str(n)).reward == 1
        assert grade(rf"{n}x + {n} + 1", f"{n}(x+1)").reward == -1
        assert grade(rf"\sqrt{{{n * n * 3}}}", rf"{n}\sqrt{{3}}").reward == 1
        assert grade(rf"(-{n}.0, {n}]", rf"\left(-{n},{n}\right]").reward == 1
        assert grade(rf"x = {n}\pi", rf"{n + 1}\pi").reward == -1
    assert time.perf_counter() - start < 60


def test_prompts_ask_for_a_box_and_examples_show_it():
    class Tokenizer:
        chat_template = None

    problem = MATH().problem({"problem": "What is $1+1$?", "answer": "2"}, 7)
    assert (problem.id, problem.gold) == ("7", "2")
    text = MATH().prompt(problem, Tokenizer)
    assert text.startswith(INSTRUCTION) and r"\boxed{}" in INSTRUCTION and text.endswith("$1+1$?\nAnswer:")
    assert text.count("Question:") == 5 and MATH.sampling.stop == ["\nQuestion:"]
    golds = [last_box(answer) for _, answer in EXAMPLES]
    assert golds == ["35", "[-3,4]", r"\frac{7}{36}", r"\frac{3\sqrt{10}}{5}"]
    Tokenizer.chat_template = "yes"
    assert MATH().prompt(problem, Tokenizer)[0]["content"] == "What is $1+1$?\n\n" + INSTRUCTION


def test_training_rows_have_their_gold_in_the_last_box(tmp_path):
    rows = [
        {"problem": "a", "solution": r"First $\boxed{3}$, no: $\boxed{\frac{1}{2}}$.", "level": "Level 1"},
        {"problem": "b", "answer": "4", "solution": r"\boxed{5}", "unique_id": "test/b"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = MATH().problems(tmp_path / "train.jsonl")
    assert [(p.id, p.gold) for p in problems] == [("0", r"\frac{1}{2}"), ("test/b", "4")]
    (tmp_path / "bad.jsonl").write_text(json.dumps({"problem": "a", "solution": "5"}))
    with pytest.raises(InputError, match="neither an answer nor a solution"):
        MATH().problems(tmp_path / "bad.jsonl")


def test_votes_are_for_values_not_for_spellings():
    grades = [MATH().grade(rf"\boxed{{{text}}}", r"\frac12") for text in ("0.5", r"\frac12", r"\frac{2}{4}", "3", "3")]
    assert maj_at_k([g.answer for g in grades], [g.reward > 0 for g in grades], 5) == 1
    grades = [MATH().grade(rf"\boxed{{5\text{{ {unit}}}}}", r"5\text{ cm}") for unit in ("cm", "m")]
    assert [g.reward for g in grades] == [1, -1] and grades[0].answer != grades[1].answer


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"90^\circ", r"\frac{\pi}{2}", True), (r"\frac{\pi}{6}", r"30^\circ", True),
        (r"\frac{\pi}{6}", r"31^\circ", False), ("6", "six", True), ("6", r"\text{seven}", False),
        (r"\text{(C)}", r"(C)\ 5", True), (r"\text{(C)}", r"(D)\ 5", False), ("5", "4 + 2 = 5", False),
        ("5", "2 + 3 = 5", True), (r"\text{no solution}", r"\text{No solutions}", True),
    ],
)  # fmt: skip
def test_further_pairs(gold, answer, equal):
    assert (MATH().grade(rf"\boxed{{{answer}}}", gold).reward > 0) == equal
