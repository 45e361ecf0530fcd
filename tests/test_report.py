"""`inspect` against figures computed by hand."""

from conftest import make_trajectories, write

from topr.trajectories.__main__ import main


def example(policy):
    """Seven trajectories of four groups, whose statistics can be computed by hand."""
    trajectories = make_trajectories(policy, count=7)
    for i, trajectory in enumerate(trajectories):
        trajectory.reward = [1, -1, 0.5, 0, -0.5, -1, -1][i]
        trajectory.group = trajectory.prompt_id = "aabcccd"[i]
        trajectory.finished = i < 5
        trajectory.prompt_ids = [4] * [1, 3, 3, 4, 5, 6, 1][i]
        trajectory.response = f"line {i}\nnext"
        trajectory.response_ids = [3] * (i + 1)
        trajectory.ref_logprobs = [-0.5] * (i + 1)
    return trajectories


def test_statistics_of_several_files_against_a_computation_by_hand(run, tmp_path, policy):
    rows = example(policy)
    write(tmp_path / "a.parquet", policy, rows[:3], task="t", iteration=1)
    write(tmp_path / "b.parquet", policy, rows[3:], task="t", iteration=2)
    code, text, err = run(main, "inspect", "?.parquet")
    assert (code, err) == (0, "")
    shown = {row[0]: row[1:] for row in map(str.split, text.splitlines()) if row}
    assert shown["task"] == ["t"] and "iteration" not in shown  # they differ
    assert shown["group"][:2] == ["7", "4"]  # trajectories, groups
    assert shown["finished"] == ["7", "2", "True", "5"]
    # count, mean, standard deviation, min, quartiles, max
    assert shown["prompt_tokens"] == ["7", "3.286", "1.89", "1", "2", "3", "4.5", "6"]
    assert shown["log_mu"] == ["7", "-2", "1.08", "-3.5", "-2.75", "-2", "-1.25", "-0.5"]


def test_the_first_trajectories_are_shown_in_readable_text(run, tmp_path, policy):
    rows = example(policy)
    rows[0].response = "\x1b[2J" + "a" * 1000
    rows[0].gold = "8"
    write(tmp_path / "a.parquet", policy, rows)
    _, text, _ = run(main, "inspect", "a.parquet")
    _, first, second = text.split("--- ")
    assert first.startswith("reward 1, answer None, gold 8\n[prompt]\n")
    assert "\x1b" not in first and "\\x1b[2Ja" in first  # it must not steer the terminal
    assert first.endswith("a…\n\n") and second.endswith("[response]\nline 1\nnext\n")
