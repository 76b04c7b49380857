"""Ranks' parts are the global batches, in order, each sample once; the feed says what each batch holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from manycard.data import BatchInfo, Feed, GlobalBatchSampler, GlobalLoader
from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import SettingError

from .datasets import Numbers, flat, joined, ranks, walk

CASES = {"length": st.integers(1, 40), "batch_size": st.integers(1, 12), "world_size": st.integers(1, 4)}


@settings(deadline=None, max_examples=60)
@given(**CASES, shuffle=st.booleans(), drop_last=st.booleans())
@pytest.mark.filterwarnings("ignore:drop_last=True leaves nothing")
def test_parts_make_the_global_batches(
    length: int, batch_size: int, world_size: int, shuffle: bool, drop_last: bool
) -> None:
    loaders = ranks(Numbers(length), batch_size, world_size, shuffle=shuffle, drop_last=drop_last, seed=5)
    expected = GlobalBatchSampler(length, batch_size, shuffle=shuffle, seed=5, drop_last=drop_last)
    for epoch in range(2):
        parts = [walk(loader) for loader in loaders]
        assert joined(parts) == list(expected.of_epoch(epoch))
        for batch in range(len(expected)):
            sizes = [part[batch][1].samples for part in parts]
            assert sizes == shard_sizes(sum(sizes), world_size)
        assert [info.last for _, info in parts[0]] == [number == len(expected) - 1 for number in range(len(expected))]
        assert all(loader.epoch == epoch and len(loader) == len(expected) for loader in loaders)


@pytest.mark.parametrize(("length", "batch_size"), [(13, 4), (1, 4), (5, 2)])
def test_kind_uneven_inputs_every_rank_has_as_many_batches(length: int, batch_size: int) -> None:
    parts = [walk(loader) for loader in ranks(Numbers(length), batch_size, 4)]
    assert {len(part) for part in parts} == {-(-length // batch_size)}


def test_kind_tiny_dataset_a_rank_without_samples_gets_a_stand_in() -> None:
    parts = [walk(loader) for loader in ranks(Numbers(2), 8, 4, num_workers=0)]
    assert [part[0][1] for part in parts] == [
        BatchInfo(1, 1, True),
        BatchInfo(1, 1, True),
        BatchInfo(1, 0, True),
        BatchInfo(1, 0, True),
    ]
    assert all(rows[0] in (0, 1) for part in parts for rows, _ in part)


def test_kind_eval_padding_no_sample_is_counted_twice() -> None:
    """PyTorch's DistributedSampler repeats 1 of these 7 samples on 2 ranks, 1 more on 4."""
    for world_size in (2, 4):
        parts = [walk(loader) for loader in ranks(Numbers(7), 4, world_size)]
        counted = sum(sum(rows[: info.samples]) for part in parts for rows, info in part)
        assert counted == sum(range(7))
        assert sum(info.samples for part in parts for _, info in part) == 7


def test_kind_set_epoch_every_iteration_has_an_order_of_its_own() -> None:
    loader = GlobalLoader(Numbers(30), 30, shuffle=True, feed=Feed())
    orders = [walk(loader)[0][0] for _ in range(4)]
    assert len({str(order) for order in orders}) == 4
    assert loader.epoch == 3
    # An endless loop over iterators, where set_epoch is forgotten in plain PyTorch.
    endless = itertools.chain.from_iterable(loader for _ in itertools.count())
    assert [next(endless).tolist() for _ in range(2)] == [
        list(GlobalBatchSampler(30, 30, shuffle=True, seed=0, drop_last=False).of_epoch(epoch)[0]) for epoch in (4, 5)
    ]


