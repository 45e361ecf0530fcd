"""Batching: the epoch plan, micro-batches within their bound, the packed row, the loader's position."""

import numpy as np
import pytest

from topr.batching import TrainLoader, epoch_plan, microbatch_count, pack, partition
from topr.io import InputError


def data(groups: int = 40, seed: int = 0):
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), rng.integers(1, 9, groups))
    return rng.permutation(group), rng.random(len(group)) < 0.4


def plan(group, positive, **changes):
    return epoch_plan(
        group, positive, **{"batch_size": 16, "grouping": "none", "seed": 0, "epoch": 0} | changes
    )


def same(one, other) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.mark.parametrize("grouping", ["none", "group", "pair"])
def test_plan_is_a_pure_function_and_shuffles_each_epoch(grouping):
    group, positive = data()
    assert same(plan(group, positive, grouping=grouping), plan(group, positive, grouping=grouping))
    assert not same(
        plan(group, positive, grouping=grouping), plan(group, positive, grouping=grouping, epoch=1)
    )
    assert not same(
        plan(group, positive, grouping=grouping), plan(group, positive, grouping=grouping, seed=1)
    )


@pytest.mark.parametrize("grouping", ["none", "group"])
def test_every_trajectory_is_used_once(grouping):
    group, positive = data()
    batches = plan(group, positive, grouping=grouping)
    assert sorted(np.concatenate(batches)) == list(range(len(group)))
    assert max(map(len, batches)) <= 16
    if grouping == "none":
        assert {len(batch) for batch in batches[:-1]} == {16}


def test_groups_are_whole_and_batches_full():
    group, positive = data()
    batches = plan(group, positive, grouping="group")
    homes = [set(group[batch]) for batch in batches]
    assert sum(map(len, homes)) == len(set(group))
    for batch, following in zip(batches, batches[1:], strict=False):  # the next group did not fit
        assert len(batch) + np.sum(group == group[following[0]]) > 16


def test_pairs_are_disjoint_within_groups_and_as_many_as_can_be():
    group, positive = data()
    batches = plan(group, positive, grouping="pair")
    pairs = np.concatenate(batches).reshape(-1, 2)
    assert len(set(pairs.ravel())) == pairs.size
    assert (group[pairs[:, 0]] == group[pairs[:, 1]]).all()
    assert positive[pairs[:, 0]].all() and not positive[pairs[:, 1]].any()
    most = sum(min(positive[group == g].sum(), (~positive[group == g]).sum()) for g in set(group))
    assert len(pairs) == most
    assert all(len(batch) % 2 == 0 and len(batch) <= 16 for batch in batches)


def test_a_group_larger_than_a_batch_is_rejected():
    positive = np.ones(17, dtype=bool)
    with pytest.raises(InputError, match="raise data.batch_size"):
        plan(np.zeros(17, dtype=int), positive, grouping="group")
    assert len(plan(np.zeros(17, dtype=int), positive, grouping="group", batch_size=17)) == 1


def test_pairs_need_both_signs_in_a_group_and_room_for_two():
    positive = np.array([True, False, True, False])
    with pytest.raises(InputError, match="such pairs"):
        plan(np.arange(4), positive, grouping="pair")
    with pytest.raises(InputError, match="data.batch_size is 1"):
        plan(np.zeros(4, dtype=int), positive, grouping="pair", batch_size=1)
    assert len(plan(np.zeros(4, dtype=int), positive, grouping="pair", batch_size=2)) == 2


def test_a_pair_counts_its_prompt_once_and_trajectories_outside_pairs_do_not_count():
    sizes = np.array([[0, 0, 1, 2], [200, 200, 200, 5], [100, 100, 100, 9000]])
    for batch, tokens in (([0, 1], 400), ([0, 2], 600)):
        assert (
            microbatch_count([np.array(batch)], sizes, microbatch_tokens=tokens, ranks=1, unit=2)
            == 1
        )
        with pytest.raises(InputError, match="a pair takes up"):
            microbatch_count(
                [np.array(batch)], sizes, microbatch_tokens=tokens - 1, ranks=1, unit=2
            )


def test_microbatch_count_is_the_least_that_fits():
    batches = [np.array([0, 1, 2, 3]), np.array([4, 5])]
    lengths = np.full(6, 4), np.array([6, 6, 6, 6, 16, 16])
    for prompts, expected in (
        (range(6), {(20, 1): 2, (40, 1): 1, (20, 2): 1, (40, 2): 1}),
        ([0] * 6, {(20, 1): 2, (40, 1): 1, (28, 1): 2, (36, 1): 1}),  # 4 + 4 x 6, 4 + 2 x 16
    ):
        for (tokens, ranks), count in expected.items():
            sizes = np.stack((list(prompts), *lengths))
            found = microbatch_count(batches, sizes, microbatch_tokens=tokens, ranks=ranks, unit=1)
            assert found == count, (tokens, ranks)


def test_a_trajectory_longer_than_a_micro_batch_is_rejected():
    sizes = np.array([[0, 1], [4, 4], [6, 7]])
    with pytest.raises(InputError, match="a trajectory takes up to 11; raise it"):
        microbatch_count([np.arange(2)], sizes, microbatch_tokens=10, ranks=1, unit=1)
    assert microbatch_count([np.arange(2)], sizes, microbatch_tokens=11, ranks=1, unit=1) == 2


