"""Curation: which rows each way keeps, against brute force; files in and out."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, make_trajectories, rejected, write

from topr.io import InputError
from topr.trajectories import read_metadata, read_trajectories
from topr.trajectories.__main__ import main
from topr.trajectories.curate import curate, of_each_group, with_share


def cases(count=60):
    """Random rewards and groups of uneven sizes, their rows mixed."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        size = rng.integers(1, 80)
        reward = rng.choice([-1.0, -1.0, 0.0, 0.5, 1.0], size)
        group = rng.integers(0, rng.integers(1, 12), size)
        yield seed, pd.DataFrame({"reward": reward, "group": group})


def test_anna_karenina_against_brute_force():
    for seed, rows in cases():
        budget = 1 + seed % 6
        expected = []
        for name in set(rows["group"]):
            members = [row for row in rows.index if rows["group"][row] == name]
            correct = [row for row in members if rows["reward"][row] > 0][:1]
            incorrect = [row for row in members if rows["reward"][row] <= 0]
            expected += correct + incorrect[: budget - len(correct)]
        assert of_each_group(rows, "anna_karenina", budget, None).tolist() == sorted(expected)


def test_uniform_fills_the_budget_of_each_group_with_rows_that_each_stand_the_same_chance():
    for seed, rows in cases():
        kept = of_each_group(rows, "uniform", 3, np.random.default_rng(seed)).tolist()
        assert kept == sorted(set(kept))
        sizes = rows["group"].value_counts().clip(upper=3)
        assert Counter(rows["group"][kept]) == sizes.to_dict()
    rows = pd.DataFrame({"group": [0] * 6 + [1] * 2 + [0] * 2})
    drawn = Counter()
    for seed in range(1000):
        kept = of_each_group(rows, "uniform", 2, np.random.default_rng(seed))
        drawn.update(kept.tolist())
    assert len(drawn) == 10 and drawn[6] == drawn[7] == 1000
    # each of the eight is drawn 250 times of 1,000, give or take 14
    assert all(abs(count - 250) < 5 * 14 for row, count in drawn.items() if row not in (6, 7))


def share(positives, negatives, wanted, total=None) -> tuple[int, int]:
    """Positives and negatives that are kept of so many."""
    reward = np.array([1.0] * positives + [-1.0] * negatives)
    kept = with_share(reward, wanted, total, np.random.default_rng(0))
    assert kept.tolist() == sorted(set(kept.tolist()))
    return int((reward[kept] > 0).sum()), int((reward[kept] < 0).sum())


def test_share_keeps_as_many_as_the_scarce_sign_allows_or_a_total():
    assert share(300, 700, 0.1) == (78, 700)
    assert share(300, 700, 0.5) == (300, 300)
    assert share(9, 3, 0.6) == (4, 3)
    for wanted, total in ((0.1, 500), (0.25, 10), (0.9, 50), (0.5, 5), (0.5, 7)):
        positives, negatives = share(300, 700, wanted, total)
        assert positives + negatives == total
        assert abs(positives - wanted * total) <= 0.5
    for arguments in ((300, 700, 0.5, 602), (300, 700, 0.1, 800), (1, 1, 0.1), (0, 9, 0.1)):
        with pytest.raises(InputError, match="are too few"):
            share(*arguments)


def test_selections_of_the_shipped_data_stay_the_same():
    """Row numbers of the first release: a curated file is reproduced by its arguments."""
    data = ROOT / "data" / "arithmetic" / "train.parquet"
    rows = pd.read_parquet(data, columns=["reward", "group"])
    rng = np.random.default_rng
    for kept, count, first, checksum in (
        (of_each_group(rows, "uniform", 3, rng(7)), 1500, [9, 12, 15, 16, 17], 6002631687),
        (of_each_group(rows, "anna_karenina", 8, None), 3973, [0, 1, 2, 3, 4], 42082087866),
        (with_share(rows["reward"], 0.1, None, rng(0)), 6346, [0, 1, 3, 4, 6], 108053082719),
        (with_share(rows["reward"], 0.37, 1000, rng(11)), 1000, [3, 15, 30, 35, 37], 2648144939),
    ):
        assert (len(kept), kept[:5].tolist()) == (count, first)
        assert (kept * np.arange(1, len(kept) + 1)).sum() == checksum


