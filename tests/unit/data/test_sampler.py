"""The order of an epoch is a function of the seed and the epoch, and holds each sample once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manycard.data import GlobalBatchSampler
from manycard.errors import SettingError


@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_sample_once(length: int, batch_size: int, epoch: int, shuffle: bool, drop_last: bool) -> None:
    sampler = GlobalBatchSampler(length, batch_size, shuffle=shuffle, seed=3, drop_last=drop_last)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    used = [index for batch in batches for index in batch]
    assert len(batches) == len(sampler) == (length // batch_size if drop_last else -(-length // batch_size))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert len(used) == len(set(used)) == (length // batch_size * batch_size if drop_last else length)
    assert set(used) <= set(range(length))
    if not shuffle:
        assert used == list(range(len(used)))


def test_order_follows_from_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return list(GlobalBatchSampler(50, 8, shuffle=True, seed=seed, drop_last=False).of_epoch(epoch))  # type: ignore[arg-type]

    first = order(0, 1)
    random.random()
    np.random.rand()
    torch.rand(1)
    assert order(0, 1) == first
    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({str(each) for each in orders}) == 9, "seed 1's epoch 0 must not be seed 0's epoch 1"


def test_shuffling_leaves_the_process_random_state_alone() -> None:
    before = torch.get_rng_state()
    list(GlobalBatchSampler(50, 8, shuffle=True, seed=0, drop_last=False))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_can_be_read_from_any_place() -> None:
    batches = GlobalBatchSampler(10, 4, shuffle=True, seed=0, drop_last=False).of_epoch(2)
    assert [batches[number] for number in range(-3, 0)] == list(batches) == batches[:]
    with pytest.raises(IndexError):
        batches[3]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_batch_size_is_a_whole_number(value: object) -> None:
    with pytest.raises(SettingError, match=r"batch_size=.*Fix"):
        GlobalBatchSampler(10, value, shuffle=False, seed=0, drop_last=False)  # type: ignore[arg-type]
