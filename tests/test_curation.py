"""Curation: which rows each way keeps, against brute force; files in and out."""

from collections import Counter, defaultdict

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_trajectories, rejected, write

from topr.io import InputError
from topr.trajectories import SCHEMA, read_metadata, read_trajectories
from topr.trajectories.__main__ import main
from topr.trajectories.curate import Curation, curate, figures


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


def test_anna_karenina_by_hand():
    #           a   b   a   a   b   b   c   a   d   d   a   b   c
    reward = [-1, -1, +1, -1, +1, +1, -1, +1, +1, +1, -1, -1, -1]
    group = np.array(list("abaabbcaddabc"))
    # a: the correct row 2 and the incorrect 0 and 3, no longer 10; b: 4 with 1 and 11, not the second correct one;
    # c has none that is correct; d none that is incorrect
    assert anna_karenina(np.array(reward), group, 3).tolist() == [0, 1, 2, 3, 4, 6, 8, 11, 12]
    assert anna_karenina(np.array(reward), group, 1).tolist() == [2, 4, 6, 8]


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
    drawn = Counter(row for seed in range(1000) for row in share(reward, 0.3, 100, seed).tolist())
    assert max(abs(drawn[row] - 100) for row in range(1000)) < 6 * 9.5  # every row one time in ten
    for wanted, total, words in (
        (0.5, 602, "301 of 300 positives"),
        (0.1, 800, "720 of 700 negatives"),
    ):
        with pytest.raises(InputError, match=words):
            share(reward, wanted, total, 0)
    for scarce in (np.array([1.0, -1.0]), np.array([-1.0] * 9)):
        with pytest.raises(InputError, match="one of each at least"):
            share(scarce, 0.1, None, 0)


