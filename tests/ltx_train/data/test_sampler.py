"""The sampler: a pure function of seed and step, every sample once a pass, one bucket a batch, the same for any rank count."""

from __future__ import annotations

from collections import Counter

import pytest

from ltx_train.data.sampler import BucketSampler, Stage, Unit
from ltx_train.errors import ConfigError

UNITS = [Unit("a", tokens=10)] * 7 + [Unit("b", tokens=50)] * 5 + [Unit("c", 2, 100)]


def step_ids(sampler, step, world=1):
    return [i for micro in range(sampler.accumulation) for rank in range(world) for i in sampler.batch_ids(step, micro, rank, world)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_batches_are_of_one_bucket(batch_size):
    sampler = BucketSampler(UNITS, batch_size=batch_size)
    for step in range(60):
        ids = sampler.batch_ids(step)
        assert len(ids) == batch_size and len({UNITS[i].group for i in ids}) == 1


def test_every_sample_once_an_epoch_and_repeats():
    sampler = BucketSampler(UNITS)
    assert sampler.epoch_samples() == 14
    for epoch in range(3):
        seen = Counter(i for step in range(14 * epoch, 14 * epoch + 14) for i in sampler.batch_ids(step))
        assert seen == {**{i: 1 for i in range(12)}, 12: 2}


@pytest.mark.parametrize("batch_size", [2, 3, 4, 16])
def test_larger_batches_see_each_sample_equally_often(batch_size):
    """A line is cut into batches, so after p passes of its group a sample was seen p times (give or take the last batch)."""
    sampler = BucketSampler(UNITS, batch_size=batch_size)
    seen = Counter(i for step in range(14 * 12) for i in sampler.batch_ids(step))
    for group in "ab":
        counts = [seen[i] for i, u in enumerate(UNITS) if u.group == group]
        assert max(counts) - min(counts) <= 2
    total = sum(seen.values())
    assert sum(seen[i] for i in range(7)) / total == pytest.approx(7 / 14, abs=0.08)


def test_pure_and_seeded():
    one, other = BucketSampler(UNITS, batch_size=2, seed=1), BucketSampler(UNITS, batch_size=2, seed=1)
    forward = [one.batch_ids(s) for s in range(40)]
    assert [other.batch_ids(s) for s in reversed(range(40))][::-1] == forward
    assert [BucketSampler(UNITS, batch_size=2, seed=2).batch_ids(s) for s in range(40)] != forward
    first, second = ([one.batch_ids(s)[0] for s in range(k, k + 7)] for k in (0, 7))
    assert first != second, "each epoch has its own order"
    alone = BucketSampler([Unit("a")] * 7, seed=1)
    first, second = ([alone.batch_ids(s)[0] for s in range(k, k + 7)] for k in (0, 7))
    assert first != second and sorted(first) == sorted(second) == list(range(7)), "each pass through one bucket too"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_sees_the_same_step(world):
    """8 micro-batches a step, done by 1, 2 or 4 ranks."""
    alone = BucketSampler(UNITS, batch_size=2, accumulation=8)
    shared = BucketSampler(UNITS, batch_size=2, accumulation=8 // world)
    for step in range(20):
        assert step_ids(shared, step, world) == step_ids(alone, step)
        slots = [s for micro in range(8 // world) for rank in range(world) for s in shared.slots(step, micro, rank, world)]
        assert slots == list(range(16))


def test_a_small_dataset_wraps_and_is_named():
    sampler = BucketSampler([Unit("a")] * 3, batch_size=8)
    assert sampler.small_groups == {"a": 3}
    counts = Counter(i for step in range(3) for i in sampler.batch_ids(step))
    assert counts == {0: 8, 1: 8, 2: 8}
    assert BucketSampler([Unit("a")] * 8, batch_size=8).small_groups == {}


def test_stages():
    sampler = BucketSampler(UNITS, stages=[Stage(0, 10), Stage(20, 50), Stage(40)])
    groups = lambda steps: {UNITS[i].group for s in steps for i in sampler.batch_ids(s)}  # noqa: E731
    assert groups(range(20)) == {"a"} and groups(range(20, 40)) == {"a", "b"} and groups(range(40, 60)) == {"a", "b", "c"}
    with pytest.raises(ConfigError, match="at most 5 tokens"):
        BucketSampler(UNITS, stages=[Stage(0, 5)])


def test_far_steps_are_quick_and_consistent():
    sampler = BucketSampler(UNITS, batch_size=3)
    assert sampler.batch_ids(10**9) == BucketSampler(UNITS, batch_size=3).batch_ids(10**9)


def test_caption_dropout_share_is_keyed():
    sampler = BucketSampler(UNITS, batch_size=4, accumulation=2)
    dropped = [d for s in range(1000) for m in range(2) for d in sampler.dropped(0.25, s, m)]
    assert sum(dropped) / len(dropped) == pytest.approx(0.25, abs=0.02)
    shared = BucketSampler(UNITS, batch_size=4, accumulation=1)
    assert [d for r in range(2) for d in shared.dropped(0.25, 7, 0, r, 2)] == [d for m in range(2) for d in sampler.dropped(0.25, 7, m)]
    assert not any(sampler.dropped(0.0, 3))


def test_nothing_to_train_on():
    with pytest.raises(ConfigError):
        BucketSampler([])
