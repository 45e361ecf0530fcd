"""The report on trajectory files against figures computed by hand, samples, and `inspect`."""

from conftest import make_trajectories, write

from topr.trajectories.__main__ import main, report, samples


def example(policy):
    """Seven trajectories of four groups, whose report can be computed by hand."""
    trajectories = make_trajectories(policy, count=7)
    rewards = [1, -1, 0.5, 0, -0.5, -1, -1]
    prompt_lengths = [1, 3, 3, 4, 5, 6, 1]
    lengths = [1, 2, 3, 4, 6, 6, 1]
    for i, trajectory in enumerate(trajectories):
        trajectory.reward = rewards[i]
        trajectory.group = trajectory.prompt_id = "aabcccd"[i]
        trajectory.finished = i < 5
        trajectory.valid = None if i == 0 else i < 5
        trajectory.prompt_ids = [4] * prompt_lengths[i]
        trajectory.response = f"line {i}\nnext"
        trajectory.response_ids = [3] * lengths[i]
        trajectory.ref_logprobs = [-0.5] * lengths[i]
    trajectories[6].ref_logprobs = [-0.25]
    turns = trajectories[5]  # one token more, which was not sampled
    turns.response_ids = [3] * 7
    turns.ref_logprobs = [-9.0] + [-0.5] * 6
    turns.sampled = [False] + [True] * 6
    trajectories[0].answer = "7"
    trajectories[0].gold = "8"
    return trajectories


def test_report_against_a_computation_by_hand(tmp_path, policy):
    about = {"task": "t", "sampling": {"top_k": 9}, "iteration": 2}
    text = report([str(write(tmp_path / "a.parquet", policy, example(policy), **about))])
    for line in (
        "task          t",
        "iteration     2",
        "sampling      {'top_k': 9}",
        "trajectories  7 of 4 prompts in 1 file(s)",
        "not finished  2 (28.6%)",
        "invalid       33.3% of 6 graded",
        "unknown       not recorded",
        # 3 of 7, and 1.5 of the 5 units of |reward|
        "reward >= 0   42.9%, effective share at baseline 0: 30.0%",
        # a reward of 0 is a positive
        "groups        4, 2 with both signs, 1 negative",
        "log mu        -0.489 per token",
    ):
        assert line in text.splitlines()
    table = {row[0]: row[1:] for row in map(str.split, text.splitlines()) if row}
    # mean, standard deviation, min, median, 95%, max
    assert table["prompt_tokens"] == ["3.286", "1.89", "1", "3", "5.7", "6"]
    assert table["log_mu"][0] == "-1.607"
    assert table["log_mu"][2:] == ["-3", "-1.5", "-0.325", "-0.25"]


def test_unknown_tokens_are_those_of_each_files_own_tokenizer(tmp_path, policy):
    files = []
    for i, unknown in enumerate(([3], [])):
        about = {"sampling": {"unknown_tokens": unknown}}
        files.append(str(write(tmp_path / f"{i}.parquet", policy, example(policy), **about)))
    assert "unknown       50.0% of the response tokens" in report(files)


def test_several_files_are_read_as_one(tmp_path, policy):
    rows = example(policy)
    whole = [str(write(tmp_path / "whole.parquet", policy, rows, iteration=1))]
    parts = []
    for i in (0, 3, 6):
        parts.append(str(write(tmp_path / f"{i}.parquet", policy, rows[i : i + 3], iteration=i)))
    expected = report(whole).replace("iteration     1", "iteration     0 | 3 | 6")
    assert report(parts) == expected.replace("1 file(s)", "3 file(s)")
    assert list(samples(parts, 9)) == list(samples(whole, 9))


def test_samples_show_the_first_of_both_signs_in_readable_text(tmp_path, policy):
    rows = example(policy)
    rows[0].response = "\x1b[2J" + "a" * 1000 + "\nthe end"
    file = str(write(tmp_path / "a.parquet", policy, rows))
    positive, negative = samples([file], 1)
    heading = "--- positive: reward 1.0, finished True, valid None, answer 7, gold 8\n[prompt]\n"
    assert positive.startswith(heading)
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
    assert "trajectories  14 of 4 prompts in 2 file(s)" in out
    assert out.count("--- positive") == out.count("--- negative") == 1
    _, out, _ = run(main, "inspect", "a.parquet", "b.parquet", "--samples=0")
    assert "14 of 4" in out and "---" not in out
