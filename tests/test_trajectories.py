"""The trajectory file: round trip, atomic writes, metadata."""

import os

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import make_policy, make_trajectories, write

from topr.io import InputError, atomic
from topr.policy import load_policy
from topr.policy_files import policy_fingerprint
from topr.rows import resolve_files
from topr.tokenizer import load_tokenizer, tokenizer_fingerprint
from topr.trajectories import (
    SCHEMA,
    Trajectory,
    main,
    read_metadata,
    read_trajectories,
    validate,
    write_trajectories,
)


def test_round_trip(tmp_path, policy):
    rows = make_trajectories(policy)
    rows[3].valid, rows[3].answer, rows[3].gold = True, "7", "8"
    metadata = {"task": "t", "sampling": {"top_k": 0}, "iteration": 2}
    path = write(tmp_path / "a.parquet", policy, rows, **metadata)
    assert read_trajectories(path) == [
        Trajectory(**{**vars(row), "ref_logprobs": np.float32(row.ref_logprobs).tolist()}) for row in rows
    ]
    assert pq.read_schema(path).remove_metadata() == SCHEMA
    found = read_metadata(path)
    assert found["schema"] == 1 and {key: found[key] for key in metadata} == metadata
    assert found["policy"] == policy_fingerprint(str(policy))
    validate(path, 20, 64)


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path, policy):
    rows = make_trajectories(policy)
    path = write(tmp_path / "a.parquet", policy, rows)
    before = path.read_bytes()

    def broken():
        yield rows[0]
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_trajectories(path, broken(), {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(RuntimeError), atomic(tmp_path / "folder") as folder:
        folder.mkdir()
        (folder / "part").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_an_earlier_process_with_this_number_stand_in_no_way(tmp_path):
    for end in ("tmp", "old"):
        (tmp_path / f".policy.{os.getpid()}.{end}").mkdir()
        (tmp_path / f".policy.{os.getpid()}.{end}" / "config.json").write_text("{}")
    (tmp_path / f".policy.{os.getppid()}.tmp").mkdir()  # another's, who may be writing
    with atomic(tmp_path / "policy") as folder:
        folder.mkdir()
    assert {path.name for path in tmp_path.iterdir()} == {"policy", f".policy.{os.getppid()}.tmp"}


def test_files_are_found_by_path_glob_and_list(tmp_path, policy):
    rows = make_trajectories(policy)
    a, b, c = (str(write(tmp_path / f"{name}.parquet", policy, rows)) for name in "abc")
    assert resolve_files(a) == [a]
    assert resolve_files(str(tmp_path / "*.parquet")) == [a, b, c]
    assert resolve_files([b, str(tmp_path / "[a]*")]) == [b, a]
    for missing in (str(tmp_path / "x*"), "nowhere.parquet", "some-organisation/some-data"):
        with pytest.raises(InputError, match="is no file, glob or hub data set"):
            resolve_files(missing)


def test_fingerprints_tell_policies_and_tokenizers_apart(tmp_path, policy):
    other = make_policy(tmp_path / "other", seed=1)
    assert policy_fingerprint(str(policy)) != policy_fingerprint(str(other))
    assert policy_fingerprint(str(policy)) == policy_fingerprint(str(make_policy(tmp_path / "same")))
    tokenizer = load_tokenizer(str(policy))
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["1", "1+1"], padding=True, truncation=True, max_length=2)  # leaves its mark on the fast tokenizer
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["x"])
    assert tokenizer_fingerprint(tokenizer) != before


def test_fingerprint_survives_another_layout_and_dtype(tmp_path, policy):
    import torch

    model = load_policy(str(policy)).bfloat16()
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "wide", max_shard_size="4KB")
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 1
    assert policy_fingerprint(str(tmp_path / "half")) == policy_fingerprint(str(tmp_path / "wide"))
    with torch.no_grad():
        next(model.parameters())[-1, -1] += 1
    model.save_pretrained(tmp_path / "moved")
    assert policy_fingerprint(str(tmp_path / "moved")) != policy_fingerprint(str(tmp_path / "wide"))


def test_nothing_of_the_users_is_overwritten(run, tmp_path, policy):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "response": "2", "reward": 1}\n')
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    code, _, err = run(main, "import", "a.jsonl", "--policy", policy, "--out", "precious")
    assert code == 2 and "is a folder" in err
    with pytest.raises(InputError, match="will not be overwritten"), atomic(tmp_path / "precious") as folder:
        folder.mkdir()
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"
    for seed in (0, 1):  # a model's folder is replaced by a model's
        make_policy(tmp_path / "model", seed=seed)
    assert policy_fingerprint(str(tmp_path / "model")) != policy_fingerprint(str(policy))
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "precious", "model"}
