"""The study on word problems: its start, and a quick run with a small model, killed and resumed."""

import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_real_data import CHAT, make_llama, read_rows

from data.word_problems import make
from topr.io import InputError
from topr.policy import load_policy
from topr.trajectories.rows import load_rows

DATA = ROOT / "data" / "word_problems"


@pytest.fixture
def base(tmp_path):
    """A random policy that answers chat messages."""
    rows = load_rows(DATA / "train.jsonl.gz", {})
    policy = make_llama(tmp_path / "base", [row["question"] + row["solution"] for row in rows])
    policy.tokenizer.chat_template = CHAT
    policy.tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.slow
def test_a_start_has_imitated_other_problems_than_it_trains_on(base, tmp_path):
    out = tmp_path / "start"
    make.make(str(base), out, solutions=8, problems=4, tests=3)
    load_policy(str(out / "base"))
    found = {name: read_rows(out / f"{name}.jsonl") for name in ("train", "val", "test", "svamp")}
    assert [len(rows) for rows in found.values()] == [4, 3, 3, 3]
    questions = [row["question"] for rows in found.values() for row in rows]
    assert len(set(questions)) == len(questions)
    imitated = read_rows(out / "solutions.jsonl")
    assert len(imitated) == 8 and imitated[0]["response"].endswith(".")
    text = "".join(message["content"] for row in imitated for message in row["prompt"])
    assert not any(question in text for question in questions)


@pytest.mark.parametrize("content", [None, b"GGUF"])
def test_a_file_that_cannot_be_converted_gets_a_sentence(tmp_path, content):
    file = tmp_path / "model.gguf"
    if content:
        file.write_bytes(content)
    with pytest.raises(InputError, match="cannot be converted .*; give a file of a Llama model"):
        make.make(str(file), tmp_path / "out")


@pytest.mark.slow
def test_a_quick_study_that_is_killed_goes_on_and_ends_with_a_table(base, tmp_path):
    command = [sys.executable, DATA / "run.py", "--quick=true", f"--policy={base}"]
    command += [f"--out={tmp_path / 'out'}", "--workers=2"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cache = tmp_path / "out" / "cache"
    while len(list(cache.glob("*/output"))) < 3:  # the start, measured and sampled from
        assert started.poll() is None
        time.sleep(0.1)
    started.kill()
    started.wait()
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("*/output")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items())
    report = (tmp_path / "out/words_quick/claims.md").read_text()
    for row in ("| before training |", "| TOPR |", "| positives only |", "`TOPR` - `before"):
        assert row in report
    assert (tmp_path / "out/words_quick/claim_10.png").stat().st_size > 10_000
