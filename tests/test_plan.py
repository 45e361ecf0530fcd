"""The epoch plan: every trajectory once, whole groups, true pairs, nothing but its arguments decides."""

import numpy as np
import pytest

from topr.io import InputError
from topr.plan import epoch_plan, microbatch_count


def data(groups: int = 40, seed: int = 0):
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), rng.integers(1, 9, groups))
    return rng.permutation(group), rng.random(len(group)) < 0.4


def plan(group, positive, **changes):
    return epoch_plan(group, positive, **{"batch_size": 16, "grouping": "none", "seed": 0, "epoch": 0} | changes)


def same(one, other) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.mark.parametrize("grouping", ["none", "group", "pair"])
def test_plan_is_a_pure_function_and_shuffles_each_epoch(grouping):
    group, positive = data()
    assert same(plan(group, positive, grouping=grouping), plan(group, positive, grouping=grouping))
    assert not same(plan(group, positive, grouping=grouping), plan(group, positive, grouping=grouping, epoch=1))
    assert not same(plan(group, positive, grouping=grouping), plan(group, positive, grouping=grouping, seed=1))


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


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(InputError, match="raise data.batch_size"):
        plan(np.zeros(17, dtype=int), np.ones(17, dtype=bool), grouping="group")
    with pytest.raises(InputError, match="such pairs"):
        plan(np.arange(4), np.array([True, False, True, False]), grouping="pair")


def test_a_pair_of_one_prompt_takes_it_once_and_what_is_in_no_pair_counts_nothing():
    sizes = np.array([[0, 0, 1, 2], [200, 200, 200, 5], [100, 100, 100, 9000]])
    how = {"ranks": 1, "unit": 2}
    assert microbatch_count([np.array([0, 1])], sizes, microbatch_tokens=400, **how) == 1
    for batch, tokens in (([0, 1], 399), ([0, 2], 599)):
        with pytest.raises(InputError, match="a pair takes up"):
            microbatch_count([np.array(batch)], sizes, microbatch_tokens=tokens, **how)
    with pytest.raises(InputError, match="data.batch_size is 1"):
        plan(np.zeros(4, dtype=int), np.array([True, False] * 2), grouping="pair", batch_size=1)


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
