"""The report on trajectory files against figures computed by hand, samples, and `inspect`."""

from conftest import make_trajectories, write

from topr.trajectories.__main__ import main, report, samples


def example(policy):
    """Seven trajectories of four groups, whose report can be computed by hand."""
    trajectories = make_trajectories(policy, count=7)
    for i, trajectory in enumerate(trajectories):
        trajectory.reward = [1, -1, 0.5, 0, -0.5, -1, -1][i]
        trajectory.group = trajectory.prompt_id = "aabcccd"[i]
        trajectory.valid = None if i == 0 else i < 5
        trajectory.prompt_ids = [4] * [1, 3, 3, 4, 5, 6, 1][i]
        trajectory.response = f"line {i}\nnext"
        trajectory.response_ids = [3] * (i + 1)
        trajectory.ref_logprobs = [-0.5] * (i + 1)
    return trajectories


def test_report_against_a_computation_by_hand(tmp_path, policy):
    text = report([str(write(tmp_path / "a.parquet", policy, example(policy), task="t"))])
    rows = {row[0]: row[1:] for row in map(str.split, text.splitlines()) if row}
    assert rows["task"] == ["t"] and rows["groups"] == ["4"] and rows["both_signs"] == ["1"]
    assert rows["positive_share"] == [str(2 / 7)]
    # count, mean, standard deviation, min, median, 95%, max
    assert rows["prompt_tokens"] == ["7", "3.286", "1.89", "1", "3", "5.7", "6"]
    assert rows["log_mu"] == ["7", "-2", "1.08", "-3.5", "-2", "-0.65", "-0.5"]
    assert rows["valid"][:2] == ["6", "0.6667"]


def test_samples_show_the_first_of_both_signs_in_readable_text(tmp_path, policy):
    rows = example(policy)
    rows[0].response = "\x1b[2J" + "a" * 1000
    positive, negative = samples([str(write(tmp_path / "a.parquet", policy, rows))], 1)
    assert positive.startswith("--- reward 1.0, finished ")
    assert "\x1b" not in positive and "\\x1b[2Ja" in positive  # it must not steer the terminal
    assert positive.endswith("a…") and negative.endswith("[response]\nline 1\nnext")


def test_inspect_prints_report_and_samples(run, tmp_path, policy):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", policy, example(policy))
    code, out, err = run(main, "inspect", "?.parquet")
    assert (code, err) == (0, "")
    assert "trajectories   14" in out and out.count("--- reward") == 2