def row_tokens(sizes: np.ndarray, padded: bool) -> int:
    """Tokens of a row, counted one by one."""
    if padded:
        return sum(sizes[1:].sum(axis=0).max() for _ in sizes.T)
    return sum(
        n + p * (not i or sizes[0, i - 1] != number) for i, (number, p, n) in enumerate(sizes.T)
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("unit", [1, 2])
def test_partition_covers_everything_within_the_bound(unit, padded):
    rng = np.random.default_rng(0)
    for _ in range(100):
        count = unit * rng.integers(1, 16)
        number = rng.integers(0, 5, count)
        sizes = np.stack((number, rng.integers(1, 30, 5)[number], rng.integers(1, 30, count)))
        bound = int(max(unit * sizes[1:].sum(axis=0).max(), 200))
        rows = partition(sizes, bound, unit=unit, padded=padded)
        assert microbatch_count(
            [np.arange(count)], sizes, microbatch_tokens=bound, ranks=1, unit=unit, padded=padded
        ) == (len(rows))
        assert sorted(np.concatenate(rows)) == list(range(count))
        assert all(row_tokens(sizes[:, row], padded) <= bound for row in rows)
        for row in rows:  # units stay whole
            assert np.array_equal(row // unit, np.repeat(row[::unit] // unit, unit))
        for parts in (
            len(rows),
            len(rows) + 1,
            40,
        ):  # at least as many as the bound needs: it still holds
            balanced = partition(sizes, parts=parts, unit=unit, padded=padded)
            assert len(balanced) == parts and sorted(np.concatenate(balanced)) == list(range(count))
            assert all(row_tokens(sizes[:, row], padded) <= bound for row in balanced)


def test_partition_balances_and_counts_a_prompt_once():
    alone = np.stack((np.arange(12), np.full(12, 4), np.full(12, 6)))
    assert [len(row) for row in partition(alone, parts=4)] == [3, 3, 3, 3]
    shared = np.stack((np.array([0, 1] * 4), np.full(8, 100), np.full(8, 10)))
    assert [row.tolist() for row in partition(shared, 140)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [row.tolist() for row in partition(shared, 139)] == [[0, 2, 4], [6], [1, 3, 5], [7]]


def test_padded_rows_hold_trajectories_of_similar_length():
    sizes = np.stack((np.zeros(6, dtype=int), np.full(6, 10), np.array([90, 5, 80, 5, 5, 0])))
    assert [row.tolist() for row in partition(sizes, 180, padded=True)] == [[5, 1, 3, 4], [2], [0]]
    assert [row.tolist() for row in partition(sizes, 200, padded=True)] == [[5, 1, 3, 4], [2, 0]]
    assert [row.tolist() for row in partition(sizes, parts=2, padded=True)] == [
        [5, 1, 3, 4],
        [2, 0],
    ]
    with pytest.raises(InputError, match="takes up to 100"):
        microbatch_count([np.arange(6)], sizes, microbatch_tokens=99, ranks=1, unit=1, padded=True)


def test_a_row_holds_each_prompt_once_and_continues_its_positions():
    prompts, responses = ([5, 6], [5, 6], [7]), ([8, 9], [10], [11, 12, 1])
    tokens = pack(*([np.array(ids) for ids in part] for part in (prompts, responses)))
    assert tokens.input_ids_L.tolist() == [5, 6, 8, 9, 10, 7, 11, 12, 1]
    assert tokens.position_ids_L.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3]
    assert tokens.trajectories == ((2, 4, 0, 2), (4, 5, 0, 2), (6, 9, 5, 6))
    assert tokens.spans == ((0, 2, 0, 0), (2, 4, 0, 2), (4, 5, 0, 2), (5, 9, 5, 5))
    assert tokens.position_N.tolist() == [
        1,
        2,
        1,
        5,
        6,
        7,
    ]  # of the tokens that predict the targets
    assert tokens.target_N.tolist() == [8, 9, 10, 11, 12, 1]
    assert tokens.length_B.tolist() == tokens.lengths == [2, 1, 3]
    assert tokens.nominal == 4 + 3 + 4


class Batches(list):
    """Micro-batches 0 to 5 of three updates."""

    count = 2


def test_a_loader_resumes_after_the_last_whole_update_of_its_epoch():
    loader = TrainLoader(Batches(range(6)), epoch=1, workers=0)
    for seen in loader:
        if seen == 4:  # within the third update
            break
    assert loader.state_dict() == {"epoch": 1, "global_batches": 2}
    resumed = TrainLoader(Batches(range(6)), epoch=1, workers=0)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [4, 5]
    assert list(resumed) == list(range(6))  # another pass starts at the beginning


def test_a_loader_of_the_next_epoch_starts_at_its_beginning():
    loader = TrainLoader(Batches(range(6)), epoch=1, workers=0)
    assert list(loader) == list(range(6))
    following = TrainLoader(Batches(range(6)), epoch=2, workers=0)
    following.load_state_dict(loader.state_dict())
    assert list(following) == list(range(6))
