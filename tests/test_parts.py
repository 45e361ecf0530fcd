"""Sampling, grading and writing in parts: what a killed command resumes, and what it never mixes."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, TWO_RANKS, make_policy

from topr.evaluation import (
    SamplingJob,
    check_prompts,
    explain_out_of_memory,
    pipeline,
    sample_and_grade,
)
from topr.evaluation.pipeline import read_parts
from topr.io import InputError
from topr.policy import load_policy, load_tokenizer
from topr.sampling import LocalSampler, Response, Sampler, Sampling
from topr.tasks import GSM8K, MATH, Arithmetic, Grade, Problem, Task, Verifier
from topr.tasks.task import PROMPTS
from topr.trajectories import read_metadata, read_trajectories

SHORT = Sampling(top_k=0, max_new_tokens=8)
PROBLEMS = [Problem(str(i), f"{i}+1>", str(i + 1)) for i in range(5)]


class AfterHash(Task):
    """The answer follows the last #."""

    name = "after hash"

    def grade(self, response, gold):
        answer = response.rpartition("#")[2] if "#" in response else None
        return Grade(1.0 if answer == gold else -1.0, answer is not None, answer)


class Fixed(Sampler):
    """The same responses, texts and whether an end token follows, to every prompt."""

    def __init__(self, *given: tuple[str, bool]):
        self.given = given

    def sample(self, policy, prompts, n, sampling, seed, numbers=None):
        ids = [(policy.tokenizer(text)["input_ids"], finished) for text, finished in self.given]
        end = policy.tokenizer.eos_token_id
        return [
            [Response(tokens + [end] * finished, finished) for tokens, finished in ids]
            for _ in prompts
        ]


@pytest.fixture
def loaded(policy, monkeypatch):
    monkeypatch.setattr(pipeline, "PART", 2)
    return load_policy(str(policy))


def job(base, **changes) -> SamplingJob:
    return replace(SamplingJob(str(base), Arithmetic(), PROBLEMS, 3, SHORT, 7), **changes)


def write(job, folder, loaded, count: int | None = None) -> list[str]:
    """Write missing parts, all or the first `count`; the names of the files."""
    missing = job.missing_parts(folder)[:count]
    for path, problems in missing:
        job.sample_part(path, problems, LocalSampler(), loaded)
        assert path.exists()
    return [path.name for path, _ in missing]


def test_a_killed_job_resumes_at_the_first_problem_without_responses(tmp_path, policy, loaded):
    assert write(job(policy), tmp_path / "whole", loaded) == [
        f"part-0000{i}.parquet" for i in range(3)
    ]
    assert len(write(job(policy), tmp_path / "cut", loaded, count=1)) == 1
    (tmp_path / "cut" / ".part-00001.parquet.99999999.tmp").write_text("left by a killed writer")
    assert write(job(policy), tmp_path / "cut", loaded) == [
        "part-00001.parquet",
        "part-00002.parquet",
    ]
    assert read_parts(tmp_path / "cut") == read_parts(tmp_path / "whole")
    assert [row.prompt_id for row in read_parts(tmp_path / "cut")] == [
        str(i) for i in range(5) for _ in range(3)
    ]
    assert not list((tmp_path / "cut").glob(".*")) and not job(policy).missing_parts(
        tmp_path / "cut"
    )
    metadata = read_metadata(tmp_path / "cut" / "part-00002.parquet")
    assert {key: metadata[key] for key in job(policy).metadata} == job(policy).metadata


def test_a_part_is_the_same_under_another_name(tmp_path, policy, loaded):
    write(job(policy), tmp_path, loaded)
    job(policy).sample_part(tmp_path / "val.parquet", PROBLEMS[2:4], LocalSampler(), loaded)
    assert read_trajectories(tmp_path / "val.parquet") == read_trajectories(
        tmp_path / "part-00001.parquet"
    )


def test_each_part_and_each_seed_has_responses_of_its_own(tmp_path, policy, loaded):
    same = [replace(PROBLEMS[0], id=str(i)) for i in range(4)]
    for seed in (7, 8):
        write(job(policy, problems=same, seed=seed), tmp_path / str(seed), loaded)
    parts = [[row.response_ids for row in read_parts(tmp_path / str(seed))] for seed in (7, 8)]
    assert parts[0] != parts[1] and parts[0][:6] != parts[0][6:]


@pytest.mark.parametrize(
    "change", ["seed", "samples", "sampling", "problems", "precision", "task", "policy", "none"]
)
def test_two_jobs_never_mix(tmp_path, policy, loaded, change):
    write(job(policy), tmp_path / "out", loaded, count=2)
    other = {
        "seed": 8, "samples": 4, "sampling": replace(SHORT, temperature=0.5), "precision": "bf16-mixed",
        "problems": [*PROBLEMS[:4], replace(PROBLEMS[4], gold="0")], "task": Arithmetic(operations=(1, 1)),
        "policy": change == "policy" and str(make_policy(tmp_path / "other", seed=3)),
    }  # fmt: skip
    second = job(policy, **{change: other[change]} if change != "none" else {})
    if change == "none":
        assert [path.name for path, _ in second.missing_parts(tmp_path / "out")] == [
            "part-00002.parquet"
        ]
        return
    with pytest.raises(InputError, match="holds other trajectories than this command samples"):
        second.missing_parts(tmp_path / "out")


