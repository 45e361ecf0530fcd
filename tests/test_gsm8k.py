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
    "18!", "18;", "(18)", "18\n\nQuestion: what is 5?", "18. The rest is 5", "USD 18", "18-day", "18/day", "18 cm^2",
    "18, which is 50% more", "18, leaving 2", "18 = 20 - 2", "9 + 9 equals 18", "the total for 3 days is 18",
    "9 + 9, which makes 18", "18 cats and dogs", "18 deviled egg halves", "18 students do not play", "18 (20 - 2)",
    "18 miles in 3 hours", "$18 for 9 cups", "18 downloads in the three months", "½ of 36 = 18", "half of 36 = 18",
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


CONTRASTS = [  # a text, its number, and a similar text that gives another number or, None, is invalid
    ("320 + (2 * 60) = 440", "440", "320 + (2 * 60)", None),
    ("$192 x 12 = \n$2,304", "2304", "$192 x 12\n$2,304", None),
    ("90 + 80 + 150, which equals 320", "320", "90 + 80 + 150", None), ("5 * (3 + 1) = 20", "20", "5 x (3 + 1)", None),
    ("7 + 1 =\n\n8", "8", "7 +\n\n8", None), ("20% of (50 + 30) = 16", "16", "20% of (50 + 30)", None),
    ("x = 5", "5", "x = 5, y = 8", None), ("Ann is 5", "5", "Ann is 5, and Tom is 8", None),
    ("$$\nx = 80\n$$", "80", "$$\nx\n$$\n80", None), ("\n\\[\n\\boxed{80}\n\\]", "80", "\n\\[\nx\n\\]\n80", None),
    ("$$\n\\begin{aligned}\nx &= 5 + 3 \\\\\n&= 8\n\\end{aligned}\n$$", "8", "$$\nx &= 5 + 3\n$$", None),
    ("10 thousand", "10000", "10 thousandths", None), ("5 million", "5000000", "5 million 2", None),
    ("10k", "10000", "10 km", "10"), ("$1.5 Million", "1500000", "1.5 million and a half", None),
    ("5 M", "5000000", "5 M&Ms", "5"), ("5 m", "5", "5m 3", None), ("3 dozen", "36", "3 dozens", "3"),
    ("-2 hundred", "-200", "2 hundred 5", None), ("2.5 billion", "2500000000", "2.5 bins", "2.5"),
    ("negative 5", "-5", "5 negative ones", "5"), ("minus $5", "-5", "5 minus one", None),
    ("5 zeros", "5", "5 below zero", None), ("10", "10", "10 to 12", None), ("18", "18", "18–20", None),
    ("18 – that is all", "18", "18 – 20", None), ("18 and that is all", "18", "18 and a half", None),
    ("18 ft", "18", "18 ft and a half", None), ("3", "3", "3 and two thirds", None),
    ("4 hours (240 minutes)", "4", "4 hours and 30 minutes", None),
    ("4 hours", "4", "4 hours and thirty minutes", None), ("30 minutes", "30", "an hour and 30 minutes", None),
    ("4 hours", "4", "4 hours, 30 minutes", None), ("6", "6", "6'2", None), ("10, not 12", "10", "not 10", None),
    ("18 students do not play", "18", "isn't 18", None), ("10 more", "10", "more than 10", None),
    ("18 as well", "18", "18 or so", None), ("18 for Ann", "18", "18 for Ann and 20 for Tom", None),
    ("5", "5", "1 in 5", None), ("18 times", "18", "18 times two", None), ("18 square feet", "18", "18 squared", None),
    ("18", "18", "a third of 18", None), ("\\approx 10", "10", "10 \\pm 2", None), ("≈ 10", "10", "≥ 10", None),
    ("10 \\times 2 = 20", "20", "10 \\times 2", None), ("Rs. 80", "80", "No. I count 80", None),
    ("rs.1,000", "1000", "Rs. 80 or Rs. 90", None), ("₹80", "80", "¥80 - ¥90", None),
    ("approx. 80", "80", "unclear. 80", None), ("US$80", "80", "US$80 to US$90", None),
    ("\\textbf{8}", "8", "\\textbf{8}9 8", None),
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


@pytest.mark.parametrize(("text", "number", "other_text", "other"), CONTRASTS)
def test_similar_texts_are_told_apart(text, number, other_text, other):
    assert GSM8K().grade(f"The answer is {text}", number) == Grade(1.0, True, number)
    assert GSM8K().grade(f"The answer is {other_text}", number) == Grade(
        -1.0, other is not None, other
    )


def test_the_last_marker_counts_case_and_thoughts_matter():
    grade = GSM8K().grade
    assert grade("The answer is 5. No: The answer is 18.", "18").reward == 1
    assert grade("The answer is 18. No: The answer is 5.", "18").reward == -1
    assert grade("the answer is 18", "18") == Grade(-1.0, False, None)
    assert grade("18", "18") == Grade(-1.0, False, None)
    assert grade("<think>The answer is 18</think> Twenty.", "18") == Grade(-1.0, False, None)
    assert grade("<think>The answer is 5</think> The answer is 18", "18").reward == 1
    assert GSM8K(marker="A:").grade("A: 18", "18").reward == 1


@pytest.mark.parametrize(
    "hostile", ["9" * 10**6, "1," * 10**6, " " * 10**6, "(" * 10**6, "The answer is " * 10**5]
)
def test_hostile_answers_cost_nothing(hostile):
    start = time.perf_counter()
    assert GSM8K().grade(f"{hostile} The answer is {hostile}", "18").reward == -1
    assert time.perf_counter() - start < 1


def test_prompts_are_chat_messages_or_worked_examples(policy):
    tokenizer, task = load_tokenizer(str(policy)), GSM8K()
    problem = task.problem({"question": "How many?", "answer": "9 <<9+9=18>> 18\n#### 1,018"}, 7)
    assert (problem.id, problem.prompt, problem.gold) == ("7", "How many?", "1018")
    text = task.prompt(problem, tokenizer)
    assert (
        text.endswith("\n\nQuestion: How many?\nAnswer:") and text.count(task.sampling.stop[0]) == 5
    )
    for example in text.split("\n\n")[1:-1]:
        question, answer = example.removeprefix("Question: ").split("\nAnswer: ")
        assert task.grade(answer, answer.split()[-1].rstrip(".")).reward == 1
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    rendered, ids = encode_prompt(task.prompt(problem, tokenizer), tokenizer)
    assert rendered.startswith("<user>How many?\n\n") and '"The answer is"' in rendered
    assert (
        rendered.endswith("<assistant>")
        and ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    )


def test_a_row_without_a_gold_is_rejected(tmp_path):
    with pytest.raises(InputError, match="row 3 holds no number"):
        GSM8K().problem({"question": "?", "answer": "18"}, 3)


@pytest.mark.skipif(
    not SHARED.exists(), reason=f"needs the benchmark files under {SHARED.relative_to(ROOT.parent)}"
)
def test_real_questions_and_real_models_solutions():
    for split, count in (("train", 7473), ("test", 1319)):
        problems = GSM8K().problems(SHARED / f"gsm8k_{split}.jsonl")
        rows = [
            json.loads(line) for line in (SHARED / f"gsm8k_{split}.jsonl").read_text().splitlines()
        ]
        assert len(problems) == count
        assert [p.gold for p in problems] == [
            row["answer"].split("#### ")[1].replace(",", "") for row in rows
        ]
    task, right, votes = GSM8K(marker="A:"), [], []
    for line in (SHARED / "gsm8k_example_model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        gold = read_number(row["ground_truth"].rpartition("A:")[2])
        solutions = [value for value in row.values() if isinstance(value, dict)]
        grades = [task.grade(solution["solution"], gold) for solution in solutions]
        assert [grade.reward > 0 for grade in grades] == [
            solution["is_correct"] for solution in solutions
        ]
        right.append([grade.reward > 0 for grade in grades])
        votes.append(maj_at_k([grade.answer for grade in grades], right[-1], 4))
    assert [round(100 * sum(column) / 1319, 2) for column in zip(*right, strict=True)] == [
        21.68,
        39.04,
        34.72,
        56.25,
    ]
    # 14 of the 5,276 have no readable number, which does not vote; counting "7/14" as 7, say, moves the fourth digit
    assert sum(votes) / 1319 == pytest.approx(0.4818, abs=1e-4)
