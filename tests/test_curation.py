"""Curation: which rows each way keeps, against brute force; files in and out."""

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_trajectories, rejected, write

from topr.io import InputError
from topr.trajectories import read_metadata, read_trajectories
from topr.trajectories.__main__ import main
from topr.trajectories.curate import Curation, curate


def uniform(group, budget, seed):
    return Curation("uniform", budget=budget, seed=seed).keep(np.zeros(len(group)), group)


def anna_karenina(reward, group, budget):
    return Curation("anna_karenina", budget=budget).keep(reward, group)


def share(reward, positive_share, total, seed):
    return Curation("share", share=positive_share, total=total, seed=seed).keep(
        reward, np.zeros(len(reward))
    )


def cases(count=60):
    """Random rewards and groups of uneven sizes, their rows mixed."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        size = rng.integers(1, 80)
        yield (
            seed,
            rng.choice([-1.0, -1.0, 0.0, 0.5, 1.0], size),
            rng.integers(0, rng.integers(1, 12), size),
        )


def test_anna_karenina_against_brute_force():
    for seed, reward, group in cases():
        budget, kept = 1 + seed % 6, []
        for name in set(group.tolist()):
            rows = [row for row in range(len(group)) if group[row] == name]
            correct = [row for row in rows if reward[row] > 0][:1]
            kept += correct + [row for row in rows if reward[row] <= 0][: budget - len(correct)]
        assert anna_karenina(reward, group, budget).tolist() == sorted(kept)


def test_uniform_fills_the_budget_of_each_group_with_rows_that_each_stand_the_same_chance():
    for seed, _, group in cases():
        kept = uniform(group, 3, seed)
        assert kept.tolist() == sorted(set(kept.tolist())) == uniform(group, 3, seed).tolist()
        sizes = Counter(group.tolist())
        assert Counter(group[kept].tolist()) == {name: min(3, size) for name, size in sizes.items()}
    group = np.array([0] * 6 + [1] * 2 + [0] * 2)
    drawn = Counter(row for seed in range(4000) for row in uniform(group, 2, seed).tolist())
    assert drawn[6] == drawn[7] == 4000
    # each of the eight is drawn 1,000 times of 4,000, give or take 27
    assert all(abs(drawn[row] - 1000) < 5 * 27.4 for row in (0, 1, 2, 3, 4, 5, 8, 9))


def test_share_keeps_as_many_as_the_scarce_sign_allows():
    for seed, reward, _ in cases():
        positives, negatives = int((reward > 0).sum()), int((reward <= 0).sum())
        for wanted in (0.1, 1 / 3, 0.5, 0.8):
            try:
                kept = share(reward, wanted, None, seed)
            except InputError:  # not even the nearest mixture of all of one sign holds the other
                assert (
                    min(positives * (1 - wanted) / wanted, negatives * wanted / (1 - wanted)) <= 0.5
                )
                continue
            k, n = int((reward[kept] > 0).sum()), len(kept)
            assert (
                kept.tolist()
                == sorted(set(kept.tolist()))
                == share(reward, wanted, None, seed).tolist()
            )
            assert k == positives or n - k == negatives
            # one more or one less of the other sign is no nearer to the share
            exact = k * (1 - wanted) / wanted if k == positives else (n - k) * wanted / (1 - wanted)
            assert abs((n - k if k == positives else k) - exact) <= 0.5 + 1e-9


def test_share_of_a_total_is_exact_to_the_trajectory():
    reward = np.array([1.0] * 300 + [-1.0] * 700)
    for wanted, total in ((0.1, 500), (0.25, 10), (0.125, 100), (0.42, 700), (0.9, 50)):
        kept = share(reward, wanted, total, seed=0)
        assert len(kept) == total and abs((reward[kept] > 0).sum() - wanted * total) <= 0.5
    assert len(share(reward, 0.1, None, 0)) == 778 and len(share(reward, 0.5, None, 0)) == 600
    for wanted, total, words in ((0.5, 602, "301 of 300 pos"), (0.1, 800, "720 of 700 neg")):
        with pytest.raises(InputError, match=words):
            share(reward, wanted, total, 0)
    for scarce in (np.array([1.0, -1.0]), np.array([-1.0] * 9)):
        with pytest.raises(InputError, match="share 0.1 would take"):
            share(scarce, 0.1, None, 0)


def test_selections_of_the_shipped_data_stay_the_same():
    """Row numbers of the first release: a curated file is reproduced by its arguments."""
    table = pq.read_table(
        ROOT / "data" / "arithmetic" / "train.parquet", columns=["reward", "group"]
    )
    reward, group = table["reward"].to_numpy(), table["group"].to_numpy()
    for curation, count, first, checksum in EXPECTED:
        kept = curation.keep(reward, group)
        assert (len(kept), kept[:5].tolist(), int((kept * np.arange(1, len(kept) + 1)).sum())) == (
            count,
            first,
            checksum,
        )


EXPECTED = [
    (Curation("uniform", budget=5), 2500, [4, 7, 12, 14, 15], 16670337980),
    (Curation("uniform", budget=3, seed=7), 1500, [9, 12, 15, 16, 17], 6002631687),
    (Curation("anna_karenina", budget=8), 3973, [0, 1, 2, 3, 4], 42082087866),
    (Curation("share", share=0.1), 6346, [0, 1, 3, 4, 6], 108053082719),
    (Curation("share", share=0.37, total=1000, seed=11), 1000, [3, 15, 30, 35, 37], 2648144939),
]


@pytest.fixture
def parts(tmp_path, policy):
    """Two files whose groups go over their border, and their rows."""
    rows = make_trajectories(policy, 40)
    rows[5].valid, rows[5].answer, rows[5].gold = True, "7", "8"
    about = {"task": "t", "sampling": {"top_k": 0, "seed": 1}}
    a = write(tmp_path / "a", policy, rows[:18], **about)
    b = write(tmp_path / "b", policy, rows[18:], **about)
    return [str(a), str(b)], read_trajectories(a) + read_trajectories(b)


def test_kept_rows_do_not_change_and_the_metadata_says_how_they_were_chosen(tmp_path, parts):
    files, rows = parts
    reward, group = np.array([row.reward for row in rows]), np.array([row.group for row in rows])
    kept = anna_karenina(reward, group, 2)
    done = curate(files, tmp_path / "kept.parquet", Curation("anna_karenina", budget=2))
    # ids and log mu to the bit
    assert read_trajectories(tmp_path / "kept.parquet") == [rows[row] for row in kept]
    metadata, before = read_metadata(tmp_path / "kept.parquet"), read_metadata(files[0])
    assert metadata == before | {"sampling": before["sampling"] | {"curation": done}}
    assert (done["way"], done["budget"], done["seed"]) == ("anna_karenina", 2, 0)
    assert done["before"]["groups"] == len(set(group))
    assert done["before"]["positive_share"] == np.mean(reward > 0)
    assert done["after"]["trajectories"] == len(kept)


def test_the_iteration_is_put_before_every_group(tmp_path, parts):
    files, rows = parts
    curate(files, tmp_path / "kept.parquet", Curation("uniform", budget=100), iteration=3)
    kept = read_trajectories(tmp_path / "kept.parquet")
    assert [row.group for row in kept] == [f"3/{row.group}" for row in rows]
    assert read_metadata(tmp_path / "kept.parquet")["iteration"] == 3


def test_metadata_is_what_all_files_agree_on(tmp_path, policy):
    rows = make_trajectories(policy, 8)

    def merged(*metadata):
        for i, entry in enumerate(metadata):
            write(tmp_path / f"{i}.parquet", policy, rows, **entry)
        files = [str(tmp_path / f"{i}.parquet") for i in range(len(metadata))]
        curate(files, tmp_path / "kept.parquet", Curation("uniform", budget=9))
        return read_metadata(tmp_path / "kept.parquet")

    entry = {"task": "t", "sampling": {"top_k": 0, "seed": 1}, "iteration": 2}
    same = merged(entry, entry)
    assert same["task"] == "t" and same["iteration"] == 2 and None not in same.values()
    other = merged(entry, {"task": "t", "sampling": {"top_k": 0, "seed": 2}, "iteration": 3})
    assert (other["task"], other["iteration"], other["policy"]) == ("t", None, same["policy"])
    assert other["sampling"].keys() == {"top_k", "curation"}
    assert merged(entry, {})["sampling"].keys() == {"curation"}
    # together they promise that a policy reproduces log mu within the bound of a precision
    rough = merged({}, {"precision": "bf16-mixed"})
    assert rough["policy"] is rough["precision"] is None
    assert merged({}, {"policy": "another"})["precision"] is None
    with pytest.raises(InputError, match="different tokenizers"):
        merged({}, {}, {"tokenizer": "another"})


def test_the_command_prints_what_it_kept_and_chance_comes_from_the_seed_alone(run, parts):
    files = []
    for seed in (0, 0, 1):
        code, out, err = run(
            main, "curate", "share", *parts[0], "--share=.3", "--out=k.parquet", f"--seed={seed}"
        )
        assert (code, err) == (0, "")
        files.append((run.folder / "k.parquet").read_bytes())
        done = read_metadata("k.parquet")["sampling"]["curation"]
        for name, before in done["before"].items():
            assert f"{name:<14} {before} -> {done['after'][name]}\n" in out
    assert files[0] == files[1] != files[2]


def test_bad_input_is_rejected_beside_good_input(run, tmp_path, policy, parts):
    files, _ = parts
    bad = make_trajectories(policy, 8)
    bad[5].ref_logprobs[0] = 0.5
    write(tmp_path / "bad.parquet", policy, bad)
    for arguments, words in {
        ("uniform", *files): "uniform takes --budget alone",
        ("anna_karenina", *files, "--budget=2", "--total=3"): "takes --budget alone",
        ("share", *files): "share takes --share and perhaps --total",
        ("share", *files, "--share=1"): "OpenUnitInterval",
        ("share", *files, "--share=.5", "--total=40"): "share 0.5 would take",
        ("uniform", *files, files[0], "--budget=2"): "twice",
        ("uniform", "nowhere.parquet", "--budget=2"): "curate: 'nowhere.parquet' is no file",
        ("uniform", files[0], "bad.parquet", "--budget=2"): "bad.parquet, row 5 (prompt '1')",
    }.items():
        rejected(run, words, "curate", *arguments, "--out=kept.parquet", main=main)
    for out, words in (
        (files[1], "one of the inputs"),
        (tmp_path, "is a folder"),
        (f"{files[0]}/kept", "takes no file"),
    ):
        rejected(run, words, "curate", "uniform", *files, "--budget=2", f"--out={out}", main=main)
    for arguments in (("uniform", "--budget=2"), ("share", "--share=.5", "--total=4")):
        good = arguments[0], *files, *arguments[1:], "--out=kept.parquet"
        assert run(main, "curate", *good)[0] == 0
