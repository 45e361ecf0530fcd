"""The same global batches for any number of ranks, workers and micro-batches, from mapped files."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_policy, make_trajectories, write
from lightning.pytorch.trainer.states import TrainerFn

from topr.datamodule import TrajectoryDataModule
from topr.io import InputError
from topr.losses import GRPO, PPO, TOPR, REDDrop
from topr.tasks import Arithmetic


class PairLoss(TOPR):
    grouping = "pair"


class GroupLoss(TOPR):
    grouping = "group"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    policy = make_policy(folder / "base")
    first, second = make_trajectories(policy, 61), make_trajectories(policy, 40, seed=1)
    for trajectory in second:
        trajectory.group = f"second-{trajectory.group}"
    return (
        policy,
        [
            str(write(folder / f"{i}.parquet", policy, rows))
            for i, rows in enumerate((first, second))
        ],
        (first + second),
    )


def module(files, loss, *, rank=0, ranks=1, tokens=16384, workers=0, epochs=1, **more):
    """A data module as a trainer sets it up on one of several ranks."""
    sizes = {"batch_size": 12, "microbatch_tokens": tokens, "num_workers": workers, "seed": 3}
    data = TrajectoryDataModule(
        train=files[1], policy=str(files[0]), loss=loss, task=Arithmetic(), **sizes | more
    )
    data.trainer = SimpleNamespace(
        world_size=ranks,
        global_rank=rank,
        local_rank=rank,
        fast_dev_run=False,
        current_epoch=0,
        max_epochs=epochs,
        max_steps=-1,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
    )
    data.setup("fit")
    return data


@pytest.mark.parametrize("loss", [TOPR(), GroupLoss(), PairLoss()])
@pytest.mark.parametrize(
    ("ranks", "tokens", "workers"), [(1, 16384, 0), (1, 60, 0), (3, 60, 0), (5, 16384, 2)]
)
def test_global_batches_do_not_depend_on_ranks_workers_or_micro_batches(
    files, loss, ranks, tokens, workers
):
    expected = [sorted(batch) for batch in module(files, loss).plan(0)]
    data = [
        module(files, loss, rank=r, ranks=ranks, tokens=tokens, workers=workers)
        for r in range(ranks)
    ]
    streams = [list(one.train_dataloader()) for one in data]
    count = data[0].microbatches(0)
    assert {len(stream) for stream in streams} == {
        len(expected) * count
    }  # every rank runs equally many forwards
    assert {part.microbatches for stream in streams for part in stream} == {count}
    for step, batch in enumerate(expected):
        parts = [part for stream in streams for part in stream[step * count : (step + 1) * count]]
        real = [
            row
            for part in parts
            for row, w in zip(part.trajectory_B.tolist(), part.real_B, strict=True)
            if w
        ]
        assert sorted(real) == batch
        assert {float(part.divisor) for part in parts} == {len(batch) / data[0].unit}
        for part in parts:
            assert len(part.tokens.input_ids_L) <= tokens
            if data[0].unit == 2:  # a positive and its negative share a micro-batch
                signs = (part.advantage_B >= 0).reshape(-1, 2)
                assert signs[:, 0].all() and not signs[:, 1].any()


def test_micro_batches_carry_what_the_file_says(files):
    trajectories = files[2]
    for part in module(files, TOPR(baseline=0.25), tokens=60).train_dataloader():
        rows = [trajectories[i] for i in part.trajectory_B.tolist()]
        assert part.tokens.target_N.tolist() == [token for t in rows for token in t.response_ids]
        np.testing.assert_array_equal(
            part.ref_log_probs_N, np.float32([x for t in rows for x in t.ref_logprobs])
        )
        assert part.reward_B.tolist() == [t.reward for t in rows]
        assert part.advantage_B.tolist() == [t.reward - 0.25 for t in rows]
        for (start, end, first, last), t in zip(part.tokens.trajectories, rows, strict=True):
            for field, expected in (
                (part.tokens.input_ids_L, t.prompt_ids + t.response_ids),
                (part.tokens.position_ids_L, list(range(len(t.prompt_ids) + len(t.response_ids)))),
            ):
                assert field[first:last].tolist() + field[start:end].tolist() == expected


def test_loader_resumes_at_a_global_batch(files):
    whole = [
        part.trajectory_B.tolist() for part in module(files, TOPR(), tokens=60).train_dataloader()
    ]
    data = module(files, TOPR(), tokens=60)
    loader, seen = data.train_dataloader(), []
    for part in loader:
        seen.append(part.trajectory_B.tolist())
        if len(seen) == 2 * data.microbatches(0):
            break
    state = loader.state_dict()
    again = module(files, TOPR(), tokens=60).train_dataloader()
    again.load_state_dict(state)
    assert seen + [part.trajectory_B.tolist() for part in again] == whole
    assert [
        part.trajectory_B.tolist() for part in again
    ] == whole  # another pass starts at the beginning


def test_trajectories_without_weight_count_in_the_divisor(files):
    data = module(files, REDDrop())
    assert not data.advantage(0).all()
    for batch, part in zip(data.plan(0), data.train_dataloader(), strict=True):
        assert float(part.divisor) == len(batch)


@pytest.mark.parametrize(
    ("loss", "other", "words"),
    [
        (GRPO(), TOPR(), "no group holds rewards that differ"),
        (PPO(baseline=1), PPO(), "every advantage is 0"),
    ],
)
def test_data_without_a_signal_for_the_loss_are_rejected(tmp_path, files, loss, other, words):
    rows = make_trajectories(files[0], 20)
    for row in rows:
        row.reward = 1.0
    equal = files[0], str(write(tmp_path / "equal.parquet", files[0], rows))
    with pytest.raises(
        InputError, match=f"data.train: {words}, so {type(loss).__name__} learns nothing"
    ):
        module(equal, loss)
    for data in (module(equal, other), module(files, loss)):
        assert data.advantage(0).dtype == np.float32


def test_files_stay_mapped(files):
    data = module(files, TOPR())
    assert data.rows.cache_files  # on disk, in datasets' Arrow cache
    assert set(data.rows.column_names) == {
        "prompt_ids",
        "response_ids",
        "ref_logprobs",
        "reward",
        "group",
    }


def test_whole_groups_share_a_batch_though_the_loss_does_not_need_it(files):
    data = module(files, TOPR(), whole_groups=True)
    group = [t.group for t in files[2]]
    batches = [{group[i] for i in batch} for batch in data.plan(0)]
    assert len(batches) > 5 and len(set().union(*batches)) == sum(map(len, batches))


@pytest.mark.parametrize("loss", [REDDrop(), PairLoss()])
def test_what_is_drawn_anew_each_epoch_is_the_same_after_a_resumption(files, loss):
    whole = module(files, loss, epochs=3, tokens=60)
    streams = []
    for epoch in range(3):
        whole.trainer.current_epoch = epoch
        streams.append(
            [(b.trajectory_B.tolist(), b.advantage_B.tolist()) for b in whole.train_dataloader()]
        )
    assert streams[0] != streams[1] and sorted(streams[0]) != sorted(streams[1])
    resumed = module(
        files, loss, epochs=3, tokens=60
    )  # by another process, in the midst of the second epoch
    resumed.trainer.current_epoch = 1
    loader = resumed.train_dataloader()
    loader.load_state_dict({"epoch": 1, "global_batches": 2})
    rest = [(b.trajectory_B.tolist(), b.advantage_B.tolist()) for b in loader]
    assert rest == streams[1][2 * resumed.microbatches(1) :]


def test_whole_groups_and_pairs_exclude_each_other(files):
    with pytest.raises(InputError, match="draws pairs"):
        module(files, PairLoss(), whole_groups=True)
    module(files, PairLoss(), whole_groups=False)


def test_fit_needs_training_files(files):
    with pytest.raises(InputError, match="data.train is not set; fit needs it"):
        module((files[0], None), TOPR())
    module(files, TOPR())


def test_a_trajectory_is_traced_to_its_file_and_row(files):
    data = module(files, TOPR())
    first, second = files[1]
    places = data.place(np.array([0, 60, 61, 100]))
    assert places == [
        f"row 0 of {first}",
        f"row 60 of {first}",
        f"row 0 of {second}",
        f"row 39 of {second}",
    ]


def test_shares_are_those_of_the_whole_data_set(files):
    reward = np.array([t.reward for t in files[2]])
    p = (reward > 0).mean()
    assert module(files, TOPR()).shares() == pytest.approx(
        {"positive_share": p, "effective_positive_share": p, "baseline": 0}, abs=1e-6
    )
    shares = module(files, TOPR(positive_share=0.15)).shares()
    assert shares == pytest.approx(
        {
            "positive_share": p,
            "effective_positive_share": 0.15,
            "baseline": (p - 0.15) / (0.7 * p + 0.15),
        },
        abs=1e-6,
    )


def test_a_missing_file_of_problems_is_named(files):
    with pytest.raises(InputError, match="data.val: .*nowhere.jsonl"):
        module(files, TOPR(), val="nowhere.jsonl")
