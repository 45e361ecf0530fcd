"""The epoch plan, rows of tokens within their bound, and what a row holds."""

from itertools import pairwise

import numpy as np
import pytest

from topr.batching import pack, partition, plan_batches
from topr.io import InputError


def data() -> tuple[np.ndarray, np.ndarray]:
    """40 groups of 1 to 8 trajectories, mixed; which are positive."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(40), rng.integers(1, 9, 40))
    return rng.permutation(group), rng.random(len(group)) < 0.4


GROUP, POSITIVE = data()


def plan(batching: str, *seeds: int) -> list[list[int]]:
    batches = plan_batches(GROUP, POSITIVE, 16, batching, *seeds)
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("batching", ["trajectories", "groups", "pairs"])
def test_a_plan_is_a_pure_function_of_its_seeds(batching):
    assert plan(batching, 0, 3) == plan(batching, 0, 3)
    assert plan(batching, 0, 3) not in (plan(batching, 0, 4), plan(batching, 1, 3))


@pytest.mark.parametrize("batching", ["trajectories", "groups"])
def test_a_plan_uses_every_trajectory_once(batching):
    batches = plan(batching, 0)
    assert sorted(sum(batches, [])) == list(range(len(GROUP)))
    assert max(map(len, batches)) == 16
    if batching == "trajectories":
        assert {len(batch) for batch in batches[:-1]} == {16}


def test_groups_are_whole_and_batches_full():
    batches = plan("groups", 0)
    groups = [set(GROUP[batch]) for batch in batches]
    assert sum(map(len, groups)) == 40
    for batch, following in pairwise(batches):  # the next group did not fit
        assert len(batch) + np.sum(GROUP[following[0]] == GROUP) > 16


def test_pairs_are_disjoint_within_groups_and_as_many_as_can_be():
    batches = plan("pairs", 0)
    assert {len(batch) for batch in batches[:-1]} == {16}
    positives = np.concatenate([batch[::2] for batch in batches])
    negatives = np.concatenate([batch[1::2] for batch in batches])
    assert len({*positives, *negatives}) == 2 * len(positives)
    assert np.array_equal(GROUP[positives], GROUP[negatives])
    assert POSITIVE[positives].all() and not POSITIVE[negatives].any()
    most = 0
    for group in range(40):
        signs = POSITIVE[group == GROUP]
        most += min(signs.sum(), (~signs).sum())
    assert len(positives) == most


def test_batches_that_cannot_be_made_are_rejected():
    one_group = np.zeros(17, dtype=int)
    signs = np.arange(17) % 2 == 0
    with pytest.raises(InputError, match="a group has 17 trajectories.*now 16"):
        plan_batches(one_group, signs, 16, "groups", 0)
    assert len(plan_batches(one_group, signs, 17, "groups", 0)) == 1
    with pytest.raises(InputError, match="no group holds both a positive and a negative"):
        plan_batches(one_group, signs | True, 16, "pairs", 0)
    assert len(plan_batches(one_group, signs, 2, "pairs", 0)) == 8


def row_tokens(sizes: np.ndarray, padded: bool) -> int:
    """Tokens of a row, counted one by one."""
    if padded:
        return sizes.shape[1] * (sizes[1] + sizes[2]).max(initial=0)
    total = 0
    before = None
    for prompt, prompt_length, length in sizes.T:
        total += length
        if prompt != before:
            total += prompt_length
        before = prompt
    return total


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("unit", [1, 2])
def test_rows_hold_everything_within_the_bound_and_are_as_many_as_ranks_need(unit, padded):
    rng = np.random.default_rng(0)
    for _ in range(100):
        count = unit * rng.integers(1, 16)
        prompt = rng.integers(0, 5, count)
        sizes = np.stack((prompt, rng.integers(1, 30, 5)[prompt], rng.integers(1, 30, count)))
        bound = max(unit * int((sizes[1] + sizes[2]).max()), 150)
        fewest = partition(sizes, bound, 1, unit, padded)
        for multiple in (1, 3, 20):
            rows = partition(sizes, bound, multiple, unit, padded)
            assert len(rows) % multiple == 0 and len(rows) - len(fewest) in range(multiple)
            assert sorted(np.concatenate(rows)) == list(range(count))
            for row in rows:
                assert row_tokens(sizes[:, row], padded) <= bound
                assert (row % unit).tolist() == [*range(unit)] * (len(row) // unit)
                assert (np.diff(row)[:: max(unit, 2)] == 1).all() or unit == 1  # pairs are whole


def listed(sizes: tuple, bound: int, multiple: int = 1, padded: bool = False) -> list[list[int]]:
    return [row.tolist() for row in partition(np.array(sizes), bound, multiple, 1, padded)]


def test_rows_are_balanced_and_count_a_prompt_once():
    alone = (range(12), [4] * 12, [6] * 12)
    assert [len(row) for row in listed(alone, 50)] == [4, 4, 4]
    assert [len(row) for row in listed(alone, 50, multiple=4)] == [3, 3, 3, 3]
    shared = ([0, 1] * 4, [100] * 8, [10] * 8)
    assert listed(shared, 140) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert len(listed(shared, 139)) == 4
    lengths = ([0] * 6, [10] * 6, [90, 5, 80, 5, 5, 0])  # similar ones are padded together
    assert listed(lengths, 180, padded=True) == [[5, 1, 3, 4], [2], [0]]
    assert listed(lengths, 200, padded=True) == [[5, 1, 3, 4], [2, 0]]


def test_a_row_holds_each_prompt_once_and_continues_its_positions():
    prompts = [np.array([5, 6]), np.array([5, 6]), np.array([7])]
    responses = [np.array([8, 9]), np.array([10]), np.array([11, 12, 1])]
    tokens = pack(prompts, responses)
    assert tokens.input_ids_L.tolist() == [5, 6, 8, 9, 10, 7, 11, 12, 1]
    assert tokens.position_ids_L.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3]
    assert tokens.trajectories == ((2, 4, 0, 2), (4, 5, 0, 2), (6, 9, 5, 6))
    assert tokens.spans == ((0, 2, 0, 0), (2, 4, 0, 2), (4, 5, 0, 2), (5, 9, 5, 5))
    assert tokens.position_N.tolist() == [1, 2, 1, 5, 6, 7]  # of what predicts the targets
    assert tokens.target_N.tolist() == [8, 9, 10, 11, 12, 1]
    assert tokens.length_B.tolist() == [2, 1, 3]
    assert [places.tolist() for places in tokens.sampled] == [[0, 1], [0], [0, 1, 2]]
    assert tokens.nominal == 4 + 3 + 4


def test_tokens_that_were_not_sampled_are_read_but_not_predicted():
    prompts = [np.array([5, 6])] * 2
    responses = [np.array([8, 9, 10]), np.array([11, 12])]
    tokens = pack(prompts, responses, [np.array([False, True, True]), None])
    assert tokens.input_ids_L.tolist() == [5, 6, 8, 9, 10, 11, 12]
    assert tokens.target_N.tolist() == [9, 10, 11, 12]
    assert tokens.position_N.tolist() == [2, 3, 1, 5]
    assert [places.tolist() for places in tokens.sampled] == [[1, 2], [0, 1]]
