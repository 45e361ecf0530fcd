"""The report on trajectory files, and inspect."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
from conftest import make_trajectories, write

from topr.report import report, samples
from topr.trajectories import main


def example(policy):
    """Seven trajectories of four groups, whose report can be computed by hand."""
    trajectories = make_trajectories(policy, count=7)
    rewards, groups = [1, -1, 0.5, 0, -0.5, -1, -1], "aabcccd"
    lengths, finished = [1, 2, 3, 4, 6, 6, 1], [True] * 5 + [False] * 2
    for i, t in enumerate(trajectories):
        t.reward, t.group, t.prompt_id, t.finished = rewards[i], groups[i], groups[i], finished[i]
        t.response_ids, t.ref_logprobs = [3] * lengths[i], [-0.5] * lengths[i]
        t.prompt_ids, t.response = [4] * [1, 3, 3, 4, 5, 6, 1][i], f"line {i}\nnext"
        t.valid = None if i == 0 else i < 5
    trajectories[6].ref_logprobs = [-0.25]
    trajectories[0].answer, trajectories[0].gold = "7", "8"
    return trajectories


def test_report_against_a_computation_by_hand(tmp_path, policy):
    file = str(write(tmp_path / "a.parquet", policy, example(policy), task="t", sampling={"top_k": 9}, iteration=2))
    text = report([file])
    for line in (
        "task              t, iteration 2",
        "sampling          top_k: 9",
        # the last is the first again; others share a prompt or a response alone
        "trajectories      7 of 4 prompts in 4 groups, 1 exact duplicates",
        "finished          71.4%, truncated 28.6% (2); invalid 33.3%",  # 2 of the 6 graded
        "prompt tokens     min 1, median 3, 95% 6, max 6",
        "response tokens   min 1, median 3, 95% 6, max 6",
        # 3 of 7 are >= 0, and 1.5 of the 5 units of |reward| positive
        "reward            mean -0.286; share >= 0: p = 0.429, effective share at baseline 0: 0.300",
        # a reward of 0 is a positive
        "groups            both signs 2, only positives 1, only negatives 1",
        "log mu            of a response: min -3.0, median -1.5, 95% -0.3, max -0.2; of a token: mean -0.489",
    ):
        assert line in text
    histogram = text[text.index("response tokens from") :].splitlines()
    assert [row.split()[0] for row in histogram[1:6]] == ["1", "2", "3", "4", "6"]
    assert histogram[1].split()[1:] == ["█" * 12, "1", "█" * 12, "1"]
    values = text[text.index("reward from") :].splitlines()[1:]
    assert [(row.split()[0], row.split()[-1]) for row in values] == [
        ("-1", "3"), ("-0.5", "1"), ("0", "0"), ("0.5", "0"), ("1", "0"),
    ]  # fmt: skip


def test_histogram_of_many_values_counts_each_once(tmp_path, policy):
    trajectories = make_trajectories(policy, count=200)
    for i, t in enumerate(trajectories):
        t.reward = i / 100 - 1
        t.response_ids, t.ref_logprobs = [3] * (1 + i % 57), [-0.5] * (1 + i % 57)
    text = report([str(write(tmp_path / "a.parquet", policy, trajectories))])
    for name in ("response tokens from", "reward from"):
        rows = text[text.index(name) :].split("\n\n")[0].splitlines()[1:]
        counts = [int(word) for row in rows for word in row.split()[1:] if not word.startswith("█")]
        assert len(rows) == 10 and sum(counts) == 200
    assert rows[0].split()[-1] == "20" and rows[9].split()[-2] == "20"


def test_rewards_of_plus_and_minus_one_need_no_histogram(tmp_path, policy):
    assert "reward from" not in report([str(write(tmp_path / "a.parquet", policy, make_trajectories(policy)))])


def test_several_files_are_one(tmp_path, policy):
    rows = example(policy)
    whole = str(write(tmp_path / "whole.parquet", policy, rows, iteration=1))
    parts = [str(write(tmp_path / f"{i}.parquet", policy, rows[i : i + 3], iteration=i)) for i in (0, 3, 6)]
    one, several = report([whole]), report(parts)
    assert several.splitlines()[4:] == one.splitlines()[4:]
    assert "iteration 0 | 3 | 6" in several and "and 2 more" in several
    for count in (2, 9):  # two skip the second file
        assert list(samples(parts, count)) == list(samples([whole], count))


def test_samples_are_found_in_large_row_groups(tmp_path, policy):
    file = write(tmp_path / "a.parquet", policy, example(policy))
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table] * 4000), tmp_path / "large.parquet")  # several batches of one row group
    shown = [text.splitlines()[-2] for text in samples([str(tmp_path / "large.parquet")], 2)]
    assert shown == ["line 0", "line 3", "line 1", "line 6"]  # the first and the last of each sign


def test_samples_show_both_signs_in_readable_text(tmp_path, policy):
    rows = example(policy)
    rows[0].response = "\x1b[2J" + "a" * 1000 + "\nthe end"
    file = str(write(tmp_path / "a.parquet", policy, rows))
    positive, negative = samples([file], 1)
    assert positive.startswith(f"--- positive: reward 1, finished, answer 7, gold 8\n[prompt]\n{rows[0].prompt}\n")
    assert "\x1b" not in positive and "\\x1b[2J" in positive  # nothing steers the terminal
    assert "[… 215 characters …]" in positive and positive.endswith("a\nthe end")
    assert negative.endswith("[response]\nline 1\nnext")
    shown = [text.splitlines()[-2] for text in samples([file], 9)]
    assert shown[1:] == [f"line {i}" for i in (2, 3, 1, 4, 5, 6)]  # all of them, each once


def test_inspect_prints_report_and_samples(run, tmp_path, policy):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", policy, example(policy))
    code, out, err = run(main, "inspect", "?.parquet")
    assert (code, err) == (0, "")
    assert "trajectories      14 of 4 prompts in 4 groups, 8 exact duplicates" in out
    assert out.count("--- positive") == out.count("--- negative") == 1
    code, out, _ = run(main, "inspect", "a.parquet", "b.parquet", "--samples=0")
    assert code == 0 and "---" not in out and "14 of 4" in out


def test_inspect_refuses_what_is_no_trajectory_file(run, tmp_path, policy):
    (tmp_path / "text.parquet").write_text("{}")
    pq.write_table(pa.table({"prompt": ["1"]}), tmp_path / "other.parquet")
    rows = example(policy)
    write(tmp_path / "empty.parquet", policy, [])
    rows[2].reward = math.nan
    write(tmp_path / "bad.parquet", policy, rows)
    for arguments, words in {
        ("text.parquet",): "text.parquet is no readable Parquet file",
        ("other.parquet",): "other.parquet: column 'prompt_id' is missing",
        ("nowhere.parquet",): "inspect: 'nowhere.parquet' is no file",
        ("empty.parquet",): "empty.parquet holds no trajectory",
        ("bad.parquet",): "bad.parquet, row 2 (prompt 'b'): the reward is NaN or infinite",
        ("bad.parquet", "--samples=-1"): "--samples is -1",
    }.items():
        code, out, err = run(main, "inspect", *arguments)
        assert code == 2 and words in err and err.count("\n") == 1 and out == ""
