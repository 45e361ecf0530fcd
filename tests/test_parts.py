"""predict and evaluate.py sample what is missing, once, whoever was killed when; what they had stays as it is."""

import json
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TWO_RANKS, make_policy

import evaluate
import train
from topr import evaluation
from topr.evaluation import describe, per_problem, sample_and_grade
from topr.policy import load_policy
from topr.sampling import Response, Sampler, Sampling
from topr.tasks import GSM8K, MATH, Verifier, gsm8k
from topr.tasks.task import Grade, Problem, Task
from topr.tokenizer import load_tokenizer
from topr.trajectories import read_metadata, read_trajectories


@pytest.fixture
def problems(run, monkeypatch):
    monkeypatch.setattr(evaluation, "PART", 2)
    path = run.folder / "problems.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(7)))
    return path


@pytest.fixture
def killed(monkeypatch):
    """Let the program die when it writes its n-th file; the files written so far are counted in `written`."""
    write, written = evaluation.write_trajectories, []

    def arrange(n: int | None):
        def dying(path, *arguments):
            if n is not None and len(written) == n:
                raise KeyError("killed here")
            written.append(path.name)
            write(path, *arguments)

        written.clear()
        monkeypatch.setattr(evaluation, "write_trajectories", dying)
        return written

    return arrange


def predict(run, policy, problems, out, *more):
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}", f"--data.out={out}"]
    config += [f"--data.problems={problems}", "--data.samples=3", "--trainer.enable_progress_bar=false"]
    return run(train.main, "predict", *config, *more)


def rows(folder) -> list:
    return [row for path in sorted(folder.glob("*.parquet")) for row in read_trajectories(path)]


def test_a_killed_predict_goes_on_at_the_first_problem_without_responses(run, policy, problems, killed):
    written = killed(None)
    code, out, err = predict(run, policy, problems, "whole")
    assert code == 0 and "21 trajectories are under whole" in out, err
    assert written == [f"part-0000{i}.parquet" for i in range(4)]
    written = killed(2)
    with pytest.raises(KeyError, match="killed here"):
        predict(run, policy, problems, "cut")
    (run.folder / "cut" / ".part-00002.parquet.99999999.tmp").write_text("what a killed writer leaves")
    written = killed(None)
    assert predict(run, policy, problems, "cut")[0] == 0
    assert written == ["part-00002.parquet", "part-00003.parquet"]
    assert rows(run.folder / "cut") == rows(run.folder / "whole")
    assert [row.prompt_id for row in rows(run.folder / "cut")] == [str(i) for i in range(7) for _ in range(3)]
    assert not list((run.folder / "cut").glob(".*"))
    written = killed(None)
    assert predict(run, policy, problems, "cut")[0] == 0 and written == []  # all there: nothing is sampled


@pytest.mark.parametrize("change", ["seed", "samples", "problems", "policy"])
def test_predict_never_mixes_two_settings(run, policy, problems, change):
    assert predict(run, policy, problems, "out")[0] == 0
    (run.folder / "out" / "part-00003.parquet").unlink()
    more = {"seed": ["--seed_everything=5"], "samples": ["--data.samples=4"]}.get(change, [])
    if change == "problems":
        problems.write_text(problems.read_text().replace('"gold": "3"', '"gold": "4"'))
    if change == "policy":
        policy = make_policy(run.folder / "other", seed=3)
    code, _, err = predict(run, policy, problems, "out", *more)
    assert code == 2 and "holds other trajectories" in err
    assert len(list((run.folder / "out").iterdir())) == 3


