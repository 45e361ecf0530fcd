"""The arithmetic task: its problems, its grades, its shipped data."""

import json
import re

import numpy as np
import pytest
from conftest import ROOT, write

import evaluate
import train
from data.arithmetic.make import main
from topr.io import InputError
from topr.policy import load_tokenizer, tokenizer_fingerprint
from topr.policy.files import policy_fingerprint
from topr.reproduce.making import make_tokenizer
from topr.tasks import Arithmetic, Grade
from topr.tasks.arithmetic import Errors, split_of
from topr.trajectories import read_metadata, read_trajectories

DATA = ROOT / "data" / "arithmetic"


def solve(prompt: str) -> tuple[int, list[int]]:
    """Value and intermediate values, left to right, by another route than the task's."""
    first, *rest = re.findall(r"\d+|\D", prompt.removesuffix(">"))
    values = [int(first)]
    for symbol, operand in zip(rest[::2], rest[1::2], strict=True):
        number = int(operand)
        values.append(
            values[-1] + number
            if symbol == "+"
            else values[-1] - number
            if symbol == "-"
            else values[-1] * number
        )
    return values[-1], values


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        ("9+3=12;12*2=24;24-4=20;#20", Grade(1.0, True, "20")),
        ("#20", Grade(1.0, True, "20")),
        ("#020", Grade(1.0, True, "20")),
        ("9+3=13;#21", Grade(-1.0, True, "21")),
        ("9+3=12;", Grade(-1.0, False, None)),
        ("#20;#20", Grade(-1.0, False, None)),
        ("##20", Grade(-1.0, False, None)),
        ("#20;", Grade(-1.0, False, None)),
        ("#", Grade(-1.0, False, None)),
        ("", Grade(-1.0, False, None)),
        ("#٢٠", Grade(-1.0, False, None)),
        ("#2<pad>0", Grade(-1.0, False, None)),
        ("#" + "9" * 10_000, Grade(-1.0, False, None)),
    ],
)
def test_grades(response, grade):
    assert Arithmetic().grade(response, "20") == grade


def test_problems_follow_the_settings():
    task, rng = (
        Arithmetic(operations=(1, 5), operands=(2, 12), largest=50, operators="+*"),
        np.random.default_rng(0),
    )
    counts = set()
    for _ in range(500):
        problem = task.draw(rng)
        value, values = solve(problem.prompt)
        assert str(value) == problem.gold and min(values) >= 0 and max(values[1:]) <= 50
        counts.add(len(values) - 1)
    assert counts == {1, 2, 3, 4, 5}


def test_demonstrations_without_errors_are_right_and_errors_have_their_rates():
    task, rng = Arithmetic(), np.random.default_rng(0)
    clean = Errors(direct=0, missing=0, digit=0, skip=0, loop=0)
    for _ in range(200):
        problem = task.draw(rng)
        text, finished = task.demonstration(problem.prompt, clean, rng)
        assert finished and task.grade(text, problem.gold).reward == 1
    kinds = np.zeros(3)
    for _ in range(4000):
        text, finished = task.demonstration(task.draw(rng).prompt, Errors(), rng)
        kinds += [text.startswith("#"), finished and "#" not in text, not finished]
    # a loop ends the chance of a missing answer, and both happen only where there are steps
    loop = 0.8 * np.mean([1 - 0.94**n for n in (2, 3, 4)])
    np.testing.assert_allclose(kinds / 4000, [0.20, 0.12 * (0.8 - loop), loop], atol=0.025)


def test_tokenizer_is_one_token_a_character_and_reversible():
    tokenizer, text = make_tokenizer(), "9+3*2-4>9+3=12;#20"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text


def test_shipped_splits_are_disjoint_and_kept_from_the_base_policy():
    problems = {
        split: Arithmetic().problems(DATA / f"{split}.jsonl") for split in ("train", "val", "test")
    }
    assert {split: len(rows) for split, rows in problems.items()} == {
        "train": 500,
        "val": 200,
        "test": 300,
    }
    prompts = {split: {problem.prompt for problem in rows} for split, rows in problems.items()}
    assert (
        not prompts["train"] & prompts["val"]
        and not (prompts["train"] | prompts["val"]) & prompts["test"]
    )
    for split, rows in problems.items():
        for problem in rows:
            assert (
                split_of(problem.prompt) == split and str(solve(problem.prompt)[0]) == problem.gold
            )


