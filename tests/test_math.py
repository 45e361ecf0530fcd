r"""The MATH task: which answers count as equal, costly answers, and the process that compares."""

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

from topr.evaluation.metrics import maj_at_k
from topr.io import InputError
from topr.tasks import MATH, Grade, math
from topr.tasks.equivalence import MEMORY
from topr.tasks.math import Judge, last_box, tables
from topr.tasks.task import PROMPTS

MATH500 = SHARED / "math500.jsonl"
HANGS = r"\left((999!)^{999}\right)^{999}"  # a number of seven million digits in twenty characters
needs_math500 = pytest.mark.skipif(not MATH500.exists(), reason=f"needs MATH-500 at {MATH500}")


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


def test_equal_answers_and_no_others_are_right():
    found = pairs()
    assert sum(equal for *_, equal in found) >= 310 and sum(not equal for *_, equal in found) >= 310
    wrong = [
        (gold, answer)
        for gold, answer, equal in found
        if grade(answer, gold).reward != (1 if equal else -1)
    ]
    assert wrong == []


@needs_math500
def test_every_gold_of_math500_equals_itself_and_the_box_of_its_solution():
    problems = MATH().problems(MATH500)
    rows = [json.loads(line) for line in MATH500.read_text().splitlines()]
    assert len(problems) == 500 and problems[0].id == rows[0]["unique_id"]
    for problem, row in zip(problems, rows, strict=True):
        same = grade(problem.gold, problem.gold)
        assert same.reward == 1 and not tables().costly.search(same.answer), problem
        assert MATH().grade(row["solution"], problem.gold).reward == 1, problem


@pytest.mark.slow
@needs_math500
def test_no_gold_of_math500_equals_the_next():
    golds = [problem.gold for problem in MATH().problems(MATH500)]
    neighbours = [pair for pair in zip(golds, golds[1:], strict=False) if pair[0] != pair[1]]
    assert [pair for pair in neighbours if grade(*pair).reward == 1] == [("5", "x=5")]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{4} but in fact \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
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
        ("", None),
    ],
)
def test_the_last_complete_box_holds_the_answer(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize("text", ["The answer is 5.", "$5$", r"\boxed{ }", r"\boxed{5</think>", ""])
def test_without_a_box_a_response_is_invalid(text):
    assert MATH().grade(text, "5") == Grade(-1.0, False, None)


def test_a_box_of_more_than_400_characters_is_invalid():
    assert grade("0" * 400 + "5", "5") == Grade(-1.0, False, None)
    assert grade("0" * 399 + "5", "5").reward == 1


def test_thoughts_are_not_graded():
    assert MATH().grade(r"<think>\boxed{5}</think> It is 5.", "5") == Grade(-1.0, False, None)
    assert MATH().grade(r"<think>\boxed{4}</think> It is \boxed{5}.", "5") == Grade(1.0, True, "5")


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"$\boxed{1}$ and $\boxed{2}$.", "1, 2"),
        (r"\(\boxed{1}\) \text{ and } \(\boxed 2\).", "1, 2"),
        (r"**$\boxed{(1,2)}$** and **$\boxed{(3,4)}$**", "(1,2), (3,4)"),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"),
        (r"\boxed{9}. Then $\boxed{1}$, $\boxed{2}$ and $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{1}, \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}. So \boxed{3}", "3"),
        (r"\boxed{1} and so \boxed{2}", "2"),
        (r"\boxed{1} + \boxed{2}", "2"),
        (r"\boxed{1}. and \boxed{2}", "2"),
        (r"and \boxed{2}", "2"),
    ],
)
def test_boxes_joined_by_and_are_a_list(text, box):
    assert last_box(text) == box


def test_a_list_in_several_boxes_has_to_be_the_gold():
    assert MATH().grade(r"$\boxed{1}$ and $\boxed{2}$", "2,1") == Grade(1.0, True, "2,1")
    assert MATH().grade(r"$\boxed{1}$ and $\boxed{3}$", "1,2").reward == -1
    assert MATH().grade(r"$\boxed{1}$ and $\boxed{2}$", "2").reward == -1
    assert MATH().grade(r"$\boxed{1}$ and $\boxed{2}$", "(1,2)").reward == -1


def test_neighbouring_boxes_are_not_one_answer():
    assert MATH().grade(r"\boxed{1}, \boxed{2}", "1,2").reward == -1
    assert MATH().grade(r"\boxed{1}, \boxed{2}", "2").reward == 1


