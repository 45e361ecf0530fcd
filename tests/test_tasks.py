"""The arithmetic task: grades, problems, demonstrations, shipped data; a task of one's own."""

import re

import numpy as np
import pytest
import yaml
from conftest import ROOT, write
from jsonargparse.typing import Path_fr

import evaluate
import train
from data.arithmetic.make import base
from data.arithmetic.problems import END, demonstration, draw, split_of
from topr.io import InputError
from topr.tasks import Arithmetic, Grade
from topr.trajectories import read_trajectories

DATA = ROOT / "data" / "arithmetic"
SETTING = yaml.safe_load((DATA / "setting.yaml").read_text())
INVALID = Grade(-1.0, False, None)
SPLITS = {"train": 500, "val": 200, "test": 300}


def values_of(prompt: str) -> list[int]:
    """The intermediate values, left to right, by another route than the task's."""
    first, *rest = re.findall(r"\d+|\D", prompt.removesuffix(">"))
    values = [int(first)]
    for symbol, operand in zip(rest[::2], rest[1::2], strict=True):
        values.append(eval(f"{values[-1]} {symbol} {operand}"))
    return values


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        ("9+3=12;12*2=24;24-4=20;#20", Grade(1.0, True, "20")),
        ("#020", Grade(1.0, True, "20")),
        ("9+3=13;#21", Grade(-1.0, True, "21")),
        ("9+3=12;", INVALID),
        ("#20;#20", INVALID),
        ("#20;", INVALID),
        ("", INVALID),
        ("#٢٠", INVALID),
        ("#2<pad>0", INVALID),
        ("#" + "9" * 10_000, INVALID),
    ],
)
def test_grades(response, grade):
    assert Arithmetic().grade(response, "20") == grade


def test_a_task_has_no_lenient_rule_unless_it_defines_one():
    assert Arithmetic().grade_leniently("#20", "20") is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (['{"prompt": "1+1>"}'], "row 1: key 'gold.* holds None"),
        (['{"id": "a", "prompt": "1+1>", "gold": "2"}'] * 2, "have the same id; make ids unique"),
    ],
)
def test_malformed_problems_are_refused(tmp_path, rows, words):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(InputError, match=f"problems.jsonl.*{words}"):
        Arithmetic().problems(path)
    path.write_text('{"id": "a", "prompt": "1+1>", "gold": "2"}\n{"prompt": "1+2>", "gold": "3"}')
    assert [problem.id for problem in Arithmetic().problems(path)] == ["a", "1"]


def test_problems_follow_the_setting():
    rng = np.random.default_rng(0)
    counts = set()
    for _ in range(500):
        problem = draw(SETTING | {"operations": [1, 2, 3, 4, 5]}, rng)
        values = values_of(problem["prompt"])
        assert str(values[-1]) == problem["gold"]
        assert min(values) >= 0 and max(values) <= 99
        counts.add(len(values) - 1)
    assert counts == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("filler", [False, True])
def test_demonstrations_without_errors_are_right(filler):
    rng = np.random.default_rng(0)
    setting = SETTING | {"filler": filler}
    flawless = dict.fromkeys(SETTING["errors"], 0) | {"carry": {}}
    for _ in range(200):
        problem = draw(setting, rng)
        text, end, _ = demonstration(setting, flawless, problem["prompt"], rng).partition(END)
        assert end and Arithmetic().grade(text, problem["gold"]).reward == 1


def test_errors_of_demonstrations_have_their_rates():
    rng = np.random.default_rng(0)
    kinds = np.zeros(3)
    for _ in range(4000):
        prompt = draw(SETTING, rng)["prompt"]
        text = demonstration(SETTING, SETTING["errors"], prompt, rng)
        finished = text.endswith(END)
        kinds += [text.startswith("#"), finished and "#" not in text, not finished]
    # A loop ends the chance of a missing answer, and both happen only where there are steps.
    loop = 0.8 * np.mean([1 - 0.94**n for n in (2, 3, 4)])
    np.testing.assert_allclose(kinds / 4000, [0.20, 0.12 * (0.8 - loop), loop], atol=0.025)


def test_shipped_splits_are_disjoint_and_kept_from_the_base_policy():
    prompts = set()
    for split, count in SPLITS.items():
        problems = Arithmetic().problems(DATA / f"{split}.jsonl")
        assert len(problems) == count
        for problem in problems:
            assert split_of(problem.prompt) == split
            assert str(values_of(problem.prompt)[-1]) == problem.gold
            prompts.add(problem.prompt)
    assert len(prompts) == sum(SPLITS.values())


def test_shipped_trajectories_are_graded_samples_of_the_train_problems():
    trajectories = read_trajectories(DATA / "train.parquet")
    prompts = {problem.prompt for problem in Arithmetic().problems(DATA / "train.jsonl")}
    assert len(trajectories) == 8000 and {t.prompt for t in trajectories} == prompts
    for t in trajectories:
        grade = Arithmetic().grade(t.response, t.gold) if t.finished else INVALID
        assert (t.reward, t.valid, t.answer) == grade
        assert (t.response_ids[-1] == 1) == t.finished and len(t.response_ids) <= 40
    assert 0.2 < np.mean([t.reward > 0 for t in trajectories]) < 0.35


@pytest.mark.slow
def test_the_same_seed_makes_the_same_bytes(tmp_path):
    small = {"stages": [[3, 3e-3]], "problems": {"train": 4, "val": 2, "test": 2}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SETTING | small))
    for name in ("one", "two"):
        base(tmp_path / name, Path_fr(tmp_path / "small.yaml"), seed=5)
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) >= 8
    for file in files:
        twin = tmp_path / "two" / file.relative_to(tmp_path / "one")
        assert file.read_bytes() == twin.read_bytes(), file
    assert len(Arithmetic().problems(tmp_path / "one" / "train.jsonl")) == 4


def test_the_readme_s_own_task_is_sampled_trained_and_evaluated(run, policy, monkeypatch):
    readme = (ROOT / "README.md").read_text()
    snippet = re.search(r"```python\n(# my_task.py.*?)```", readme, re.DOTALL)[1]
    (run.folder / "my_task.py").write_text(snippet)
    monkeypatch.syspath_prepend(run.folder)
    problems = run.folder / "mine.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(4)))
    common = [
        "--config", ROOT / "configs" / "arithmetic.yaml", "--model.task=my_task.Parity",
        f"--model.policy={policy}", f"--data.problems={problems}", "--data.out=out",
        f"--data.val={problems}", f"--data.test={problems}", "--data.train=train.parquet",
        "--data.samples=8", "--data.batch_size=8", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    code, out, err = run(train.main, "predict", *common)
    assert code == 0, err
    rows = read_trajectories(run.folder / "out" / "part-00000.parquet")
    assert len(rows) == 32
    rows[0].reward = 1.0  # whatever the random policy said
    rows[1].reward = -1.0
    write(run.folder / "train.parquet", policy, rows)
    code, out, err = run(train.main, "fit", *common)
    assert code == 0, err
    trained = ["--policy", "runs/arithmetic/version_0/policy", "--samples", "2"]
    benchmark = f"my_task.Parity={problems}"
    code, out, err = run(evaluate.main, "--benchmark", benchmark, *trained)
    assert code == 0 and "my_task.Parity" in out, err
