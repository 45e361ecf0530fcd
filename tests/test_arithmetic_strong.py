"""The strong setting of the arithmetic task: filler, systematic mistakes, shipped data; the default stays itself."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, rejected

import evaluate
from data.arithmetic.make import main
from topr.evaluation import sample_and_grade
from topr.io import InputError
from topr.policy import load_policy, load_tokenizer, tokenizer_fingerprint
from topr.reproduce.making import make_tokenizer
from topr.sampling import LocalSampler
from topr.tasks import Arithmetic, Grade
from topr.tasks.arithmetic import Bug, Errors, configured, split_of
from topr.trajectories import add_log_probs

CONFIG = ROOT / "configs" / "arithmetic_strong.yaml"
DATA = ROOT / "data" / "arithmetic" / "strong"
STEP = re.compile(r"([a-p]*)(-?\d+)([-+*])(\d+)=(-?\d+)([;,.])")
NONE = Errors(direct=0, missing=0, digit=0, skip=0, loop=0)


@pytest.fixture(scope="module")
def task() -> Arithmetic:
    return configured(CONFIG)


@pytest.fixture(scope="module")
def demonstrations(task) -> list[tuple[str, str]]:
    """Prompts and imperfect solutions."""
    rng = np.random.default_rng(0)
    prompts = [task.draw(rng).prompt for _ in range(6000)]
    return [(prompt, task.demonstration(prompt, task.errors, rng)[0]) for prompt in prompts]


def entropy(counts: Counter) -> float:
    """In nats, of the distribution that the counts estimate."""
    shares = np.array(list(counts.values())) / counts.total()
    return float(-(shares * np.log(shares)).sum())


def test_the_default_task_is_what_it_was_before_it_had_these_settings():
    task, rng, digest = Arithmetic(), np.random.default_rng(0), hashlib.sha256()
    for _ in range(100):
        problem = task.draw(rng)
        text = task.demonstration(problem.prompt, Errors(), rng)
        digest.update(json.dumps([problem.prompt, problem.gold, *text]).encode())
    assert digest.hexdigest() == "366087871c1dbfbc109cc45cdc990b9fdfde54f5bbf3977aee7a02a11a32bf24"
    assert tokenizer_fingerprint(make_tokenizer()) == "778d7bb02d5ec9d3"


def test_the_number_of_operations_follows_its_weights(demonstrations):
    counts = Counter(len(re.findall(r"[-+*]", prompt)) for prompt, _ in demonstrations)
    np.testing.assert_allclose(
        [counts[n] / len(demonstrations) for n in (2, 3, 4, 5)], [0.3, 0.3, 0.25, 0.15], atol=0.02
    )


def test_filler_follows_a_markov_chain_of_four_uniform_successors(demonstrations):
    follow: dict[str, Counter] = {}
    for _, text in demonstrations:
        for words, *_ in STEP.findall(text):
            assert len(words) == 5
            for before, after in zip("a" + words[:-1], words, strict=True):
                follow.setdefault(before, Counter())[after] += 1
    assert set(follow) == set("abcdefghijklmnop")
    for i, letter in enumerate("abcdefghijklmnop"):
        expected = {"abcdefghijklmnop"[(4 * i + k) % 16] for k in range(4)}
        assert set(follow[letter]) == expected
        shares = [count / follow[letter].total() for count in follow[letter].values()]
        np.testing.assert_allclose(shares, 0.25, atol=0.04)


def test_a_demonstration_holds_twenty_six_nats_of_wording(task, demonstrations):
    steps = [STEP.findall(text) for _, text in demonstrations]
    letters = {}
    for words, *_ in (step for found in steps for step in found):
        for position, (before, after) in enumerate(zip("a" + words[:-1], words, strict=True)):
            letters.setdefault((position, before), Counter())[after] += 1
    every = sum(counts.total() for counts in letters.values())
    letter = sum(counts.total() * entropy(counts) for counts in letters.values()) / every
    separator = entropy(Counter(step[-1] for found in steps for step in found))
    per_sequence = np.mean([len(found) for found in steps]) * (5 * letter + separator)
    # 3.25 operations, of which 1% are left out, of 5 log 4 + log 3 nats
    assert per_sequence == pytest.approx(3.25 * 0.99 * (5 * np.log(4) + np.log(3)), abs=0.4)
    plain = Arithmetic(operations=(2, 5))
    assert (
        "".join(plain.demonstration("9+3*2>", NONE, np.random.default_rng(0))[0])
        == "9+3=12;12*2=24;#24"
    )


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        ((28, "+", 5), 23), ((91, "+", 9), 90), ((21, "+", 5), None), ((8, "+", 5), None),
        ((23, "-", 7), 26), ((10, "-", 1), 19), ((27, "-", 7), None),
        ((16, "*", 4), 44), ((12, "*", 8), 86), ((12, "*", 4), None), ((7, "*", 8), None), ((-8, "+", 9), None),
    ],
)  # fmt: skip
def test_a_bug_forgets_what_is_carried_or_borrowed(step, wrong):
    assert Bug(step[1], (1, 9), 1.0).result(*step) == wrong
    assert Bug(step[1], (step[2] + 1, 99), 1.0).result(*step) is None  # its operands are others
    assert Bug({"+": "-", "-": "*", "*": "+"}[step[1]], (1, 9), 1.0).result(*step) is None


def test_bugs_are_systematic_and_occur_at_their_rates(task, demonstrations):
    """Most wrong results of an operation are one and the same, and wrong ones are as frequent as the config says."""
    results: dict[tuple, Counter] = {}
    for _, text in demonstrations:
        for _, value, symbol, operand, result, _ in STEP.findall(text):
            results.setdefault((int(value), symbol, int(operand)), Counter())[int(result)] += 1
    right = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    made, could = np.zeros(6), np.zeros(6)
    slips = steps = 0

    def applies(rule: dict, symbol: str, operand: int) -> bool:
        return rule["operator"] == symbol and rule["operands"][0] <= operand <= rule["operands"][1]

    rules = yaml.safe_load(CONFIG.read_text())["model"]["task"]["init_args"]["errors"]["bugs"]
    assert len(rules) == 6 and {rule["operator"] for rule in rules} == set("+-*")
    for (value, symbol, operand), counts in results.items():
        wrong = Counter(
            {result: n for result, n in counts.items() if result != right[symbol](value, operand)}
        )
        steps += counts.total()
        rule = next((i for i, r in enumerate(rules) if applies(r, symbol, operand)), None)
        units = right[symbol](value % 10, operand)
        if rule is None or value < 10 or 0 <= units < 10:
            slips += wrong.total()
            continue
        # by another route than the task's: the tens as if there were none to carry, or to borrow from
        systematic = right[symbol](value - value % 10, operand if symbol == "*" else 0) + units % 10
        made[rule], could[rule] = made[rule] + wrong[systematic], could[rule] + counts.total()
        slips += wrong.total() - wrong[systematic]
    rates = np.array([rule["rate"] for rule in rules])
    assert could.min() > 150
    assert (
        np.abs(made / could - 0.99 * rates) < 4 * np.sqrt(rates * (1 - rates) / could)
    ).all()  # 1% are slips
    assert rates.min() >= 0.15 and rates.max() <= 0.6
    assert slips / steps == pytest.approx(0.01, abs=0.003)


def test_slips_apart_one_in_a_hundred_operations_is_skipped_and_one_answer_missing(demonstrations):
    operations = sum(len(re.findall(r"[-+*]", prompt)) for prompt, _ in demonstrations)
    written = sum(len(STEP.findall(text)) for _, text in demonstrations)
    assert 1 - written / operations == pytest.approx(0.01, abs=0.003)
    assert np.mean(["#" not in text for _, text in demonstrations]) == pytest.approx(
        0.01, abs=0.004
    )
    assert all(text for _, text in demonstrations)


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        ("abcde9+3=12;beglm12*2=24,adopa24-4=20.#20", Grade(1.0, True, "20")),
        ("abcde9+3=12;#21", Grade(-1.0, True, "21")),
        ("abcde#20", Grade(1.0, True, "20")),
        ("#20.", Grade(-1.0, False, None)),
        ("#20abcde", Grade(-1.0, False, None)),
        ("#abcde20", Grade(-1.0, False, None)),
        ("#2a0", Grade(-1.0, False, None)),
        ("#20,0", Grade(-1.0, False, None)),
        ("#20#", Grade(-1.0, False, None)),
        ("#21abcde#20", Grade(-1.0, False, None)),
        ("#20\nabcde", Grade(-1.0, False, None)),
        ("#20\n", Grade(-1.0, False, None)),
        ("abcde9+3=12;abcde20", Grade(-1.0, False, None)),
        ("#<unk>20", Grade(-1.0, False, None)),
        ("# 20", Grade(-1.0, False, None)),
        ("#-20", Grade(-1.0, False, None)),
    ],
)
def test_filler_makes_no_hostile_answer_pass(task, response, grade):
    assert task.grade(response, "20") == grade


def test_demonstrations_without_errors_are_right_in_the_tokenizer_s_symbols_and_no_longer_than_sampling_allows(
    task,
):
    tokenizer, rng = (
        make_tokenizer(task.filler.symbols + task.filler.separators),
        np.random.default_rng(0),
    )
    assert len(tokenizer) == len(set(tokenizer.get_vocab())) == 20 + 18
    longest = 0
    for _ in range(500):
        problem = task.draw(rng)
        text, finished = task.demonstration(problem.prompt, NONE, rng)
        ids = tokenizer(text)["input_ids"]
        assert finished and task.grade(text, problem.gold).reward == 1
        assert (
            len(ids) == len(text)
            and tokenizer.decode(ids) == text
            and tokenizer.unk_token_id not in ids
        )
        longest = max(longest, len(ids) + 1)
    assert 60 < longest <= task.sampling.max_new_tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"operations": [3]},
        {"filler": {"word": 1}},
        {"errors": {"missing": "seldom"}},
        {"errors": {"bugs": [{"operator": "/", "operands": [1, 9], "rate": 0.5}]}},
        {"errors": {"bugs": [{"operator": "+", "operands": [1, 9]}]}},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(run, settings):
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["task"]["init_args"] |= settings
    Path("bad.yaml").write_text(yaml.safe_dump(config))
    rejected(run, "", "--config", "bad.yaml", "--out", "out", main=main)
    with pytest.raises(InputError):
        configured(Path("bad.yaml"))


@pytest.mark.parametrize(
    "text", ["", "x", "[1]", "model: {}", "model: {task: topr.tasks.GSM8K}", "{", "\0"]
)
def test_a_config_without_the_task_is_refused(run, text):
    Path("bad.yaml").write_text(text)
    rejected(run, "model.task", "--config", "bad.yaml", "--out", "out", main=main)


@pytest.mark.parametrize(
    "arguments", [["--lr", "1", "2"], ["--lr", "-1"], ["--steps", "0"], ["--samples", "-1"]]
)
def test_impossible_stages_are_refused(run, arguments):
    rejected(run, arguments[0].removeprefix("--"), "--out", "out", *arguments, main=main)


def test_the_command_makes_the_configured_task_the_same_twice(run, tmp_path, task):
    small = [
        "--steps",
        2,
        1,
        "--lr",
        1e-3,
        1e-4,
        "--batch-size",
        8,
        "--train",
        4,
        "--val",
        2,
        "--test",
        2,
    ]
    for name in ("one", "two"):
        code, _, err = run(
            main, "--config", CONFIG, "--out", tmp_path / name, *small, "--samples", 0
        )
        assert code == 0, err
    files = {
        path.relative_to(tmp_path / "one")
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    }
    assert {"train.jsonl", "val.jsonl", "test.jsonl"} < set(
        map(str, files)
    ) and "train.parquet" not in map(str, files)
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), (
            file
        )
    tokenizer = load_tokenizer(str(tmp_path / "one" / "base"))
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(
        make_tokenizer(task.filler.symbols + task.filler.separators)
    )


def test_the_config_samples_and_evaluates_responses_of_the_task_s_length(task):
    longest = yaml.safe_load(CONFIG.read_text())["data"]["sampling"]["max_new_tokens"]
    assert longest == task.sampling.max_new_tokens
    assert longest == evaluate.BENCHMARKS["arithmetic_strong"][0].sampling.max_new_tokens
    assert Arithmetic().sampling.max_new_tokens == 40


def test_shipped_problems_are_disjoint_and_kept_from_the_base_policy():
    splits = {
        split: Arithmetic().problems(DATA / f"{split}.jsonl") for split in ("train", "val", "test")
    }
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 500,
        "val": 200,
        "test": 500,
    }
    prompts = [problem.prompt for rows in splits.values() for problem in rows]
    assert len(set(prompts)) == len(prompts) == 1200
    for split, rows in splits.items():
        assert {split_of(problem.prompt) for problem in rows} == {split}
    rng = np.random.default_rng(0)
    taught = [prompt for prompt, _ in zip(configured(CONFIG).base(rng), range(2000), strict=False)]
    assert not set(taught) & set(prompts) and {
        len(re.findall(r"[-+*]", prompt)) for prompt in taught
    } == {2, 3, 4, 5}


def test_the_shipped_base_is_strong_and_of_high_entropy(task):
    policy = load_policy(str(DATA / "base"))
    problems = task.problems(DATA / "train.jsonl")[:128]
    rows = sample_and_grade(LocalSampler(), policy, task, problems, 4, task.sampling, 0)
    add_log_probs(policy, rows, 16384)
    assert 0.66 < np.mean([row.reward > 0 for row in rows]) < 0.8
    assert np.mean([not row.valid for row in rows]) < 0.03
    assert 26 < np.mean([-np.sum(row.ref_logprobs) for row in rows]) < 29.5
