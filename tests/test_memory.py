"""The estimate of memory, against the bytes that torch allocates in training."""

import gc

import memory
import pytest
import torch

from topr.policy import load_policy
from topr.policy.memory import kept_for_backward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"checkpointing": True},
        {"checkpointing": "selective"},
        {"lora": True, "checkpointing": True},
        {"adafactor": True, "bfloat16": True},
    ],
    ids=str,
)
def test_the_estimate_is_within_a_tenth_of_what_is_allocated(settings):
    assert memory.validate("30M", **settings) == pytest.approx(1, abs=0.1)


def test_the_estimate_holds_at_the_shapes_of_a_real_model():
    ratio = memory.without_data("1B", 2048, checkpointing=True, adafactor=True)
    assert ratio == pytest.approx(1, abs=0.1)


def test_shards_take_what_they_should(tmp_path):
    alone = memory.estimate(tmp_path / "1B", "1B", 1, lora=False)
    sharded = memory.estimate(tmp_path / "1B", "1B", 8, lora=False)
    layers = 16 * (2048 * (2 * 2048 + 2 * 512 + 3 * 8192) + 2 * 2048)
    root = 128256 * 2048 + 2048
    assert alone.weights == alone.gradients == 4 * (layers + root)
    assert sharded.weights == 4 * (layers + root) / 8 + 4 * root + 2 * layers * 2 / 16
    gathered = 4 * root + 2 * layers + 2 * 128256 * 2048
    assert sharded.sampling == 4 * (layers + root) / 8 + sharded.optimizer + gathered


def test_an_estimate_leaves_no_tensor_behind(policy):
    loaded = load_policy(str(policy))
    counts = []
    for _ in range(3):
        kept_for_backward(loaded, False)
        gc.collect()
        counts.append(sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects()))
    assert counts[1] == counts[2]  # the first call fills caches