def test_a_job_tells_settings_apart_that_change_prompts_or_grades(policy, monkeypatch):
    def digest(task, template=None):
        monkeypatch.setattr(load_tokenizer(str(policy)), "chat_template", template)
        return json.dumps(job(policy, task=task, problems=[Problem("0", "Q", "1", "S")]).metadata)

    class Mine(MATH):
        """Another grade, the same prompt."""

    tasks = [
        lambda: MATH(), lambda: Mine(), lambda: GSM8K(), lambda: GSM8K(marker="A:"), lambda: Verifier(),
        lambda: Verifier(GSM8K()), lambda: Verifier(MATH()), lambda: Verifier(Mine()), lambda: Verifier(GSM8K("A:")),
        lambda: Verifier(GSM8K(), balance=False),
    ]  # fmt: skip
    assert [digest(task()) for task in tasks] == [digest(task()) for task in tasks]
    assert len({digest(task()) for task in tasks}) == len(tasks)
    before = digest(GSM8K())
    monkeypatch.setitem(
        PROMPTS, "gsm8k", {**PROMPTS["gsm8k"], "examples": PROMPTS["gsm8k"]["examples"][:2]}
    )
    assert digest(GSM8K()) != before
    assert digest(GSM8K()) != digest(GSM8K(), "{% for m in messages %}{{ m.content }}{% endfor %}")


def graded(policy, task, *given, **sampling) -> list:
    return sample_and_grade(
        Fixed(*given), policy, task, PROBLEMS[4:], 3, replace(SHORT, **sampling), 0
    )


def test_what_follows_a_stop_text_is_not_graded(loaded):
    given = ("#5;#6", False), ("#5", False), (";#6", False)
    found = graded(loaded, AfterHash(), *given, stop=[";"])
    assert [row.answer for row in found] == ["5", "5", None] and [row.reward for row in found] == [
        1,
        1,
        -1,
    ]
    assert found[0].response == "#5;#6"  # what was sampled is stored whole
    assert [row.answer for row in graded(loaded, AfterHash(), *given)] == ["6", "5", "6"]


def test_a_response_without_end_is_invalid_where_the_task_requires_an_end(loaded):
    class Ending(AfterHash):
        requires_end = True

    given = ("#5", True), ("#5", False)
    assert [(row.reward, row.valid, row.answer) for row in graded(loaded, Ending(), *given)] == [
        (1.0, True, "5"), (-1.0, False, None),
    ]  # fmt: skip
    assert [(row.reward, row.valid) for row in graded(loaded, AfterHash(), *given)] == [
        (1.0, True),
        (1.0, True),
    ]
    ended, cut = graded(loaded, Ending(), *given)
    assert (
        ended.response == cut.response == "#5"
        and ended.response_ids == [*cut.response_ids, 1]
        and ended.finished
    )
    assert Arithmetic.requires_end


def test_log_probs_are_stored_for_every_token(tmp_path, policy, loaded):
    write(job(policy), tmp_path, loaded)
    for row in read_parts(tmp_path):
        assert len(row.ref_logprobs) == len(row.response_ids) > 0 and max(row.ref_logprobs) < 0
        assert row.prompt == row.group + "+1>" == PROBLEMS[int(row.prompt_id)].prompt


def test_prompts_that_do_not_fit_are_found_before_sampling(policy):
    check_prompts(str(policy), Arithmetic(), PROBLEMS, replace(SHORT, max_new_tokens=60))
    with pytest.raises(
        InputError, match="problem '0'.*max_new_tokens = 61 exceed the policy's context of 64"
    ):
        check_prompts(str(policy), Arithmetic(), PROBLEMS, replace(SHORT, max_new_tokens=61))
    with pytest.raises(InputError, match="problem 'x'.*prompt is empty"):
        check_prompts(str(policy), Arithmetic(), [*PROBLEMS, Problem("x", "", "1")], SHORT)


def test_out_of_memory_names_the_key_to_lower():
    for error in (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()):
        found = pytest.raises(InputError, match="out of memory in sampling .*; lower rows, now 8")
        with found, explain_out_of_memory("sampling", "rows, now 8"):
            raise error
    with pytest.raises(RuntimeError, match="another"), explain_out_of_memory("sampling", "rows"):
        raise RuntimeError("another")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_predict_what_one_does_where_one_of_them_runs_out_of_problems(
    tmp_path, policy, strategy
):
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
        assert done.returncode == 0 and f"132 trajectories are under {name}" in done.stdout, (
            done.stderr
        )
    for one, other in zip(read_parts(tmp_path / "one"), read_parts(tmp_path / "two"), strict=True):
        np.testing.assert_allclose(other.ref_logprobs, one.ref_logprobs, atol=1e-6)
        assert replace(other, ref_logprobs=[]) == replace(one, ref_logprobs=[])