def test_a_killed_evaluation_goes_on_and_a_second_one_samples_nothing(run, policy, problems, killed):
    def command(out, *more):
        given = ["--benchmark", f"arithmetic={problems}", "--samples", 4, "--k", 1, 2, 4, "--out", out, "--rows", 64]
        return run(evaluate.main, "--policy", policy, *given, *more)

    assert command("whole")[0] == 0
    written = killed(3)
    with pytest.raises(KeyError, match="killed here"):
        command("cut")
    assert not (run.folder / "cut" / "results.json").exists()
    written = killed(None)
    assert command("cut")[0] == 0 and written == ["part-00003.parquet"]
    for name in ("results.json", "results.md"):
        assert (run.folder / "cut" / name).read_text() == (run.folder / "whole" / name).read_text()
    written = killed(None)
    assert command("cut")[0] == 0 and written == []
    assert command("cut", "--temperature", 0.5)[0] == 0 and len(written) == 4  # other responses lie beside them
    assert (run.folder / "cut" / "results.png").read_bytes().startswith(b"\x89PNG")
    row = json.loads((run.folder / "cut" / "results.json").read_text())[str(policy)]["arithmetic"]
    assert {"pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4", "invalid", "length"} < set(row)
    code, _, err = command("cut", "--k", "5")
    assert code == 2 and "--k 5 is more than the --samples 4" in err


def test_greedy_takes_the_likeliest_token_once(run, policy, problems):
    arguments = ["--benchmark", f"arithmetic={problems}", "--greedy", "--samples", 16, "--out", "out"]
    assert run(evaluate.main, "--policy", policy, *arguments)[0] == 0
    (folder,) = (run.folder / "out" / "responses").iterdir()
    found = rows(folder)
    assert len(found) == 7 and read_metadata(next(folder.iterdir()))["sampling"]["temperature"] == 0
    for row in found:  # every token has at least the probability of an average one
        assert min(row.ref_logprobs) > -np.log(20)


def test_figures_of_several_k_weights_and_answers_nobody_could_judge(policy):
    from conftest import make_trajectories

    given = make_trajectories(policy, count=4)
    for row, answer, valid, reward in zip(given, "aabb", (True, True, True, None), (1, 1, -1, -1), strict=True):
        row.prompt_id, row.answer, row.valid, row.reward = "p", answer, valid, reward
    values = per_problem(given, ks=(2, 4), weights=[0.1, 0.1, 0.9, 1.0])
    assert values["pass@2"] == [1 - 1 / 6] and values["maj@4"] == [1] and values["weighted@4"] == [0]
    assert values["maj@2"] == [0.5] and values["weighted@2"] == [0.5]
    twice = per_problem(
        [*given, *(replace(row, prompt_id="q") for row in given)], (4,), [0.1, 0.1, 0.9, 1.0, 1, 1, 1, 0]
    )
    assert twice["weighted@4"].tolist() == [0, 1]  # weights follow their responses
    assert values["invalid"] == [0.25] and values["ungraded"] == [0.25]


def test_what_follows_a_stop_text_is_not_graded(tmp_path):
    policy = str(make_policy(tmp_path / "base", max_position_embeddings=64))
    tokenizer = load_tokenizer(policy)

    class Fixed(Sampler):
        def sample(self, model, tokenizer, prompts, n, sampling, seed):
            return [[Response(tokenizer(text)["input_ids"], False) for text in ("#5;#6", "#5", ";#6")] for _ in prompts]

    class Last(Task):
        def grade(self, response, gold):
            answer = response.rpartition("#")[2] or None
            return Grade(1.0 if answer == gold else -1.0, answer is not None, answer)

    problems = [Problem("0", "2+3>", "5")]
    model = load_policy(policy)
    found = sample_and_grade(Fixed(), model, tokenizer, Last(), problems, 3, Sampling(stop=[";"], max_new_tokens=9), 0)
    assert [row.answer for row in found] == ["5", "5", None] and [row.reward for row in found] == [1, 1, -1]
    assert found[0].response == "#5;#6"  # what was sampled is stored whole
    found = sample_and_grade(Fixed(), model, tokenizer, Last(), problems, 3, Sampling(max_new_tokens=9), 0)
    assert [row.answer for row in found] == ["6", "5", "6"]


