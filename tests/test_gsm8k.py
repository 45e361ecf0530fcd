"""GSM8K: the last number of the first sentence after the last marker, on made-up and real text."""

import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import ROOT, SHARED
from jinja2 import Template

from topr.policy import load_tokenizer
from topr.tasks import GSM8K
from topr.tasks.gsm8k import last_number
from topr.tasks.task import Grade, Problem

INVALID = Grade(-1.0, False, None)
READ = {  # what follows the marker, and the number that is read
    "18": "18", "18.": "18", "$18": "18",
    "**18.** The rest is 5": "18", ":\n\n18": "18", "\\boxed{18}": "18",
    "18 dollars. The rest is 5": "18", "5, no, 18\n5": "18",
    "-5": "-5", "-$5": "-5", "−5": "-5", "-0": "0", "18-20": "20",
    "1,234,567.50": "1234567.5", ".5": "0.5", "18.0001": "18.0001",
    "": None, "eighteen": None, "unclear. I counted 18": None, "１８": None,
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_the_last_number_of_the_sentence_after_the_marker_is_the_answer(text):
    number = READ[text]
    reward = 1.0 if number == "18" else -1.0
    grade = GSM8K().grade(f"7 + 7 = 14. The answer is {text}", "18")
    assert grade == Grade(reward, number is not None, number)


def test_the_harness_asks_and_grades_alike():
    """lm-evaluation-harness by our task file: filters are expressions of which one match counts."""
    file = yaml.safe_load((ROOT / "data/word_problems/lm_eval/svamp.yaml").read_text())
    row = {"question": "How many?", "answer": "#### 18"}
    prompt = GSM8K().prompt(Problem("", "How many?", "18"), SimpleNamespace(chat_template=""))
    assert Template(file["doc_to_text"]).render(row) == prompt[0]["content"]
    assert Template(file["doc_to_target"]).render(row) == "18"
    assert file["generation_kwargs"]["until"] == GSM8K.sampling.stop
    texts = [f"7 + 7 = 14. The answer is {text}" for text in READ]
    texts += ["The answer is 5. The answer is 18.", "the answer is 5. 18.00", "18", "", "18 $1,8"]
    texts += [
        "The answer is -$1,018.00.",
        "<think>The answer is 18</think> Five.",
        "<think>5</think> The answer is 18",
    ]
    strict, lenient = file["filter_list"]
    for text in texts:
        for filters, grade in ((strict, GSM8K().grade), (lenient, GSM8K().grade_leniently)):
            read = text
            for step in filters["filter"][:-1]:
                found = re.findall(step["regex_pattern"], read) or ["[invalid]"]
                read = found[step.get("group_select", 0)].strip()
            for ignored in file["metric_list"][0]["regexes_to_ignore"]:
                read = re.sub(ignored, "", read)
            for gold in ("18", "-1018"):
                assert (read == gold) == (grade(text, gold).reward > 0), text


def test_the_last_marker_counts_case_and_thoughts_matter():
    grade = GSM8K().grade
    assert grade("The answer is 5. No: The answer is 18.", "18").reward == 1
    assert grade("The answer is 18. No: The answer is 5.", "18").reward == -1
    assert grade("the answer is 18", "18") == INVALID
    assert grade("<think>The answer is 18</think> Twenty.", "18") == INVALID
    assert grade("<think>The answer is 5</think> The answer is 18", "18").reward == 1


def test_the_lenient_grade_is_of_the_last_number_whatever_the_marker():
    grade = GSM8K().grade_leniently
    assert grade("So 9 + 9 = 18", "18") == Grade(1.0, True, "18")
    assert grade("The answer is 18. The rest is 5.", "18") == Grade(-1.0, True, "5")
    assert grade("<think>18</think> Eighteen.", "18") == INVALID


@pytest.mark.parametrize("hostile", ["9", "1,", " ", "(", "-", ".", "The answer is "])
def test_hostile_answers_cost_nothing(hostile):
    text = f"{hostile * 10**5} The answer is {hostile * 10**5}"
    start = time.perf_counter()
    assert GSM8K().grade(text, "18").reward == -1
    assert time.perf_counter() - start < 1


def test_a_prompt_without_a_chat_template_shows_worked_examples(policy):
    task = GSM8K()
    problem = Problem("7", "How many?", "1018")
    text = task.prompt(problem, load_tokenizer(str(policy)))
    assert text.endswith("\n\nQuestion: How many?\nAnswer:")
    for example in text.split("\n\n")[1:-1]:
        answer = example.partition("\nAnswer: ")[2]
        assert task.grade(answer, answer.split()[-1].rstrip(".")).reward == 1


needs_data = pytest.mark.skipif(not SHARED.exists(), reason=f"needs the data files at {SHARED}")


@needs_data
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_the_gold_of_every_real_question_is_read(split, count):
    path = SHARED / f"gsm8k_{split}.jsonl"
    problems = GSM8K().problems(path)
    assert len(problems) == count
    for problem, line in zip(problems, path.read_text().splitlines(), strict=True):
        assert problem.gold == json.loads(line)["answer"].split("#### ")[1].replace(",", "")


@needs_data
def test_grades_of_four_real_models_are_the_published_ones():
    task = GSM8K(marker="A:")
    published = []
    for line in (SHARED / "gsm8k_example_model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        gold = last_number(row["ground_truth"])
        solutions = [value for value in row.values() if isinstance(value, dict)]
        correct = [solution["is_correct"] for solution in solutions]
        grades = [task.grade(solution["solution"], gold) for solution in solutions]
        assert [grade.reward > 0 for grade in grades] == correct
        published.append(correct)
    assert (100 * np.mean(published, axis=0)).round(2).tolist() == [21.68, 39.04, 34.72, 56.25]
