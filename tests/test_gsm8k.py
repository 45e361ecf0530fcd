"""GSM8K answers are read as a careful person reads them, and agree with real models' known correctness."""

import json
import time

import pytest
from conftest import ROOT, SHARED

from topr.evaluation.metrics import maj_at_k
from topr.io import InputError
from topr.policy import encode_prompt, load_tokenizer
from topr.tasks import GSM8K
from topr.tasks.gsm8k import read_number
from topr.tasks.task import Grade

PLAIN = [
    "18", " 18", "18.", "$18", "$ 18", "$18.00", "18.0.", "**18**", "**18**.", "***18***", "*18*", "**$18**.", ": 18",
    ":\n\n18", "\n18", "18 dollars", "18 dollars per day.", "18km", "18%", r"18\%", '"18"', "'18'", "“18”", "`18`",
    "__18__", r"\boxed{18}", r"$\boxed{18}$", r"\$18", r"\(18\)", "$18$", "about 18", "approximately $18 a year", "€18",
    "x = 18", "9 + 9 = 18", "$9 * 2 = $18", "18, since 9 + 9 = 18", "18 = 18", "018", "18, because 3 of 5 left",
    "20% of 90 = 18", "3 times 6 = 18", "9 plus 9 = 18", "36 divided by 2 = 18", "6 groups of 3 = 18",
    "18 (9 + 9 = 18)",
    "$6 per hour x 3 hours = $18", "18 dollars, since 3 + 15 = 18 and 2 = 2", "18 because 20 - 2 = 18", "18 = 36/2",
    "18!", "18;", "(18)", "18\n\nQuestion: what is 5?", "18. The rest is 5", "USD 18", "18-day", "18/day",
]  # fmt: skip
OTHER = {
    "-5": "-5", "$-5": "-5", "-$5": "-5", "−5": "-5", "-0": "0", "0": "0", "+5": "5", "1,234": "1234",
    "1,234.50": "1234.5", "1,234,567.": "1234567", "**$1,200**": "1200", ".5": "0.5", "0.50": "0.5", "1800": "1800",
    "18.5": "18.5", "18.0001": "18.0001", "118": "118", "1000000000000000000001": "1000000000000000000001",
}  # fmt: skip
UNREADABLE = [
    "", " ", "unknown", "eighteen", "unclear. I counted 18", "unclear\n18", "１８", "٣", "1٣", "18 or 20", "18 and 20",
    "18-20", "18 / 20", "3/4", "10:30", "5*3", "5 * 3", "5**3", "2^{3}", r"\frac{1}{2}", "1,23", "1,000,00", "1.234,5",
    "1e3", "x2", "10+John's age", "18½", "18\nThe answer is", "18. The answer is unclear",
]  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_eighteen_however_it_is_written(text):
    assert GSM8K().grade(f"9 + 9 = 18. The answer is {text}", "18") == Grade(1.0, True, "18")


@pytest.mark.parametrize("text", OTHER)
def test_another_number_is_valid_and_wrong(text):
    assert GSM8K().grade(f"The answer is {text}", "18") == Grade(-1.0, True, OTHER[text])
    assert GSM8K().grade(f"The answer is {text}", OTHER[text]).reward == 1


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_single_number_is_invalid(text):
    assert GSM8K().grade(f"The answer is {text}", "18") == Grade(-1.0, False, None)


def test_the_last_marker_counts_case_and_thoughts_matter():
    grade = GSM8K().grade
    assert grade("The answer is 5. No: The answer is 18.", "18").reward == 1
    assert grade("The answer is 18. No: The answer is 5.", "18").reward == -1
    assert grade("the answer is 18", "18") == Grade(-1.0, False, None)
    assert grade("18", "18") == Grade(-1.0, False, None)
    assert grade("<think>The answer is 18</think> Twenty.", "18") == Grade(-1.0, False, None)
    assert grade("<think>The answer is 5</think> The answer is 18", "18").reward == 1
    assert GSM8K(marker="A:").grade("A: 18", "18").reward == 1


@pytest.mark.parametrize("hostile", ["9" * 10**6, "1," * 10**6, " " * 10**6, "(" * 10**6, "The answer is " * 10**5])
def test_hostile_answers_cost_nothing(hostile):
    start = time.perf_counter()
    assert GSM8K().grade(f"{hostile} The answer is {hostile}", "18").reward == -1
    assert time.perf_counter() - start < 1


def test_prompts_are_chat_messages_or_worked_examples(policy):
    tokenizer, task = load_tokenizer(str(policy)), GSM8K()
    problem = task.problem({"question": "How many?", "answer": "9 <<9+9=18>> 18\n#### 1,018"}, 7)
    assert (problem.id, problem.prompt, problem.gold) == ("7", "How many?", "1018")
    text = task.prompt(problem, tokenizer)
    assert text.endswith("\n\nQuestion: How many?\nAnswer:") and text.count(task.sampling.stop[0]) == 5
    for example in text.split("\n\n")[1:-1]:
        question, answer = example.removeprefix("Question: ").split("\nAnswer: ")
        assert task.grade(answer, answer.split()[-1].rstrip(".")).reward == 1
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    rendered, ids = encode_prompt(task.prompt(problem, tokenizer), tokenizer)
    assert rendered.startswith("<user>How many?\n\n") and '"The answer is"' in rendered
    assert rendered.endswith("<assistant>") and ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_a_row_without_a_gold_is_rejected(tmp_path):
    with pytest.raises(InputError, match="row 3 holds no number"):
        GSM8K().problem({"question": "?", "answer": "18"}, 3)


@pytest.mark.skipif(not SHARED.exists(), reason=f"needs the benchmark files under {SHARED.relative_to(ROOT.parent)}")
def test_real_questions_and_real_models_solutions():
    for split, count in (("train", 7473), ("test", 1319)):
        problems = GSM8K().problems(SHARED / f"gsm8k_{split}.jsonl")
        rows = [json.loads(line) for line in (SHARED / f"gsm8k_{split}.jsonl").read_text().splitlines()]
        assert len(problems) == count
        assert [p.gold for p in problems] == [row["answer"].split("#### ")[1].replace(",", "") for row in rows]
    task, right, votes = GSM8K(marker="A:"), [], []
    for line in (SHARED / "gsm8k_example_model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        gold = read_number(row["ground_truth"].rpartition("A:")[2])
        solutions = [value for value in row.values() if isinstance(value, dict)]
        grades = [task.grade(solution["solution"], gold) for solution in solutions]
        assert [grade.reward > 0 for grade in grades] == [solution["is_correct"] for solution in solutions]
        right.append([grade.reward > 0 for grade in grades])
        votes.append(maj_at_k([grade.answer for grade in grades], right[-1], 4))
    assert [round(100 * sum(column) / 1319, 2) for column in zip(*right, strict=True)] == [21.68, 39.04, 34.72, 56.25]
    # 14 of the 5,276 have no readable number, which does not vote; counting "7/14" as 7, say, moves the fourth digit
    assert sum(votes) / 1319 == pytest.approx(0.4818, abs=1e-4)
