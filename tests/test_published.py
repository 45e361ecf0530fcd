"""Benchmarks in the shape in which they are published: columns, golds, right and wrong answers."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from topr.evaluation.benchmarks import BENCHMARKS, find_benchmark
from topr.io import InputError
from topr.tasks import GSM8K, MATH

# of each benchmark two rows, their golds, and right and wrong answers to the second
PUBLISHED = {
    "svamp": (
        [
            {"ID": "chal-777", "Body": "290 bananas in 2 groups", "Question": "How big is each?",
             "Equation": "( 290.0 / 2.0 )", "Answer": "145", "Type": "Common-Division"},
            {"ID": "chal-508", "Body": "Two pots weigh 30 pounds.", "Question": "What do 4 weigh?",
             "Equation": "( 30.0 * 2.0 )", "Answer": "60.0", "Type": "Multiplication"},
        ],
        ["145", "60"], ["The answer is 60 pounds."], ["The answer is 6."],
    ),
    "multiarith": (
        [
            {"question": "Of 64 pupils, 36 lack pens. How many have one?", "final_ans": "28"},
            {"question": "How many cards are 3 boxes of 8?", "final_ans": "24"},
        ],
        ["28", "24"], ["3 * 8 = 24. The answer is 24."], ["24"],
    ),
    "asdiv": (
        [
            {"body": "Seven red apples and two green apples are in the basket.",
             "question": "How many apples are in the basket?",
             "answer": "9 (apples)", "formula": "7+2=9", "solution_type": "Addition"},
            {"body": "Ann has 1,000 cents.", "question": "How many dollars is that?",
             "answer": "10  (dollars)", "formula": "1000/100=10", "solution_type": "Unit Trans"},
            {"body": "It takes twice as long to paint.", "question": "How long do both take?",
             "answer": "3 (hours); 6 (hours)", "formula": "6/2=3", "solution_type": "Algebra-2"},
            {"body": "Sue has 5 pens, Tim has 6.", "question": "Who has more?",
             "answer": "Tim", "formula": "6>5", "solution_type": "Comparison"},
        ],
        ["9", "10"], ["The answer is $10."], ["The answer is 1,000."],
    ),
    "aime24": (
        [
            {"id": 60, "problem": "Aya walks. Find the minutes.", "solution": r"It is $\boxed{2}$.",
             "answer": "204", "url": "https://aops", "year": "2024"},
            {"id": 67, "problem": r"Real $x$ and $y$ exist. Find $xy$.", "solution": "$xy = 25$",
             "answer": "025", "url": "https://aops", "year": "2024"},
        ],
        ["204", "025"], [r"\boxed{25}", r"\boxed{025}"], [r"\boxed{250}", "25"],
    ),
    "aime25": (
        [
            {"problem": "Find the sum of all integer bases $b>9$.", "answer": "70", "id": "0"},
            {"problem": "Find the area of the heptagon.", "answer": "588", "id": "1"},
        ],
        ["70", "588"], [r"<think>\boxed{1}</think> \boxed{588}"], [r"\boxed{58}"],
    ),
    "amc23": (
        [
            {"id": 0, "question": "Where do they meet?", "answer": 27.0, "url": "https://aops"},
            {"id": 1, "question": "What is $x+y$?", "answer": 36.0, "url": "https://aops"},
        ],
        ["27.0", "36.0"], [r"\boxed{36}"], [r"\boxed{3.6}"],
    ),
    "minerva": (
        [
            {"question": "Find the diameter of the image in cm.", "answer": "1.6"},
            {"question": "Compute the luminosity in ergs per second.", "answer": "4.5e33"},
        ],
        ["1.6", "4.5e33"], [r"\boxed{4.5 \times 10^{33}}", r"\boxed{4.5e+33 \text{ ergs/s}}"],
        [r"\boxed{4.5 \times 10^{32}}", r"\boxed{4.5}"],
    ),
    "olympiadbench": (
        [
            {"id": 1606, "question": "How many moves does Sergey need?", "solution": ["Two."],
             "final_answer": ["2"], "is_multiple_answer": False, "unit": None},
            {"id": 1664, "question": "Find all positive integers $n$.", "solution": ["We count."],
             "final_answer": ["$69$,$84$"], "is_multiple_answer": True, "unit": None},
        ],
        ["2", "$69$,$84$"], [r"\boxed{84, 69}", r"\boxed{69 \text{ and } 84}"], [r"\boxed{69}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_benchmark_is_read_in_its_published_shape(name, tmp_path):
    rows, golds, right, wrong = PUBLISHED[name]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    task, source = find_benchmark(name, str(path))
    problems = task.problems(source)
    assert [problem.gold for problem in problems] == golds
    last = problems[-1]
    row = rows[1]
    texts = [row.get(key) for key in ("Body", "body", "Question", "question", "problem")]
    assert last.prompt == " ".join(filter(None, texts))
    assert last.id == str(row.get("id", 1))
    assert [task.grade(response, last.gold).reward for response in right] == [1.0] * len(right)
    assert [task.grade(response, last.gold).reward for response in wrong] == [-1.0] * len(wrong)


def test_competitions_are_sampled_as_papers_on_reasoning_do():
    for name in ("aime24", "aime25", "amc23", "minerva", "olympiadbench"):
        sampling = BENCHMARKS[name][0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.6, 0.95, 32768)
        assert sampling.stop == MATH.sampling.stop
    assert BENCHMARKS["math500"][0].sampling.max_new_tokens == 512


def test_a_problem_without_one_number_as_answer_is_refused_unless_it_is_left_out(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "a", "answer": "3:4"}\n{"question": "b", "answer": 5}')
    with pytest.raises(InputError, match="gsm8k finds no answer to 0"):
        GSM8K().problems(path)
    (problem,) = GSM8K(skip_unanswered=True).problems(path)
    assert (problem.id, problem.prompt, problem.gold) == ("1", "b", "5")
