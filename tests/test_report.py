"""The command inspect: the report on trajectory files against figures by hand, samples."""

import math

from conftest import make_trajectories, rejected, write

from topr.trajectories.__main__ import main, report, samples


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
    t = trajectories[5]  # one token more, which was not sampled
    t.response_ids, t.ref_logprobs, t.sampled = (
        [3, *t.response_ids],
        [-9.0, *t.ref_logprobs],
        [False] + [True] * 6,
    )
    trajectories[0].answer, trajectories[0].gold = "7", "8"
    return trajectories


def test_report_against_a_computation_by_hand(tmp_path, policy):
    about = {"task": "t", "sampling": {"top_k": 9}, "iteration": 2}
    text = report([str(write(tmp_path / "a.parquet", policy, example(policy), **about))])
    for line in (
        "task          t",
        "iteration     2",
        "sampling      {'top_k': 9}",
        "trajectories  7 of 4 prompts",
        "groups        4, 2 of them with positives and negatives",  # a reward of 0 is positive
    ):
        assert line in text.splitlines()
    table = {row[0]: row[1:] for line in text.splitlines() if (row := line.split())}
    # count, mean, standard deviation, min, median, 95%, max
    assert table["prompt_tokens"] == ["7", "3.286", "1.89", "1", "3", "5.7", "6"]
    assert table["positive"][:2] == ["7", "0.4286"]
    assert table["finished"][:2] == ["7", "0.7143"]
    assert table["valid"][:2] == ["6", "0.6667"]  # one was not graded
    # six of -0.5, one of -0.25; the token that was not sampled does not count
    assert table["log_mu_per_token"][1] == "-0.4643" and table["log_mu_per_token"][3] == "-0.5"


def test_trajectories_without_verdicts_are_not_counted_as_invalid(tmp_path, policy):
    text = report([str(write(tmp_path / "a.parquet", policy, make_trajectories(policy)))])
    table = {row[0]: row[1:] for line in text.splitlines() if (row := line.split())}
    assert table["valid"][:2] == ["0", "NaN"]


def test_several_files_are_read_as_one(tmp_path, policy):
    rows = example(policy)
    whole = str(write(tmp_path / "whole.parquet", policy, rows, iteration=1))
    parts = [
        str(write(tmp_path / f"{i}.parquet", policy, rows[i : i + 3], iteration=i))
        for i in (0, 3, 6)
    ]
    one, several = report([whole]), report(parts)
    assert several.replace("0 | 3 | 6", "1") == one != several
    assert list(samples(parts, 9)) == list(samples([whole], 9))


def test_samples_show_the_first_of_both_signs_in_readable_text(tmp_path, policy):
    rows = example(policy)
    rows[0].response = "\x1b[2J" + "a" * 1000 + "\nthe end"
    file = str(write(tmp_path / "a.parquet", policy, rows))
    positive, negative = samples([file], 1)
    assert positive.startswith(
        "--- positive: reward 1.0, finished True, valid None, answer 7, gold 8\n[prompt]\n"
    )
    assert "\x1b" not in positive and "\\x1b[2J" in positive  # it must not steer the terminal
    assert "[… 215 characters …]" in positive and positive.endswith("a\nthe end")
    assert negative.endswith("[response]\nline 1\nnext")
    shown = [text.splitlines()[-2] for text in samples([file], 9)]
    assert shown[1:] == [f"line {i}" for i in (2, 3, 1, 4, 5, 6)]


def test_inspect_prints_report_and_samples(run, tmp_path, policy):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", policy, example(policy))
    code, out, err = run(main, "inspect", "?.parquet")
    assert (code, err) == (0, "")
    assert "trajectories  14 of 4 prompts" in out
    assert out.count("--- positive") == out.count("--- negative") == 1
    code, out, _ = run(main, "inspect", "a.parquet", "b.parquet", "--samples=0")
    assert code == 0 and "---" not in out and "14 of 4" in out


def test_inspect_rejects_what_is_no_trajectory_file(run, tmp_path, policy):
    (tmp_path / "text.parquet").write_text("{}")
    rows = example(policy)
    write(tmp_path / "good.parquet", policy, rows)
    rows[2].reward = math.nan
    write(tmp_path / "bad.parquet", policy, rows)
    for arguments, sentence in {
        ("text.parquet",): "text.parquet cannot be read",
        ("nowhere.parquet",): "inspect: 'nowhere.parquet' is no file",
        ("bad.parquet",): "bad.parquet, row 2 (prompt 'b'): the reward is NaN",
        ("good.parquet", "--samples=-1"): "samples",
        (): "files",
    }.items():
        rejected(run, sentence, "inspect", *arguments, main=main)
    assert run(main, "inspect", "good.parquet")[0] == 0
