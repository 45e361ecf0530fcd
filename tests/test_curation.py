"""Curation: which rows each way keeps, against brute force; files in and out."""

import hashlib
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_policy, make_trajectories, refused, write

import train
from topr.curation import Curation, anna_karenina, curate, figures, main, share, uniform
from topr.io import InputError
from topr.trajectories import SCHEMA, read_metadata, read_trajectories, write_tables


def cases(count=60):
    """Random rewards and groups of uneven sizes, their rows mixed."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        size = rng.integers(1, 80)
        yield seed, rng.choice([-1.0, -1.0, 0.0, 0.5, 1.0], size), rng.integers(0, rng.integers(1, 12), size)


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
                assert min(positives * (1 - wanted) / wanted, negatives * wanted / (1 - wanted)) <= 0.5
                continue
            k, n = int((reward[kept] > 0).sum()), len(kept)
            assert kept.tolist() == sorted(set(kept.tolist())) == share(reward, wanted, None, seed).tolist()
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
    for wanted, total, words in ((0.5, 602, "301 of 300 positives"), (0.1, 800, "778 trajectories at most")):
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
            "group_sizes": [sizes[0], (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2, sizes[-1]],
            "positive_share": pytest.approx(np.mean([sign for signs in members.values() for sign in signs])),
        }


@pytest.fixture
def parts(tmp_path, policy):
    """Two files whose groups go over their border, and their rows."""
    rows = make_trajectories(policy, 40)
    rows[5].valid, rows[5].answer, rows[5].gold = True, "7", "8"
    about = {"task": "t", "sampling": {"top_k": 0, "seed": 1}}
    files = [str(write(tmp_path / name, policy, part, **about)) for name, part in (("a", rows[:18]), ("b", rows[18:]))]
    return files, [row for file in files for row in read_trajectories(file)]


def test_what_is_kept_is_as_it_was(tmp_path, parts):
    files, rows = parts
    done = curate(files, tmp_path / "kept.parquet", Curation("anna_karenina", budget=2))
    reward, group = np.array([row.reward for row in rows]), np.array([row.group for row in rows])
    kept = anna_karenina(reward, group, 2)
    assert read_trajectories(tmp_path / "kept.parquet") == [rows[row] for row in kept]  # ids and log mu to the bit
    assert pq.read_schema(tmp_path / "kept.parquet").remove_metadata() == SCHEMA
    about, before = read_metadata(tmp_path / "kept.parquet"), read_metadata(files[0])
    assert about == before | {"sampling": {"top_k": 0, "seed": 1, "curation": done}}
    assert done == {
        "way": "anna_karenina", "budget": 2, "seed": 0,
        "before": figures(reward, group), "after": figures(reward[kept], group[kept]),
    }  # fmt: skip


def test_groups_of_an_iteration_are_its_own(tmp_path, parts):
    files, rows = parts
    curate(files, tmp_path / "kept.parquet", Curation("uniform", budget=100), iteration=3)
    assert [vars(row) for row in read_trajectories(tmp_path / "kept.parquet")] == [
        vars(row) | {"group": f"3/{row.group}"} for row in rows
    ]
    assert read_metadata(tmp_path / "kept.parquet")["iteration"] == 3
    again = curate([str(tmp_path / "kept.parquet")], tmp_path / "again.parquet", Curation("share", share=0.3, seed=5))
    assert again["earlier"]["way"] == "uniform" and again["seed"] == 5
    assert read_metadata(tmp_path / "again.parquet")["iteration"] == 3


def test_metadata_is_what_all_files_agree_on(tmp_path, policy):
    rows = make_trajectories(policy, 8)

    def merged(*differences):
        files = [str(write(tmp_path / f"{i}.parquet", policy, rows, **d)) for i, d in enumerate(differences)]
        curate(files, tmp_path / "kept.parquet", Curation("uniform", budget=9))
        return read_metadata(tmp_path / "kept.parquet")

    alike = {"task": "t", "sampling": {"top_k": 0, "seed": 1}, "iteration": 2}
    known = merged(alike, alike)
    assert known["task"] == "t" and known["iteration"] == 2 and None not in known.values()
    other = merged(alike, {"task": "t", "sampling": {"top_k": 0, "seed": 2}, "iteration": 3})
    assert other["task"] == "t" and other["iteration"] is None and other["policy"] == known["policy"]
    assert other["sampling"].keys() == {"top_k", "curation"}
    assert merged(alike, {})["sampling"].keys() == {"curation"}
    # the check of log mu asks for both: a file scored in bfloat16 must not be held to float32's bound
    rough = merged({}, {"precision": "bf16-mixed"})
    assert rough["policy"] is rough["precision"] is None
    assert merged({}, {"policy": "another"})["precision"] is None
    # a file that does not tell its tokenizer is trained on with any, one that does only with that
    assert merged({}, {"tokenizer": None})["tokenizer"] == merged({"tokenizer": None}, {})["tokenizer"] is not None
    with pytest.raises(InputError, match="1.parquet and .*2.parquet were tokenised with different tokenizers"):
        merged({}, {}, {"tokenizer": "another"})


def test_memory_does_not_grow_with_the_number_of_responses(tmp_path):
    ids, names = [[3] * 200] * 8192, [str(row // 8) for row in range(8192)]
    lists = {"prompt_ids": ids, "response_ids": ids, "ref_logprobs": [[-0.5] * 200] * 8192}
    texts = dict.fromkeys(("prompt_id", "group", "prompt", "response"), names)
    others = {"reward": [1.0, -1.0] * 4096, "finished": [True] * 8192}
    table = pa.table({**{name: [None] * 8192 for name in SCHEMA.names}, **texts, **lists, **others}).cast(SCHEMA)
    peaks = []
    for count in (2, 12):
        write_tables(tmp_path / "a.parquet", [table] * count, {})
        pool = pa.proxy_memory_pool(pa.system_memory_pool())
        before = pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            done = curate([str(tmp_path / "a.parquet")], tmp_path / "b.parquet", Curation("share", share=0.3))
        finally:
            pa.set_memory_pool(before)
        assert done["before"]["trajectories"] == 8192 * count and pool.bytes_allocated() < 2**20
        peaks.append(pool.max_memory())
    assert peaks[1] < 1.2 * peaks[0], peaks


def test_small_batches_share_a_row_group(tmp_path, policy):
    table = pa.Table.from_pylist([vars(row) for row in make_trajectories(policy, 40)], SCHEMA)
    write_tables(tmp_path / "a.parquet", [table] * 250, {})
    groups = pq.read_metadata(tmp_path / "a.parquet")
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [4120, 4120, 1760]


def test_the_command_tells_what_it_kept_and_training_takes_it(run, policy, parts):
    code, out, err = run(main, "anna_karenina", *parts[0], "--budget", 3, "--out", "kept.parquet", "--iteration", 1)
    assert (code, err) == (0, "")
    done = read_metadata("kept.parquet")["sampling"]["curation"]
    told = {" ".join(line.split()[:-2]): line.split()[-2:] for line in out.splitlines()[1:-1]}
    names = {"trajectories": "trajectories", "share of positives": "positive_share", "groups": "groups"}
    for name, key in (names | {"with both signs": "both_signs"}).items():
        form = "{:.1%}" if key == "positive_share" else "{}"
        assert told[name] == [form.format(done[when][key]) for when in ("before", "after")]
    assert told["least/median/most"][0] == "4/4/4" and out.endswith("wrote kept.parquet\n")
    arguments = ["--config", ROOT / "configs" / "arithmetic.yaml", f"--model.policy={policy}", "--data.val=null"]
    quiet = ["--data.test=null", "--trainer.enable_progress_bar=false"]
    code, _, err = run(train.main, "fit", *arguments, "--data.train=kept.parquet", *quiet)
    assert code == 0, err


def test_chance_comes_from_the_seed_alone(run, parts):
    texts = {}
    for seed in (0, 0, 1):
        code, _, err = run(main, "share", *parts[0], "--share", 0.3, "--out", "kept.parquet", "--seed", seed)
        assert code == 0, err
        texts.setdefault(seed, set()).add(hashlib.sha256((run.folder / "kept.parquet").read_bytes()).hexdigest())
    assert len(texts[0]) == len(texts[1]) == 1 and texts[0] != texts[1]


def test_bad_input_is_refused(run, tmp_path, policy, parts):
    files, _ = parts
    bad = make_trajectories(policy, 8)
    bad[5].ref_logprobs[0] = 0.5
    write(tmp_path / "bad.parquet", policy, bad)
    write(tmp_path / "empty.parquet", policy, [])
    write(tmp_path / "other.parquet", make_policy(tmp_path / "p"), bad[:4], tokenizer="another")
    for arguments, words in {
        ("uniform", *files): "uniform takes --budget",
        ("uniform", *files, "--budget=0"): "--budget is 0",
        ("uniform", *files, "--budget=2", "--share=.1"): "no --share",
        ("uniform", *files, "--budget=2", "--seed=-1"): "--seed is -1",
        ("uniform", *files, "--budget=2", "--iteration=-1"): "--iteration is -1",
        ("uniform", "--budget=2"): "files",
        ("anna_karenina", *files, "--budget=2", "--total=3"): "takes no --total",
        ("anna_karenina", *files, "--budget=2", "--shar=3"): "--shar=3",
        ("share", *files): "share takes --share",
        ("share", *files, "--share=.1", "--budget=2"): "no --budget",
        ("share", *files, "--share=1"): "between 0 and 1",
        ("share", *files, "--share=nan"): "between 0 and 1",
        ("share", *files, "--share=.5", "--total=40"): "trajectories at most",
        ("share", *files, "--share=.5", "--total=0"): "--total is 0",
        ("best", *files, "--budget=2"): "choose from 'uniform', 'anna_karenina', 'share'",
        ("uniform", *files, files[0], "--budget=2"): "twice",
        ("uniform", "nowhere.parquet", "--budget=2"): "'nowhere.parquet' is no file",
        ("uniform", files[0], str(tmp_path / "bad.parquet"), "--budget=2"): "bad.parquet, row 5 (prompt '1')",
        ("uniform", str(tmp_path / "empty.parquet"), "--budget=2"): "holds no trajectory",
        ("uniform", files[0], str(tmp_path / "other.parquet"), "--budget=2"): "different tokenizers",
    }.items():
        refused(run, words, *arguments, "--out=kept.parquet", main=main)
    for out, words in ((files[1], "one of the inputs"), (tmp_path, "is a folder"), ("/proc/x/kept", "takes no file")):
        refused(run, words, "uniform", *files, "--budget=2", f"--out={out}", main=main)