def test_shipped_trajectories_come_from_the_shipped_base():
    metadata = read_metadata(DATA / "train.parquet")
    assert metadata["policy"] == policy_fingerprint(str(DATA / "base"))
    assert metadata["tokenizer"] == tokenizer_fingerprint(load_tokenizer(str(DATA / "base")))
    trajectories, task = read_trajectories(DATA / "train.parquet"), Arithmetic()
    assert len(trajectories) == 8000 and len({t.prompt_id for t in trajectories}) == 500
    for t in trajectories:
        grade = task.grade(t.response, t.gold) if t.finished else Grade(-1.0, False, None)
        assert (t.reward, t.valid, t.answer) == grade
        assert (t.response_ids[-1] == 1) == t.finished and len(t.response_ids) <= 40
    assert 0.2 < np.mean([t.reward > 0 for t in trajectories]) < 0.35


def test_the_command_makes_the_same_bytes_twice(run, tmp_path):
    small = ["--steps", 3, "--train", 4, "--val", 2, "--test", 2, "--samples", 2, "--seed", 5]
    for name in ("one", "two"):
        code, out, err = run(main, "--out", tmp_path / name, *small)
        assert code == 0, err
    files = sorted(
        path.relative_to(tmp_path / "one")
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    )
    assert len(files) >= 8
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), (
            file
        )
    assert len(read_trajectories(tmp_path / "one" / "train.parquet")) == 8
    assert len(json.loads((tmp_path / "one" / "val.jsonl").read_text().splitlines()[0])) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"operations": (3, 2)},
        {"operands": (5, 4)},
        {"operators": ""},
        {"operands": (9, 9), "operators": "*", "largest": 80},
    ],
)
def test_settings_that_admit_no_problem_are_refused(settings):
    with pytest.raises(InputError, match="Arithmetic.* admits no problem"):
        Arithmetic(**settings).draw(np.random.default_rng(0))


def test_too_few_problems_are_refused():
    task = Arithmetic(operations=(1, 1), operands=(1, 2), operators="+")
    with pytest.raises(InputError, match="too few problems"):
        task.distinct("val", 100, np.random.default_rng(0))


def test_the_readme_s_own_task_is_sampled_trained_and_evaluated(run, policy, monkeypatch):
    snippet = re.search(
        r"```python\n(# my_task.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )[1]
    assert len([line for line in snippet.splitlines() if line]) <= 15
    (run.folder / "my_task.py").write_text(snippet)
    monkeypatch.syspath_prepend(run.folder)
    problems = run.folder / "mine.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(4)))
    common = [
        "--config", ROOT / "configs" / "arithmetic.yaml", "--model.task=my_task.Parity", f"--model.policy={policy}",
        "--data.samples=8", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    code, out, err = run(
        train.main, "predict", *common, f"--data.problems={problems}", "--data.out=out"
    )
    assert code == 0 and re.search(
        r"32 trajectories are under out: mean reward \S+, \S+% invalid, \S+% trunc", out
    ), err
    rows = read_trajectories(run.folder / "out" / "part-00000.parquet")
    rows[0].reward, rows[1].reward = 1.0, -1.0  # whatever the random policy said
    write(run.folder / "train.parquet", policy, rows)
    more = [f"--data.val={problems}", f"--data.test={problems}", "--data.train=train.parquet"]
    with pytest.warns(UserWarning, match="updates an epoch: only 1; lower data.batch_size, now 64"):
        code, out, err = run(train.main, "fit", *common, *more)
    assert code == 0, err
    name, evaluated = (
        f"my_task.Parity={problems}",
        ["--policy", "runs/arithmetic/version_0/policy", "--samples", "2"],
    )
    code, out, err = run(evaluate.main, "--benchmark", name, *evaluated)
    assert code == 0 and "my_task.Parity" in out, err
    for wrong, words in {
        "my_task.Parity": "has no problems of its own",
        "my_task.Odd": "no attribute 'Odd'",
    }.items():
        code, _, err = run(evaluate.main, "--benchmark", wrong, *evaluated)
        assert code == 2 and words in err
    import my_task

    assert my_task.Parity().grade("1+2=3;#4", "7") == Grade(-1.0, True, "0")


def test_a_prediction_without_a_valid_response_is_warned_about(run, policy):
    (run.folder / "problems.jsonl").write_text('{"prompt": "1+1>", "gold": "2"}\n')
    config = [
        "--config",
        ROOT / "configs" / "gsm8k.yaml",
        "--trainer.precision=32-true",
        "--data.samples=2",
    ]
    more = [
        f"--model.policy={policy}",
        "--data.problems=problems.jsonl",
        "--data.out=out",
        "--data.samples=2",
    ]
    more += [
        "--model.task=topr.tasks.Arithmetic",
        "--data.sampling.max_new_tokens=1",
        "--trainer.accelerator=cpu",
    ]
    with pytest.warns(UserWarning, match="every response is invalid"):
        code, out, err = run(train.main, "predict", *config, *more)
    assert code == 0 and "100.0% invalid" in out, err