@pytest.fixture
def parts(tmp_path, policy):
    """Two files whose groups go over their border, and their rows."""
    rows = make_trajectories(policy, 40)
    about = {"task": "t", "sampling": {"top_k": 0, "seed": 1}}
    a = write(tmp_path / "a", policy, rows[:18], **about)
    b = write(tmp_path / "b", policy, rows[18:], **about)
    return [str(a), str(b)], read_trajectories(a) + read_trajectories(b)


def test_kept_rows_do_not_change_and_the_metadata_says_how_they_were_chosen(tmp_path, parts):
    files, rows = parts
    table = pd.DataFrame([vars(row) for row in rows])
    out = tmp_path / "kept.parquet"
    curate("anna_karenina", files, out, budget=2, iteration=3)
    kept = of_each_group(table, "anna_karenina", 2, None)
    assert read_trajectories(out) == [rows[row] for row in kept]  # ids and log mu to the bit
    metadata = read_metadata(out)
    done = metadata["sampling"].pop("curation")
    assert metadata == read_metadata(files[0]) | {"iteration": 3}
    assert (done["way"], done["budget"], done["seed"]) == ("anna_karenina", 2, 0)


def test_metadata_is_what_all_files_agree_on(tmp_path, policy):
    rows = make_trajectories(policy, 8)

    def merged(*metadata):
        files = []
        for i, entry in enumerate(metadata):
            files.append(str(write(tmp_path / f"{i}.parquet", policy, rows, **entry)))
        curate("uniform", files, tmp_path / "kept.parquet", budget=9, overwrite=True)
        return read_metadata(tmp_path / "kept.parquet")

    entry = {"task": "t", "sampling": {"top_k": 0, "seed": 1}, "iteration": 2}
    other = {"task": "t", "sampling": {"top_k": 0, "seed": 2}, "iteration": 3}
    both = merged(entry, other)
    assert (both["task"], both["iteration"]) == ("t", None) and both["policy"]
    assert both["sampling"].keys() == {"curation"}
    assert merged({}, {"precision": "bf16-mixed"})["precision"] is None
    with pytest.raises(InputError, match="different tokenizers"):
        merged({}, {}, {"tokenizer": "another"})


def test_a_group_and_its_prompt_are_told_apart(tmp_path, policy):
    rows = make_trajectories(policy, 8)
    for number, row in enumerate(rows):
        row.group, row.prompt = ("1", "23+4>") if number < 4 else ("12", "3+4>")
    file = str(write(tmp_path / "a.parquet", policy, rows))
    curate("uniform", [file], tmp_path / "kept.parquet", budget=3)
    kept = read_trajectories(tmp_path / "kept.parquet")
    assert [row.group for row in kept] == ["1"] * 3 + ["12"] * 3


def test_bad_input_is_rejected_beside_good_input(run, tmp_path, policy, parts):
    files, _ = parts
    bad = make_trajectories(policy, 8)
    bad[5].ref_logprobs[0] = 0.5
    write(tmp_path / "bad.parquet", policy, bad)
    good = ["curate", "uniform", *files, "--budget=2", "--out=kept.parquet"]
    for place, value, words in (
        (1, "best", "best"),
        (3, "nowhere.parquet", "nowhere.parquet cannot be read"),
        (3, "bad.parquet", "bad.parquet, row 5: ref_logprobs"),
        (5, f"--out={files[1]}", "is one of the files that are read"),
    ):
        rejected(run, words, *good[:place], value, *good[place + 1 :], main=main)
    code, out, err = run(main, *good)
    assert (code, err) == (0, "")
    count = len(read_trajectories("kept.parquet"))
    assert out == f"kept {count} of 40 trajectories\n"