def test_a_description_tells_settings_apart_that_change_prompts_or_grades(policy, monkeypatch):
    def fingerprint(task, template=None):
        tokenizer = load_tokenizer(str(policy))
        tokenizer.chat_template = template
        about = describe(str(policy), tokenizer, "32-true", task, [Problem("0", "Q", "1", "S")], 2, Sampling(), 0)
        return json.dumps(about)

    class Mine(MATH):
        """Another grade, the same prompt."""

    tasks = [
        lambda: MATH(), lambda: Mine(), lambda: GSM8K(), lambda: GSM8K(marker="A:"), lambda: Verifier(),
        lambda: Verifier(GSM8K()), lambda: Verifier(MATH()), lambda: Verifier(Mine()), lambda: Verifier(GSM8K("A:")),
        lambda: Verifier(GSM8K(), balance=False),
    ]  # fmt: skip
    assert [fingerprint(task()) for task in tasks] == [fingerprint(task()) for task in tasks]
    assert len({fingerprint(task()) for task in tasks}) == len(tasks)
    before = fingerprint(GSM8K())
    monkeypatch.setattr(gsm8k, "EXAMPLES", gsm8k.EXAMPLES[:2])
    assert fingerprint(GSM8K()) != before
    assert fingerprint(GSM8K()) != fingerprint(GSM8K(), "{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_sample_what_one_does_where_one_of_them_runs_out_of_problems(tmp_path, policy, strategy):
    lines = (ROOT / "data" / "arithmetic" / "train.jsonl").read_text().splitlines(True)
    (tmp_path / "problems.jsonl").write_text("".join(lines[:66]))  # three files for two ranks
    command = [
        sys.executable, ROOT / "train.py", "predict", "--config", ROOT / "configs" / "arithmetic.yaml",
        f"--model.policy={policy}", "--data.problems=problems.jsonl", "--data.samples=2",
        "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    for name, more in (("one", []), ("two", TWO_RANKS[strategy])):
        more = [*command, *more, f"--data.out={name}"]
        done = subprocess.run(more, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and f"132 trajectories are under {name}" in done.stdout, done.stderr
    for one, other in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        np.testing.assert_allclose(other.ref_logprobs, one.ref_logprobs, atol=1e-6)
        assert replace(other, ref_logprobs=[]) == replace(one, ref_logprobs=[])


def test_two_devices_evaluate_as_one_does(run, policy, problems, monkeypatch):
    monkeypatch.setattr(evaluation, "PART", 32)  # as in the processes that are started
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(50)))
    given = ["--policy", policy, "--benchmark", f"arithmetic={problems}", "--samples", "2", "--rows", "64"]
    given += ["--verifier", ROOT / "data" / "arithmetic" / "verifier" / "base", "--critiques", "2"]
    assert run(evaluate.main, *given, "--out", "one")[0] == 0
    command = [sys.executable, ROOT / "evaluate.py", *given, "--out", "two", "--devices", "2", "--threads", "1"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    one, two = run.folder / "one", run.folder / "two"
    assert (one / "results.json").read_text() == (two / "results.json").read_text()
    assert "weighted@2" in (two / "results.json").read_text()
    folders = (sorted((path / "responses").iterdir()) for path in (one, two))
    for some, others, files in zip(*folders, (2, 4), strict=True):  # of 50 problems, of 100 responses to judge
        assert rows(some) == rows(others) and len(list(others.iterdir())) == files
    assert done.stdout.count("wrote results.json") == 1


def test_one_policy_at_a_time_is_in_memory(policy, monkeypatch):
    first = weakref.ref(evaluate.loaded(str(policy)))

    def load(name):
        assert first() is None
        return load_policy(name)

    monkeypatch.setattr(evaluate, "load_policy", load)
    evaluate.loaded(str(ROOT / "data" / "arithmetic" / "base"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_second_device_ends_with_the_first(run, policy, tmp_path):
    problems = tmp_path / "many.jsonl"
    problems.write_text("".join(f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(2000)))
    given = ["--policy", policy, "--benchmark", f"arithmetic={problems}", "--out", "out", "--devices", "2"]
    first = subprocess.Popen(
        [sys.executable, ROOT / "evaluate.py", *map(str, given)], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
    while not list(tmp_path.glob("out/responses/*/*.parquet")):
        assert first.poll() is None
        time.sleep(0.1)
    (second,) = [int(pid) for pid in children.read_text().split() if b"evaluate.py" in cmdline(pid)]
    first.kill()
    first.wait()
    for _ in range(100):
        if not cmdline(second):
            return
        time.sleep(0.1)
    pytest.fail("it goes on")


def cmdline(pid: int | str) -> bytes:
    """The command of a process; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
