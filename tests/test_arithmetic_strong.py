"""The arithmetic data: what is drawn and demonstrated, the command, what is shipped."""

import hashlib
import json
import re

import numpy as np
import pytest
import yaml
from conftest import ROOT, rejected

from data.arithmetic.make import critiques, main
from data.arithmetic.problems import END, LETTERS, apply, demonstration, draw, problems_of, split_of
from topr.evaluation.pipeline import SamplingJob
from topr.policy import load_policy
from topr.sampling import LocalSampler
from topr.tasks import Arithmetic
from topr.trajectories import add_log_probs

DATA = ROOT / "data" / "arithmetic" / "strong"
STANDARD = yaml.safe_load((ROOT / "data" / "arithmetic" / "setting.yaml").read_text())
STRONG = yaml.safe_load((DATA / "setting.yaml").read_text())


def test_the_default_problems_and_demonstrations_are_those_of_the_shipped_data():
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    for _ in range(100):
        problem = draw(STANDARD, rng)
        text = demonstration(STANDARD, STANDARD["errors"], problem["prompt"], rng)
        found = [problem["prompt"], problem["gold"], text.removesuffix(END), text.endswith(END)]
        digest.update(json.dumps(found).encode())
    assert digest.hexdigest() == "366087871c1dbfbc109cc45cdc990b9fdfde54f5bbf3977aee7a02a11a32bf24"


@pytest.mark.slow
def test_filler_follows_a_markov_chain_of_four_uniform_successors():
    rng = np.random.default_rng(0)
    counts = np.zeros((16, 16))
    for _ in range(6000):
        text = demonstration(STRONG, STRONG["errors"], draw(STRONG, rng)["prompt"], rng)
        for words in re.findall("[a-p]{5}", text):
            numbers = [LETTERS.index(letter) for letter in words]
            np.add.at(counts, ([0, *numbers[:-1]], numbers), 1)
    before, after = np.nonzero(counts)
    assert len(before) == 16 * 4 and all(after // 4 == before % 4)
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert shares[before, after] == pytest.approx(0.25, abs=0.04)


def test_critiques_are_imperfect_and_of_correct_and_incorrect_solutions_in_turn():
    examples = critiques(STANDARD, np.random.default_rng(0))
    right = []
    for wanted in [1, 0] * 1000:
        _, text = next(examples)
        if "#" in text:
            right.append(f"#{wanted}" in text)
    assert np.mean(right) == pytest.approx(0.9, abs=0.03)
    assert len(right) / 2000 == pytest.approx(1 - 0.8 * 0.12, abs=0.03)


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
    assert apply({f"{symbol}{operand + 1}": 1.0}, *step, rng) == right
    assert apply({f"{symbol}{operand}": 1.0}, *step, rng) == wrong


def test_a_setting_that_does_not_exist_is_refused(run):
    rejected(run, "setting", "base", "--out", "out", "--setting", "absent.yaml", main=main)


def test_shipped_problems_are_disjoint_and_kept_from_the_base_policy():
    prompts = []
    for split in ("train", "val", "test"):
        rows = [problem.prompt for problem in Arithmetic().problems(DATA / f"{split}.jsonl")]
        assert {split_of(prompt) for prompt in rows} == {split}
        prompts += rows
    assert len(set(prompts)) == len(prompts) == 1200
    taught = problems_of(STRONG, "base", np.random.default_rng(0))
    assert not {next(taught)["prompt"] for _ in range(2000)} & set(prompts)


@pytest.mark.slow
def test_the_shipped_base_is_strong_and_of_high_entropy():
    task = Arithmetic(max_new_tokens=73)
    base = str(DATA / "base")
    policy = load_policy(base)
    problems = task.problems(DATA / "train.jsonl")[:128]
    job = SamplingJob(base, task, problems, 4, task.sampling, 0)
    rows = next(job.sample_parts([list(range(128))], LocalSampler(), policy))
    add_log_probs(policy, rows)
    assert 0.66 < np.mean([row.reward > 0 for row in rows]) < 0.8
    assert 26 < np.mean([-np.sum(row.ref_logprobs) for row in rows]) < 29.5
