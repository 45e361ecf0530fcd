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
from topr.tasks import Arithmetic
from topr.trajectories import add_log_probs

DATA = ROOT / "data" / "arithmetic" / "strong"


@pytest.fixture(scope="module")
def setting() -> Setting:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--setting", type=Setting)
    given = yaml.safe_load((DATA / "setting.yaml").read_text())["setting"]
    return parser.instantiate(parser.parse_object({"setting": given})).setting


def test_the_default_problems_and_demonstrations_are_those_of_the_shipped_data():
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    for _ in range(100):
        problem = draw(Setting(), rng)
        text = demonstration(Setting(), Errors(), problem.prompt, rng)
        digest.update(json.dumps([problem.prompt, problem.gold, *text]).encode())
    assert digest.hexdigest() == "366087871c1dbfbc109cc45cdc990b9fdfde54f5bbf3977aee7a02a11a32bf24"


def test_filler_follows_a_markov_chain_of_four_uniform_successors(setting):
    rng = np.random.default_rng(0)
    pairs: Counter = Counter()
    for _ in range(6000):
        text, _ = demonstration(setting, setting.errors, draw(setting, rng).prompt, rng)
        for words in re.findall("[a-p]{5}", text):
            pairs.update(zip("a" + words, words, strict=False))
    assert len(pairs) == 16 * 4
    for before, after in pairs:
        assert LETTERS.index(after) // 4 == LETTERS.index(before) % 4
        share = pairs[before, after] / sum(pairs[before, other] for other in LETTERS)
        assert share == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize(
    ("step", "right", "wrong"),
    [
        ((28, "+", 5), 33, 23), ((21, "+", 5), 26, 26), ((8, "+", 5), 13, 13),
        ((23, "-", 7), 16, 26), ((27, "-", 7), 20, 20),
        ((12, "*", 8), 96, 86), ((12, "*", 4), 48, 48), ((-8, "+", 9), 1, 1),
    ],
)  # fmt: skip
def test_a_carry_or_borrow_is_forgotten(step, right, wrong):
    _, symbol, operand = step
    rng = np.random.default_rng(0)
    assert apply({symbol: {operand + 1: 1.0}}, *step, rng) == right
    assert apply({symbol: {operand: 1.0}}, *step, rng) == wrong


@pytest.mark.parametrize("response", ["#20.", "#20abcde", "#abcde20", "#21abcde#20", "#20\nabcde"])
def test_filler_makes_no_hostile_answer_pass(response):
    assert Arithmetic().grade(response, "20") == (-1.0, False, None)


def test_demonstrations_without_errors_are_right_and_no_longer_than_sampling_allows(setting):
    flawless = Errors(direct=0, missing=0, digit=0, skip=0, loop=0)
    tokenizer = make_tokenizer(LETTERS + SEPARATORS)
    rng = np.random.default_rng(0)
    longest = 0
    for _ in range(500):
        problem = draw(setting, rng)
        text, finished = demonstration(setting, flawless, problem.prompt, rng)
        ids = tokenizer(text)["input_ids"]
        assert finished and Arithmetic().grade(text, problem.gold).reward == 1
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
        longest = max(longest, len(ids) + 1)
    assert 60 < longest <= setting.max_new_tokens
    assert BENCHMARKS["arithmetic_strong"][0].sampling.max_new_tokens == setting.max_new_tokens


def test_impossible_settings_are_refused(run):
    arguments = ["--out", "out", "--setting.errors.missing", "seldom"]
    rejected(run, "missing", "base", *arguments, main=main)


def test_shipped_problems_are_disjoint_and_kept_from_the_base_policy(setting):
    prompts = []
    for split in ("train", "val", "test"):
        rows = [problem.prompt for problem in Arithmetic().problems(DATA / f"{split}.jsonl")]
        assert {split_of(prompt) for prompt in rows} == {split}
        prompts += rows
    assert len(set(prompts)) == len(prompts) == 1200
    taught = problems_of(setting, "base", np.random.default_rng(0))
    assert not {next(taught).prompt for _ in range(2000)} & set(prompts)


def test_the_shipped_base_is_strong_and_of_high_entropy():
    task = Arithmetic(max_new_tokens=73)
    policy = load_policy(str(DATA / "base"))
    problems = task.problems(DATA / "train.jsonl")[:128]
    rows = sample_and_grade(LocalSampler(), policy, task, problems, 4, task.sampling, 0)
    add_log_probs(policy, rows, 16384)
    assert 0.66 < np.mean([row.reward > 0 for row in rows]) < 0.8
    assert 26 < np.mean([-np.sum(row.ref_logprobs) for row in rows]) < 29.5