def test_set_epoch_is_accepted_and_repeats_the_epoch() -> None:
    loader = GlobalLoader(Numbers(20), 8, shuffle=True, feed=Feed())
    first = walk(loader)
    second = walk(loader)
    loader.set_epoch(0)
    assert walk(loader) == first
    assert walk(loader) == second
    with pytest.raises(SettingError, match="epoch=-1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("random_sampler", [False, True])
def test_kind_sampler_seed_orders_are_one_though_ranks_are_seeded_differently(random_sampler: bool) -> None:
    parts = []
    for rank in range(2):
        torch.manual_seed(1000 + rank)
        data = Numbers(12)
        source = DataLoader(data, 4, sampler=RandomSampler(data, num_samples=24)) if random_sampler else data
        size = None if random_sampler else 4
        loader = GlobalLoader(source, size, shuffle=not random_sampler, rank=rank, world_size=2, feed=Feed(), seed=1)
        parts.append(walk(loader))
    used = [sample for batch in joined(parts) for sample in batch]
    assert sorted(used) == sorted(list(range(12)) * (2 if random_sampler else 1))


def test_kind_no_sharding_ranks_never_load_the_same_sample() -> None:
    parts = [walk(loader) for loader in ranks(Numbers(64), 16, 4, shuffle=True)]
    loaded = [{sample for rows, _ in part for sample in rows} for part in parts]
    assert [len(each) for each in loaded] == [16] * 4
    assert len(set.union(*loaded)) == 64


def test_kind_seed_different_ranks_take_rank_0s_seed() -> None:
    told: list[Any] = [(7, 10), (8, 10)]
    loaders = [
        GlobalLoader(
            Numbers(10), 4, shuffle=True, seed=7 + rank, rank=rank, world_size=2, feed=Feed(), gather_objects=gather
        )
        for rank, gather in enumerate([lambda value: told, lambda value: told])
    ]
    assert [loader.seed for loader in loaders] == [7, 7]
    assert sorted(flat(joined([walk(loader) for loader in loaders]))) == list(range(10))


def test_datasets_of_different_length_are_refused_on_every_rank() -> None:
    for rank in range(2):
        with pytest.raises(SettingError, match=r"different length on different ranks \(10, 9\)"):
            GlobalLoader(
                Numbers(10 - rank), 4, rank=rank, world_size=2, feed=Feed(), gather_objects=lambda _: [(0, 10), (0, 9)]
            )


def test_feed_is_cleared_when_an_epoch_is_left_and_when_one_begins() -> None:
    feed = Feed()
    loader = GlobalLoader(Numbers(10), 4, feed=feed)
    for _ in loader:
        break
    assert feed.current is None
    held = iter(loader)
    next(held)
    assert feed.current == BatchInfo(4, 4, False)
    iter(loader)
    assert feed.current is None


def _fail_in_the_loop(loader: GlobalLoader) -> None:
    for _ in loader:
        raise ZeroDivisionError


def test_feed_is_cleared_when_the_loop_raises() -> None:
    loader = GlobalLoader(Numbers(10), 4, feed=Feed())
    with pytest.raises(ZeroDivisionError):
        _fail_in_the_loop(loader)
    assert loader.feed.current is None


def test_an_ending_loader_leaves_another_ones_batch_in_the_feed() -> None:
    feed = Feed()
    train, check = GlobalLoader(Numbers(10), 4, feed=feed), GlobalLoader(Numbers(3), 3, feed=feed)
    checking = iter(check)
    next(checking)
    training = iter(train)
    next(training)
    assert list(checking) == []
    assert feed.current == BatchInfo(4, 4, False)


def test_batches_are_moved_to_the_device() -> None:
    loader = GlobalLoader(Numbers(5), 2, feed=Feed(), device=torch.device("meta"))
    assert [(batch.device.type, tuple(batch.shape)) for batch in loader] == [("meta", (2,))] * 2 + [("meta", (1,))]


def test_two_iterations_at_a_time_are_apart() -> None:
    loader = GlobalLoader(Numbers(6), 2, feed=Feed())
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        (pair, pair) for pair in ([0, 1], [2, 3], [4, 5])
    ]


def test_an_error_of_the_dataset_arrives_and_the_next_epoch_works() -> None:
    class Broken(Numbers):
        broken = True

        def __getitem__(self, index: int) -> int:
            if self.broken and index == 3:
                raise OSError("bad file 3")
            return index

    data = Broken(6)
    loader = GlobalLoader(data, 2, feed=Feed())
    with pytest.raises(OSError, match="bad file 3"):
        list(loader)
    assert loader.feed.current is None
    data.broken = False
    assert joined([walk(loader)]) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_are_checked(rank: int, world_size: int) -> None:
    with pytest.raises(SettingError, match="Fix"):
        GlobalLoader(Numbers(4), 2, rank=rank, world_size=world_size, feed=Feed())
