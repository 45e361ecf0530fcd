"""The same updates for any number of ranks, workers and micro-batches, from mapped files."""

import os
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_policy, make_trajectories, write
from lightning.pytorch import Trainer

from topr.advantages import Baseline, GroupBalanced, GroupMean
from topr.datamodule import TrajectoryDataModule, Updates
from topr.io import InputError
from topr.losses import DPO, TOPR
from topr.module import PolicyModule
from topr.sampling import Sampling
from topr.tasks import Arithmetic


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy, two files of trajectories, and all their rows."""
    folder = tmp_path_factory.mktemp("data")
    policy = make_policy(folder / "base")
    first = make_trajectories(policy, 61)
    second = make_trajectories(policy, 40, seed=1)
    for trajectory in second:
        trajectory.group = f"second-{trajectory.group}"
    paths = []
    for name, rows in (("first", first), ("second", second)):
        paths.append(str(write(folder / f"{name}.parquet", policy, rows)))
    return policy, paths, first + second


def module(files, **settings) -> TrajectoryDataModule:
    """Set up without a trainer."""
    settings = {"train": files[1], "batch_size": 12, "seed": 3} | settings
    data = TrajectoryDataModule(str(files[0]), Arithmetic(), **settings)
    data.setup("fit")
    return data


def contents(updates) -> list[list]:
    """Trajectories and advantages of each micro-batch."""
    found = []
    for update in updates:
        found.append([(p.trajectory_B.tolist(), p.advantage_B.tolist()) for p in update[0]])
    return found


@pytest.mark.parametrize("batching", ["trajectories", "groups", "pairs"])
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 60), (3, 60), (5, 16384)])
def test_updates_do_not_depend_on_ranks_or_micro_batches(files, batching, ranks, tokens):
    data = module(files, batching=batching, microbatch_tokens=tokens)
    for number, batch in enumerate(data.plan(0).batches):
        parts = []
        for rank in range(ranks):
            updates = Updates(data.data, data.plan(0), tokens, data.unit, padded=False)
            updates.rank = rank
            updates.ranks = ranks
            update = updates[number]
            parts += update.micro_batches
            assert len(parts) == (rank + 1) * len(update.micro_batches)  # equally many
            assert update.trajectories == len(batch)
        trajectory = np.concatenate([part.trajectory_B for part in parts])
        real = np.concatenate([part.real_B for part in parts])
        assert sorted(trajectory[real > 0]) == sorted(batch)
        for part in parts:
            assert len(part.tokens.input_ids_L) <= tokens
            assert (part.tokens.nominal > 0) == bool(part.real_B.any())
            if batching == "pairs":  # a positive and its negative share a micro-batch
                assert (part.advantage_B >= 0).tolist() == [True, False] * (len(part.real_B) // 2)


def test_micro_batches_carry_what_the_files_say(files):
    for update in module(files, advantage=Baseline(0.25), microbatch_tokens=60).train_dataloader():
        for part in update.micro_batches:
            rows = [files[2][i] for i in part.trajectory_B]
            scores = [score for row in rows for score in row.ref_logprobs]
            assert part.ref_log_probs_N.tolist() == np.float32(scores).tolist()
            assert part.reward_B.tolist() == [row.reward for row in rows]
            assert part.advantage_B.tolist() == [row.reward - 0.25 for row in rows]
            ids = part.tokens.input_ids_L.tolist()
            for (start, end, first, last), row in zip(part.tokens.trajectories, rows, strict=True):
                assert ids[first:last] == row.prompt_ids and ids[start:end] == row.response_ids


@pytest.mark.parametrize(
    "settings", [{"num_workers": 2}, {"advantage": GroupBalanced()}, {"batching": "pairs"}]
)
def test_a_loader_resumes_within_an_epoch(files, settings):
    """By another process; what is drawn anew in each epoch is the same."""
    loader = module(files, **settings, microbatch_tokens=60).train_dataloader()
    assert len(loader) == len(contents(loader))
    loader.set_epoch(1)
    whole = contents(loader)
    updates = iter(loader)
    next(updates)
    second = next(updates)
    other = module(files, **settings, microbatch_tokens=60).train_dataloader()
    other.load_state_dict(loader.state_dict())
    assert contents([second]) + contents(other) == whole[1:]
    assert contents(other) == whole  # another pass starts at the beginning


def test_the_epoch_after_a_resumed_one_starts_at_its_beginning(files):
    loader = module(files).train_dataloader()
    loader.load_state_dict({"epoch": 0, "updates": len(loader)})  # a checkpoint of an epoch's end
    loader.set_epoch(1)
    assert len(contents(loader)) == len(loader)


def test_an_advantage_of_zero_is_positive_in_pairs(files):
    data = module(files, advantage=Baseline(1.0), batching="pairs")
    assert set(data.data.reward) == {-1, 1}
    for batch in data.plan(0).batches:
        assert (data.data.reward[batch] == 1).tolist() == [True, False] * (len(batch) // 2)


def test_ranks_share_problems_and_files(files, tmp_path, monkeypatch):
    problems = tmp_path / "problems.jsonl"
    lines = [f'{{"prompt": "{i}+1>", "gold": "{i + 1}"}}\n' for i in range(70)]
    problems.write_text("".join(lines))
    given = {"val": str(problems), "problems": str(problems), "out": str(tmp_path / "out")}
    data = module(files, **given, sampling=Sampling(max_new_tokens=8))
    holder = SimpleNamespace(policy_hash=lambda: "", sampler=None, policy=None)
    data.trainer = SimpleNamespace(lightning_module=holder, precision="32-true", fast_dev_run=False)
    validated = []
    predicted = []
    for number in range(2):
        for place in ("topr.datamodule", "topr.evaluation.pipeline"):
            monkeypatch.setattr(f"{place}.rank", lambda number=number: number)
            monkeypatch.setattr(f"{place}.world_size", lambda: 2)
        (batch,) = data.val_dataloader()
        validated.append(batch.numbers)
        predicted += data.predict_dataloader()
    assert validated == [list(range(0, 70, 2)), list(range(1, 70, 2))]
    shares = [(path and path.name, numbers) for _, numbers, path, *_ in predicted]
    assert shares == [
        ("part-00000.parquet", list(range(32))),
        ("part-00002.parquet", list(range(64, 70))),
        ("part-00001.parquet", list(range(32, 64))),
        (None, []),  # it keeps the other company
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_hands_updates_on_as_they_are(files, workers):
    """torch's own collation would turn arrays into tensors, and tuples into lists."""
    (update, *_) = module(files, num_workers=workers).train_dataloader()
    for part in update.micro_batches:
        assert isinstance(part.tokens.trajectories, tuple)
        assert {type(places) for places in part.tokens.sampled} == {np.ndarray}


