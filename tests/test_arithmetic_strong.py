"""The arithmetic data: what is drawn and demonstrated, the command, what is shipped."""

import hashlib
import json
import re
from collections import Counter

import jsonargparse
import numpy as np
import pytest
import yaml
from conftest import ROOT, rejected

from data.arithmetic.imitation import make_tokenizer
from data.arithmetic.make import main
from data.arithmetic.problems import (
    LETTERS,
    SEPARATORS,
    Bug,
    Errors,
    Setting,
    apply,
    demonstration,
    draw,
    problems_of,
    split_of,
)
from topr.evaluation import sample_and_grade
from topr.evaluation.benchmarks import BENCHMARKS
from topr.policy import load_policy
from topr.sampling import LocalSampler
from topr.tasks import Arithmetic, Grade
from topr.trajectories import add_log_probs

DATA = ROOT / "data" / "arithmetic" / "strong"
STEP = re.compile(r"([a-p]*)(-?\d+)([-+*])(\d+)=(-?\d+)([;,.])")
NONE = Errors(direct=0, missing=0, digit=0, skip=0, loop=0)


@pytest.fixture(scope="module")
def setting() -> Setting:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--setting", type=Setting)
    given = yaml.safe_load((DATA / "setting.yaml").read_text())["setting"]
    return parser.instantiate(parser.parse_object({"setting": given})).setting


@pytest.fixture(scope="module")
def demonstrations(setting) -> list[tuple[str, str]]:
    """Prompts and imperfect solutions."""
    rng = np.random.default_rng(0)
    prompts = [draw(setting, rng).prompt for _ in range(6000)]
    return [(prompt, demonstration(setting, setting.errors, prompt, rng)[0]) for prompt in prompts]


def test_the_default_problems_and_demonstrations_are_those_of_the_shipped_data():
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    for _ in range(100):
        problem = draw(Setting(), rng)
        text = demonstration(Setting(), Errors(), problem.prompt, rng)
        digest.update(json.dumps([problem.prompt, problem.gold, *text]).encode())
    assert digest.hexdigest() == "366087871c1dbfbc109cc45cdc990b9fdfde54f5bbf3977aee7a02a11a32bf24"


def test_filler_follows_a_markov_chain_of_four_uniform_successors(demonstrations):
    pairs: Counter = Counter()
    separators: Counter = Counter()
    for _, text in demonstrations:
        for words, *_, separator in STEP.findall(text):
            separators[separator] += 1
            pairs.update(zip("a" + words, words, strict=False))
    assert separators.total() * 5 == pairs.total() and len(pairs) == 16 * 4
    for before, after in pairs:
        assert LETTERS.index(after) // 4 == LETTERS.index(before) % 4
        share = pairs[before, after] / sum(pairs[before, other] for other in LETTERS)
        assert share == pytest.approx(0.25, abs=0.04)
    shares = np.array([separators[text] for text in ";,."]) / separators.total()
    np.testing.assert_allclose(shares, 1 / 3, atol=0.02)


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        ((28, "+", 5), 23), ((91, "+", 9), 90), ((21, "+", 5), None), ((8, "+", 5), None),
        ((23, "-", 7), 26), ((10, "-", 1), 19), ((27, "-", 7), None),
        ((16, "*", 4), 44), ((12, "*", 8), 86), ((12, "*", 4), None),
        ((7, "*", 8), None), ((-8, "+", 9), None),
    ],
)  # fmt: skip
def test_a_bug_forgets_what_is_carried_or_borrowed(step, wrong):
    value, symbol, operand = step
    right = {"+": value + operand, "-": value - operand, "*": value * operand}[symbol]
    rng = np.random.default_rng(0)
    other = Bug(symbol, (operand + 1, 99), 1.0)
    assert apply([other], *step, rng) == right
    assert apply([Bug(symbol, (1, 9), 0.0)], *step, rng) == right
    expected = right if wrong is None else wrong
    assert apply([other, Bug(symbol, (1, 9), 1.0)], *step, rng) == expected


def test_one_operation_in_a_hundred_is_skipped_and_one_answer_missing(demonstrations):
    operations = sum(len(re.findall(r"[-+*]", prompt)) for prompt, _ in demonstrations)
    written = sum(len(STEP.findall(text)) for _, text in demonstrations)
    assert 1 - written / operations == pytest.approx(0.01, abs=0.003)
    missing = np.mean(["#" not in text for _, text in demonstrations])
    assert missing == pytest.approx(0.01, abs=0.004)


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        ("abcde9+3=12;beglm12*2=24,adopa24-4=20.#20", Grade(1.0, True, "20")),
        ("abcde9+3=12;#21", Grade(-1.0, True, "21")),
        *((text, Grade(-1.0, False, None)) for text in (
            "#20.", "#20abcde", "#abcde20", "#2a0", "#20#", "#21abcde#20", "#20\nabcde", "#20\n",
            "abcde9+3=12;abcde20", "#<unk>20", "# 20", "#-20",
        )),
    ],
)  # fmt: skip
def test_filler_makes_no_hostile_answer_pass(response, grade):
    assert Arithmetic().grade(response, "20") == grade


def test_demonstrations_without_errors_are_right_and_no_longer_than_sampling_allows(setting):
    tokenizer = make_tokenizer(LETTERS + SEPARATORS)
    rng = np.random.default_rng(0)
    longest = 0
    for _ in range(500):
        problem = draw(setting, rng)
        text, finished = demonstration(setting, NONE, problem.prompt, rng)
        ids = tokenizer(text)["input_ids"]
        assert finished and Arithmetic().grade(text, problem.gold).reward == 1
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
        longest = max(longest, len(ids) + 1)
    assert 60 < longest <= setting.max_new_tokens
    assert BENCHMARKS["arithmetic_strong"][0].sampling.max_new_tokens == setting.max_new_tokens


@pytest.mark.parametrize(
    "arguments", [["--setting.errors.missing", "seldom"], ["--setting.operations", "[3]"]]
)
def test_impossible_settings_are_refused(run, arguments):
    words = arguments[0].removeprefix("--").rpartition(".")[2]
    rejected(run, words, "base", "--out", "out", *arguments, main=main)


def test_shipped_problems_are_disjoint_and_kept_from_the_base_policy(setting):
    prompts = []
    for split, count in (("train", 500), ("val", 200), ("test", 500)):
        rows = Arithmetic().problems(DATA / f"{split}.jsonl")
        assert len(rows) == count
        assert {split_of(problem.prompt) for problem in rows} == {split}
        prompts += [problem.prompt for problem in rows]
    assert len(set(prompts)) == 1200
    taught = problems_of(setting, "base", np.random.default_rng(0))
    assert not {next(taught).prompt for _ in range(2000)} & set(prompts)


def test_the_shipped_base_is_strong_and_of_high_entropy():
    task = Arithmetic(max_new_tokens=73)
    policy = load_policy(str(DATA / "base"))
    problems = task.problems(DATA / "train.jsonl")[:128]
    rows = sample_and_grade(LocalSampler(), policy, task, problems, 4, task.sampling, 0)
    add_log_probs(policy, rows, 16384)
    assert 0.66 < np.mean([row.reward > 0 for row in rows]) < 0.8
    assert np.mean([not row.valid for row in rows]) < 0.03
    assert 26 < np.mean([-np.sum(row.ref_logprobs) for row in rows]) < 29.5
