"""The order of batches: equal sizes, complete epochs, resumable, and one sequence however it is shared out."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coat_flux.data.buckets import Bucket
from coat_flux.data.dataset import Batch, BucketBatchSampler, Sample

COUNTS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def make_samples(counts):
    return [
        Sample(Path(f"{width}-{i}.png"), "", Bucket(32 * (width + 1), 32), 0)
        for width, count in enumerate(counts)
        for i in range(count)
    ]


def take(sampler, count):
    return list(islice(sampler, count))


@given(COUNTS, st.integers(1, 4), st.integers(0, 3))
def test_an_epoch_has_every_sample_in_batches_of_one_size(counts, batch_size, seed):
    samples = make_samples(counts)
    sampler = BucketBatchSampler(samples, batch_size, seed)
    batches = take(sampler, sampler.batches_per_epoch)
    seen = Counter(i for batch in batches for i in batch.indices)
    assert set(seen) == set(range(len(samples)))
    assert all(len(batch.indices) == batch_size for batch in batches)
    assert all(len({samples[i].bucket for i in batch.indices}) == 1 for batch in batches)
    for size in {sample.bucket for sample in samples}:
        repeats = [seen[i] for i, sample in enumerate(samples) if sample.bucket == size]
        assert max(repeats) - min(repeats) <= 1
    assert [batch.draw for batch in batches] == list(range(len(batches)))


def test_order_depends_on_seed_and_epoch_only():
    samples = make_samples([9, 8])
    first, again, other = (take(BucketBatchSampler(samples, 2, seed), 18) for seed in (1, 1, 2))
    assert first == again
    assert first[:9] != other[:9]
    assert [b.indices for b in first[:9]] != [b.indices for b in first[9:]]
    assert [b.indices for b in take(BucketBatchSampler(samples, 1, 0), 4)] == [(3,), (14,), (2,), (9,)]


@given(COUNTS, st.integers(1, 3), st.integers(1, 4))
def test_ranks_share_out_the_sequence_of_one_process(counts, batch_size, world_size):
    samples = make_samples(counts)
    one = take(BucketBatchSampler(samples, batch_size), 12 * world_size)
    ranks = [take(BucketBatchSampler(samples, batch_size, 0, r, world_size), 12) for r in range(world_size)]
    assert [batch for together in zip(*ranks, strict=True) for batch in together] == one


@given(COUNTS, st.integers(0, 25), st.integers(1, 3), st.integers(1, 3))
def test_resume_continues_the_order_exactly(counts, taken, world_before, world_after):
    samples = make_samples(counts)
    before = BucketBatchSampler(samples, 2, 5, world_before - 1, world_before)
    take(before, taken)
    after = BucketBatchSampler(samples, 2, 5, 0, world_after)
    after.load_state_dict(before.state_dict())
    whole = take(BucketBatchSampler(samples, 2, 5), taken * world_before + 6 * world_after)
    assert take(after, 6) == whole[taken * world_before :: world_after]


def test_state_is_plain_and_names_epoch_and_position():
    sampler = BucketBatchSampler(make_samples([4]), 1, seed=3)
    take(sampler, 6)
    assert sampler.state_dict() == {"epoch": 1, "position": 2, "seed": 3, "batch_size": 1, "samples": 4}


def test_resume_with_other_photos_goes_on_and_says_so(caplog):
    before = BucketBatchSampler(make_samples([8]), 1)
    take(before, 15)
    after = BucketBatchSampler(make_samples([3]), 1)
    after.load_state_dict(before.state_dict())
    assert "samples 8 -> 3; training continues in epoch 1 with a new order" in caplog.text
    assert after.state_dict()["epoch"] == 2
    assert take(after, 1)[0] == Batch(after.epoch_batches(2)[0], 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), r"samples=\[\]: there is nothing"),
        ((make_samples([1]), 0), r"batch_size=0: must be at least 1"),
        ((make_samples([1]), 1, 0, 2, 2), r"rank=2: must be from 0 to world_size - 1 = 1"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BucketBatchSampler(*arguments)
