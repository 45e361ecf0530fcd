r"""The MATH task: which answers count as equal, costly answers, and the process that compares."""

import json
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SHARED, slow

from topr.evaluation.metrics import maj_at_k
from topr.io import InputError
from topr.tasks import MATH, Grade, math
from topr.tasks.math import child, last_box, normal_form, same
from topr.tasks.task import PROMPTS

MATH500 = SHARED / "math500.jsonl"
HANGS = r"\left((999!)^{999}\right)^{999}"  # a number of seven million digits in twenty characters
INVALID = Grade(-1.0, False, None)
needs_math500 = pytest.mark.skipif(not MATH500.exists(), reason=f"needs MATH-500 at {MATH500}")


def grade(answer: str, gold: str) -> Grade:
    return MATH().grade(rf"So it is $\boxed{{{answer}}}$.", gold)


def pairs() -> list[tuple[str, str, bool]]:
    found = []
    for line in (ROOT / "tests" / "math_pairs.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        rest, _, different = line.partition(" != ")
        gold, _, equal = rest.partition(" == ")
        found += [(gold, answer, True) for answer in equal.split(" ¦ ") if answer]
        found += [(gold, answer, False) for answer in different.split(" ¦ ") if answer]
    return found


def test_equal_answers_and_no_others_are_right():
    assert len(pairs()) > 440
    for gold, answer, equal in pairs():
        assert grade(answer, gold).reward == (1 if equal else -1), (gold, answer)


@needs_math500
def test_every_gold_of_math500_equals_itself_and_the_box_of_its_solution():
    problems = MATH().problems(MATH500)
    assert len(problems) == 500
    for problem, line in zip(problems, MATH500.read_text().splitlines(), strict=True):
        row = json.loads(line)
        assert problem.id == row["unique_id"]
        assert grade(problem.gold, problem.gold).reward == 1
        assert MATH().grade(row["solution"], problem.gold).reward == 1


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{4} but in fact \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{4}, \fbox{5}", "5"),
        (r"\boxed{4} or \boxed 12", "12"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{5 + \boxed{6}", "6"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a } b}} }", r"\text{a } b"),
        (r"\boxed{5}, so \boxed{" + "9" * 401 + "}", "5"),
        (r"\boxed{5", None),
        (r"\boxedx{5} boxed{5} {5}", None),
    ],
)
def test_the_last_complete_box_holds_the_answer(text, box):
    assert last_box(text) == box


def test_without_a_box_the_lenient_grade_is_of_the_last_number():
    grade = MATH().grade_leniently
    assert grade("5 and 5 make $1,025.00", "1025").reward == 1
    assert grade(r"\boxed{5}, not 6 or \boxed{7", "5").reward == 1
    assert grade(r"<think>\boxed{5}</think> 6", "6").reward == 1
    assert grade("None.", r"\text{None}") == INVALID


def test_several_answers_of_a_row_are_one_gold():
    assert MATH().gold([1, 2]) == MATH().gold(["1", "2"]) == "1, 2"


def test_neither_unboxed_answers_nor_thoughts_count():
    assert MATH().grade("The answer is 5.", "5") == INVALID
    assert MATH().grade(r"<think>\boxed{5}</think> 5", "5") == INVALID
    assert MATH().grade(r"<think>\boxed{4}</think> \boxed{5}", "5") == Grade(1.0, True, "5")


def test_answers_have_one_spelling_by_which_they_vote():
    half = [r"\dfrac{1}{2}", "1/2", r" \frac 1 2 ", r"$\frac{1}{2}$.", r"\tfrac12\text{ cm}"]
    assert {grade(spelling, "7").answer for spelling in half} == {r"\frac{1}{2}"}
    assert grade(r"\frac{\sqrt3}3", "7").answer == r"\frac{\sqrt{3}}{3}"
    assert grade(r"10\,080", "7").answer == grade("10,080", "7").answer == "10080"
    grades = [grade(text, r"\frac12") for text in ("0.5", r"\frac12", r"\frac{2}{4}", "3", "3")]
    answers = [found.answer for found in grades]
    assert maj_at_k(answers, [found.reward > 0 for found in grades], 5) == 1