def test_answers_have_one_spelling():
    spellings = [
        r"\frac12",
        r"\dfrac{1}{2}",
        "1/2",
        r" \frac 1 2 ",
        r"$\frac{1}{2}$.",
        r"\tfrac12\text{ cm}",
    ]
    assert {grade(spelling, "7").answer for spelling in spellings} == {r"\frac{1}{2}"}
    assert grade("10,080", "7").answer == grade(r"10\,080", "7").answer == "10080"
    nested = [r"\frac{\sqrt3}3", r"\dfrac{\sqrt{3}}{3}", r"\frac { \sqrt 3 } 3"]
    assert {grade(spelling, "7").answer for spelling in nested} == {r"\frac{\sqrt{3}}{3}"}


@pytest.mark.parametrize(
    "answer",
    [
        "9**9",
        "a__b",
        "9^{9^9}",
        "x^{x^{x^x}}",
        "9^{99999}",
        "1000000!",
        "(9!)!",
        r"\binom{1000000}{500000}",
        "٥",
    ],
)
def test_costly_answers_are_wrong_without_being_computed(answer, monkeypatch):
    monkeypatch.setattr(Judge, "same", lambda *_: pytest.fail("it was computed"))
    assert grade(answer, "5")[:2] == (-1.0, True)


@pytest.mark.parametrize(
    "answer", ["2^{2^3}", "e^{x^2}", "100!", "2^{100}", r"\binom{20}{10}", "n!", "x^{n+1}"]
)
def test_ordinary_powers_and_factorials_are_computed(answer):
    assert not tables().costly.search(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "{" * 5000 + "5" + "}" * 5000, "{" * 150 + "6" + "}" * 150, "5 " + "square " * 55 + "!",
        "5" + r"\text{a}" * 40 + "!", r"\frac" * 79, " " * 390 + "!", "1," * 199 + "1", r"\pm" * 130, "a" * 400,
    ],
)  # fmt: skip
def test_long_answers_cost_little_time(text):
    start = time.perf_counter()
    assert grade(text, "5").reward == -1
    assert time.perf_counter() - start < 5


@pytest.fixture
def judge():
    found = Judge()
    yield found
    if found.child:
        found.child.kill()


@pytest.mark.slow
def test_a_comparison_without_end_is_left_ungraded_and_the_next_is_graded(judge, monkeypatch):
    monkeypatch.setattr(math, "judge", judge)
    assert grade("2+4", "6") == Grade(1.0, True, "6")
    first = judge.child.pid
    monkeypatch.setattr(math, "SECONDS", 1)
    unjudged = grade(HANGS, "6")
    assert (unjudged.reward, unjudged.valid) == (-1.0, None)
    assert grade("3+3", "6") == Grade(1.0, True, "6")
    assert judge.child.pid != first


@pytest.mark.slow
def test_a_failure_is_not_remembered_and_a_verdict_is(judge, monkeypatch):
    monkeypatch.setattr(math, "SECONDS", 1)
    with pytest.raises(TimeoutError):
        judge.same("6", HANGS)
    with pytest.raises(TimeoutError):
        judge.same("6", HANGS)
    assert judge.same("6", "1+5")
    judge.child.kill()
    judge.child.wait()
    assert judge.same("6", "1+5") and judge.child.poll() is not None  # it was not asked again


def test_a_child_that_was_killed_is_replaced(judge):
    assert judge.same("6", "1+5")
    first = judge.child.pid
    os.kill(first, signal.SIGKILL)
    judge.child.wait()
    assert not judge.same("6", "2+5") and judge.child.pid != first


@pytest.mark.parametrize("waits", [False, True])
def test_a_child_that_cannot_start_is_an_error(judge, monkeypatch, waits):
    def start(command, **options):
        child = subprocess.Popen(["false"], **options)
        if waits:  # nobody reads what is written to it
            child.wait()
        return child

    monkeypatch.setattr(math, "Popen", start)
    with pytest.raises(RuntimeError, match="math-verify"):
        judge.same("6", "1+5")


@pytest.mark.parametrize("waits", [False, True])
def test_a_child_that_is_killed_at_its_start_leaves_answers_ungraded(judge, monkeypatch, waits):
    def start(command, **options):
        child = subprocess.Popen(["sleep", "60"], **options)
        child.kill()
        if waits:
            child.wait()
        return child

    monkeypatch.setattr(math, "judge", judge)
    monkeypatch.setattr(math, "Popen", start)
    assert grade("3+3", "6") == Grade(-1.0, None, "3+3")
    monkeypatch.undo()
    assert judge.same("6", "3+3")


ENDLESS = {
    "C": "deque(repeat(0), maxlen=0)",  # a loop in C, during which no handler that is written in Python can run
    "big integers": "9 ** 9 ** 9 ** 9",
    "Python": "any(n < 0 for n in count())",
    "memory": "bytearray(1 << 30)",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDLESS)