def test_pairs_are_needed_by_a_loss_whoever_makes_the_data_module(files):
    """train.py links the two; in a notebook nobody does."""
    optimizer = partial(torch.optim.SGD, lr=1.0)
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    for batching, loss in (("trajectories", DPO()), ("pairs", DPO()), ("trajectories", TOPR())):
        policy = PolicyModule(str(files[0]), Arithmetic(), loss, optimizer)
        data = TrajectoryDataModule(str(files[0]), Arithmetic(), batching, train=files[1])
        if batching == "trajectories" and loss.batching == "pairs":
            with pytest.raises(InputError, match='batching="pairs"'):
                trainer.fit(policy, data)
        else:
            trainer.fit(policy, data)


def test_every_epoch_draws_anew(files):
    plans = [module(files, advantage=GroupBalanced()).plan(epoch) for epoch in range(3)]
    assert len({np.concatenate(plan.batches).tobytes() for plan in plans}) == 3
    assert len({plan.advantage.tobytes() for plan in plans}) == 3


def test_whole_groups_share_a_batch_though_the_loss_does_not_need_it(files):
    groups = []
    for batch in module(files, whole_groups=True).plan(0).batches:
        groups.append({files[2][i].group for i in batch})
    assert len(groups) > 5 and len(set().union(*groups)) == sum(map(len, groups))
    with pytest.raises(InputError, match="draws pairs"):
        module(files, whole_groups=True, batching="pairs")


def test_data_without_a_signal_are_rejected(tmp_path, files):
    rows = make_trajectories(files[0], 20)
    for row in rows:
        row.reward = 1.0
    path = str(write(tmp_path / "equal.parquet", files[0], rows))
    with pytest.raises(InputError, match="every advantage is 0, so there is nothing to learn"):
        module(files, train=path, advantage=GroupMean())
    with pytest.warns(UserWarning, match="only positives are learned"):
        module(files, train=path)
    module(files, advantage=GroupMean())


def test_another_file_with_the_same_path_size_and_time_is_read(tmp_path, files):
    path = tmp_path / "train.parquet"
    shutil.copy2(files[1][0], path)
    before = module(files, train=str(path)).data
    assert before.rows.cache_files  # mapped, not in memory
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    rows = make_trajectories(files[0], 61, seed=2)
    write(path, files[0], rows)
    os.utime(path, ns=times)
    after = module(files, train=str(path)).data.rows
    assert after["response_ids"].to_pylist() == [row.response_ids for row in rows]
    assert before.rows["response_ids"].to_pylist() != after["response_ids"].to_pylist()


def test_a_trajectory_is_traced_to_its_file_and_row(files):
    data = module(files).data
    assert data.place(60) == f"row 60 of {files[1][0]}"
    assert data.place(61) == f"row 0 of {files[1][1]}"