@pytest.mark.parametrize("answer", ["9**9", "a__b", "9^{9^9}", "1000000!", slow("(9!)!"), "٥"])
def test_costly_and_odd_answers_are_wrong(monkeypatch, answer):
    monkeypatch.setattr(math, "SECONDS", 1)
    start = time.monotonic()
    assert grade(answer, "5").reward == -1
    assert time.monotonic() - start < 4


@pytest.mark.parametrize(
    "part", ["{", "}", "{5}", "square ", r"\text{a}", r"\frac", " ", "1,", "/ ", "abc^2 ", "and "]
)
def test_the_normal_form_of_a_long_answer_costs_little_time(part):
    answer = f"5 {part * 400}"[:400] + "!"
    start = time.perf_counter()
    normal_form(answer)
    last_box(rf"\boxed{{{part}" * 1000)
    assert time.perf_counter() - start < 1


@pytest.fixture
def own_child():
    """A child process of its own, and no known verdicts."""
    child.cache_clear()
    same.cache_clear()
    yield
    child.cache_clear()


@pytest.mark.slow
def test_a_comparison_without_end_is_left_ungraded_and_the_next_is_graded(own_child, monkeypatch):
    monkeypatch.setattr(math, "SECONDS", 1)
    assert grade("2+4", "6") == Grade(1.0, True, "6")
    unjudged = grade(HANGS, "6")
    assert (unjudged.reward, unjudged.valid) == (-1.0, None)
    assert grade("3+3", "6") == Grade(1.0, True, "6")


def test_a_child_that_was_killed_is_replaced_and_verdicts_are_remembered(own_child):
    assert same("6", "1+5")
    child().kill()
    assert same("6", "1+5")  # it was not asked again
    assert same("6", "2+4") is None  # its end is noticed
    assert same("6", "3+3")


def test_a_child_that_cannot_start_is_an_error(own_child, monkeypatch):
    monkeypatch.setattr(math, "COMMAND", ["false"])
    with pytest.raises(RuntimeError, match="math-verify"):
        same("6", "1+5")


ENDLESS = {
    "C": "deque(repeat(0), maxlen=0)",  # a loop in C, during which no Python handler can run
    "memory": "bytearray(1 << 30)",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDLESS)
def test_time_and_memory_are_bounded_whatever_the_child_does(own_child, monkeypatch, kind):
    program = (
        f"import sys; sys.path.append({str(ROOT / 'topr' / 'tasks')!r})\n"
        "import equivalence\nfrom collections import deque\nfrom itertools import repeat\n"
        f"equivalence.same = lambda gold, _: gold == '1' or {ENDLESS[kind]}\nequivalence.main()"
    )
    monkeypatch.setattr(math, "COMMAND", [sys.executable, "-P", "-c", program])
    monkeypatch.setattr(math, "SECONDS", 1)
    start = time.monotonic()
    assert same("6", "3+3") is None
    assert time.monotonic() - start < 4


def test_the_child_imports_neither_torch_nor_files_of_the_working_folder(run, own_child):
    for name in ("math", "json"):
        (run.folder / f"{name}.py").write_text("raise ImportError")
    assert same("6", "1+5")
    maps = Path(f"/proc/{child().pid}/maps")
    if maps.exists():  # not on macOS
        assert "torch" not in maps.read_text()


def test_worked_examples_show_a_box():
    golds = [last_box(example) for example in PROMPTS["math"]["examples"].split("Question: ")[1:]]
    assert golds == ["35", "[-3,4]", r"\frac{7}{36}", r"\frac{3\sqrt{10}}{5}"]


def test_training_rows_have_their_gold_in_the_last_box(tmp_path):
    path = tmp_path / "train.jsonl"
    solution = {"problem": "a", "solution": r"First $\boxed{3}$, no: $\boxed{\frac{1}{2}}$."}
    answer = {"problem": "b", "answer": "4", "solution": r"\boxed{5}", "unique_id": "test/b"}
    path.write_text(json.dumps(solution) + "\n" + json.dumps(answer))
    problems = MATH().problems(path)
    assert [(p.id, p.gold) for p in problems] == [("0", r"\frac{1}{2}"), ("test/b", "4")]
    path.write_text(json.dumps({"problem": "a", "solution": "A proof without a box. " * 20}))
    with pytest.raises(InputError, match="train.jsonl: math finds no answer to 0"):
        MATH().problems(path)