def test_figures_against_brute_force():
    for _, reward, group in cases():
        members = defaultdict(list)
        for name, value in zip(group.tolist(), reward.tolist(), strict=True):
            members[name].append(value > 0)
        sizes = sorted(map(len, members.values()))
        assert figures(reward, group) == {
            "trajectories": len(reward),
            "groups": len(members),
            "both_signs": sum(0 < sum(signs) < len(signs) for signs in members.values()),
            "group_sizes": [
                sizes[0],
                (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2,
                sizes[-1],
            ],
            "positive_share": pytest.approx(
                np.mean([sign for signs in members.values() for sign in signs])
            ),
        }


@pytest.fixture
def parts(tmp_path, policy):
    """Two files whose groups go over their border, and their rows."""
    rows = make_trajectories(policy, 40)
    rows[5].valid, rows[5].answer, rows[5].gold = True, "7", "8"
    about = {"task": "t", "sampling": {"top_k": 0, "seed": 1}}
    files = [
        str(write(tmp_path / name, policy, part, **about))
        for name, part in (("a", rows[:18]), ("b", rows[18:]))
    ]
    return files, [row for file in files for row in read_trajectories(file)]


def test_kept_rows_do_not_change(tmp_path, parts):
    files, rows = parts
    done = curate(files, tmp_path / "kept.parquet", Curation("anna_karenina", budget=2))
    reward, group = np.array([row.reward for row in rows]), np.array([row.group for row in rows])
    kept = anna_karenina(reward, group, 2)
    assert read_trajectories(tmp_path / "kept.parquet") == [
        rows[row] for row in kept
    ]  # ids and log mu to the bit
    assert pq.read_schema(tmp_path / "kept.parquet").names == SCHEMA.names[:-1]
    about, before = read_metadata(tmp_path / "kept.parquet"), read_metadata(files[0])
    assert about == before | {"sampling": {"top_k": 0, "seed": 1, "curation": done}}
    assert done == {
        "way": "anna_karenina", "budget": 2, "seed": 0,
        "before": figures(reward, group), "after": figures(reward[kept], group[kept]),
    }  # fmt: skip


def test_the_iteration_is_put_before_every_group(tmp_path, parts):
    files, rows = parts
    curate(files, tmp_path / "kept.parquet", Curation("uniform", budget=100), iteration=3)
    assert [vars(row) for row in read_trajectories(tmp_path / "kept.parquet")] == [
        vars(row) | {"group": f"3/{row.group}"} for row in rows
    ]
    assert read_metadata(tmp_path / "kept.parquet")["iteration"] == 3
    again = curate(
        [str(tmp_path / "kept.parquet")],
        tmp_path / "again.parquet",
        Curation("share", share=0.3, seed=5),
    )
    assert again["earlier"]["way"] == "uniform" and again["seed"] == 5
    assert read_metadata(tmp_path / "again.parquet")["iteration"] == 3


def test_metadata_is_what_all_files_agree_on(tmp_path, policy):
    rows = make_trajectories(policy, 8)

    def merged(*differences):
        files = [
            str(write(tmp_path / f"{i}.parquet", policy, rows, **d))
            for i, d in enumerate(differences)
        ]
        curate(files, tmp_path / "kept.parquet", Curation("uniform", budget=9))
        return read_metadata(tmp_path / "kept.parquet")

    alike = {"task": "t", "sampling": {"top_k": 0, "seed": 1}, "iteration": 2}
    known = merged(alike, alike)
    assert known["task"] == "t" and known["iteration"] == 2 and None not in known.values()
    other = merged(alike, {"task": "t", "sampling": {"top_k": 0, "seed": 2}, "iteration": 3})
    assert (
        other["task"] == "t" and other["iteration"] is None and other["policy"] == known["policy"]
    )
    assert other["sampling"].keys() == {"top_k", "curation"}
    assert merged(alike, {})["sampling"].keys() == {"curation"}
    # the check of log mu asks for both: a file scored in bfloat16 must not be held to float32's bound
    rough = merged({}, {"precision": "bf16-mixed"})
    assert rough["policy"] is rough["precision"] is None
    assert merged({}, {"policy": "another"})["precision"] is None
    # a file without a tokenizer is trained on with any
    assert (
        merged({}, {"tokenizer": None})["tokenizer"]
        == merged({"tokenizer": None}, {})["tokenizer"]
        is not None
    )
    with pytest.raises(InputError, match="1.parquet and .*2.parquet have different tokenizers"):
        merged({}, {}, {"tokenizer": "another"})


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


def test_the_command_prints_what_it_kept(run, parts):
    code, out, err = run(
        main,
        "curate",
        "anna_karenina",
        *parts[0],
        "--budget",
        3,
        "--out",
        "k.parquet",
        "--iteration",
        1,
    )
    assert (code, err) == (0, "")
    done = read_metadata("k.parquet")["sampling"]["curation"]
    assert done["budget"] == 3 and read_metadata("k.parquet")["iteration"] == 1
    for name, before in done["before"].items():
        assert f"{name:<14} {before} -> {done['after'][name]}\n" in out
    assert out.endswith("wrote k.parquet\n")


def test_chance_comes_from_the_seed_alone(run, parts):
    found = []
    for seed in (0, 0, 1):
        code, _, err = run(
            main,
            "curate",
            "share",
            *parts[0],
            "--share=0.3",
            "--out=kept.parquet",
            f"--seed={seed}",
        )
        assert code == 0, err
        found.append((run.folder / "kept.parquet").read_bytes())
    assert found[0] == found[1] != found[2]


def test_bad_input_is_rejected_beside_good_input(run, tmp_path, policy, parts):
    files, _ = parts
    bad = make_trajectories(policy, 8)
    bad[5].ref_logprobs[0] = 0.5
    write(tmp_path / "bad.parquet", policy, bad)
    write(tmp_path / "other.parquet", policy, bad[:4], tokenizer="another")
    for arguments, words in {
        ("uniform", *files): "uniform takes --budget alone; found none",
        ("uniform", *files, "--budget=0"): "PositiveInt",
        (
            "uniform",
            *files,
            "--budget=2",
            "--share=.1",
        ): "uniform takes --budget alone; found budget, share",
        ("uniform", *files, "--budget=2", "--seed=-1"): "NonNegativeInt",
        ("uniform", *files, "--budget=2", "--iteration=-1"): "NonNegativeInt",
        ("uniform", "--budget=2"): "files",
        ("anna_karenina", *files, "--budget=2", "--total=3"): "takes --budget alone",
        ("anna_karenina", *files, "--budget=2", "--shar=3"): "--shar=3",
        ("share", *files): "share takes --share, and --total if you like; found none",
        ("share", *files, "--share=.1", "--budget=2"): "found budget, share",
        ("share", *files, "--share=1"): "OpenUnitInterval",
        ("share", *files, "--share=nan"): "OpenUnitInterval",
        ("share", *files, "--share=.5", "--total=40"): "must be able to take one of each",
        ("best", *files, "--budget=2"): "way",
        ("uniform", *files, files[0], "--budget=2"): "twice",
        ("uniform", "nowhere.parquet", "--budget=2"): "curate: 'nowhere.parquet' is no file",
        ("uniform", files[0], "bad.parquet", "--budget=2"): "bad.parquet, row 5 (prompt '1')",
        ("uniform", files[0], "other.parquet", "--budget=2"): "different tokenizers",
    }.items():
        rejected(run, words, "curate", *arguments, "--out=kept.parquet", main=main)
    for out, words in (
        (files[1], "one of the inputs"),
        (tmp_path, "is a folder"),
        (f"{files[0]}/kept", "takes no file"),
    ):
        rejected(run, words, "curate", "uniform", *files, "--budget=2", f"--out={out}", main=main)
    for arguments in (
        ("uniform", "--budget=2"),
        ("share", "--share=.5", "--total=4"),
        ("anna_karenina", "--budget=1"),
    ):
        assert (
            run(main, "curate", arguments[0], *files, *arguments[1:], "--out=kept.parquet")[0] == 0
        )