def test_time_and_memory_are_bounded_whatever_the_child_does(judge, monkeypatch, kind):
    assert (math.SECONDS, MEMORY) == (4, 2**30)
    program = (
        f"import sys; sys.path.append({str(ROOT / 'topr' / 'tasks')!r})\n"
        "import equivalence\nfrom collections import deque\nfrom itertools import count, repeat\n"
        "equivalence._same_formula = lambda *_: None\n"
        f"equivalence.same = lambda *_: {ENDLESS[kind]}\nequivalence.main()"
    )
    ignores = [
        "sh",
        "-c",
        "trap '' ALRM; exec \"$@\"",
        "sh",
    ]  # a child inherits which signals its parent ignores
    monkeypatch.setattr(math, "COMMAND", [*ignores, sys.executable, "-P", "-c", program])
    monkeypatch.setattr(math, "SECONDS", 1)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        judge.same("6", "3+3")
    assert time.monotonic() - start < 4
    assert judge.child.poll() == (None if kind == "memory" else -signal.SIGALRM)


def test_threads_get_their_own_answers(judge):
    wrong = []

    def ask(offset: int):
        wrong.extend(
            n for n in range(20) if judge.same(str(n), f"{n - offset}+{5}") is not (offset == 5)
        )

    threads = [threading.Thread(target=ask, args=[offset]) for offset in (5, 6, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_child_imports_neither_torch_nor_the_folder_s_files_and_has_a_bound_on_memory(
    judge, tmp_path, monkeypatch
):
    (tmp_path / "math.py").write_text("raise ImportError")
    (tmp_path / "json.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    assert judge.same("6", "1+5")
    process = Path(f"/proc/{judge.child.pid}")
    if process.exists():
        assert "torch" not in (process / "maps").read_text()
        assert (
            int(re.search(r"Max address space\s+(\d+)", (process / "limits").read_text())[1])
            == MEMORY
            == 2**30
        )


@pytest.mark.slow
def test_the_child_ends_with_its_parent_even_in_the_middle_of_a_comparison():
    program = (
        "import threading, time; from topr.tasks.math import judge; judge.same('1', '2-1')\n"
        f"threading.Thread(target=judge.same, args=['6', {HANGS!r}]).start()\n"
        "print(judge.child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + math.SECONDS + 6
    while time.monotonic() < deadline and _running(child):
        time.sleep(0.1)
    assert not _running(child)


def _running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
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
    instruction = r"Solve the problem step by step, then give the final answer in \boxed{}."
    text = MATH().prompt(problem, Tokenizer)
    assert text.startswith(instruction + "\n\nQuestion: ") and text.endswith("$1+1$?\nAnswer:")
    assert text.count("Question:") == 5 and MATH.sampling.stop == ["\nQuestion:"]
    golds = [last_box(example["answer"]) for example in PROMPTS["math"]["examples"]]
    assert golds == ["35", "[-3,4]", r"\frac{7}{36}", r"\frac{3\sqrt{10}}{5}"]
    Tokenizer.chat_template = "yes"
    assert MATH().prompt(problem, Tokenizer)[0]["content"] == "What is $1+1$?\n\n" + instruction


def test_training_rows_have_their_gold_in_the_last_box(tmp_path):
    rows = [
        {
            "problem": "a",
            "solution": r"First $\boxed{3}$, no: $\boxed{\frac{1}{2}}$.",
            "level": "Level 1",
        },
        {"problem": "b", "answer": "4", "solution": r"\boxed{5}", "unique_id": "test/b"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = MATH().problems(tmp_path / "train.jsonl")
    assert [(p.id, p.gold) for p in problems] == [("0", r"\frac{1}{2}"), ("test/b", "4")]
    (tmp_path / "bad.jsonl").write_text(json.dumps({"problem": "a", "solution": "5"}))
    with pytest.raises(
        InputError, match=r"bad.jsonl: MATH: row 0 has neither an answer nor a solution"
    ):
        MATH().problems(tmp_path / "bad.jsonl")


def test_votes_are_for_values_not_for_spellings():
    grades = [
        MATH().grade(rf"\boxed{{{text}}}", r"\frac12")
        for text in ("0.5", r"\frac12", r"\frac{2}{4}", "3", "3")
    ]
    assert maj_at_k([g.answer for g in grades], [g.reward > 0 for g in grades], 5) == 1
    grades = [MATH().grade(rf"\boxed{{5\text{{ {unit}}}}}", r"5\text{ cm}") for unit in ("cm", "m")]
    assert [g.reward for g in grades] == [1, -1] and grades[0].answer != grades[1].answer
