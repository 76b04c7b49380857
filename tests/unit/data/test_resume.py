"""A restored loader goes on at the next batch, on any number of cards."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from manycard.data import Feed, GlobalLoader
from manycard.errors import BatchError, CheckpointError, SettingError

from .datasets import Augmented, Numbers, SizedStream, Stream, joined, ranks, walk


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    place=st.integers(0, 40),
)
def test_any_place_and_any_change_of_ranks(length: int, batch_size: int, before: int, after: int, place: int) -> None:
    place = min(place, -(-length // batch_size))
    whole = [joined([walk(loader)]) for loader in [*ranks(Numbers(length), batch_size, 1, shuffle=True)] for _ in "ab"]
    first = ranks(Numbers(length), batch_size, before, shuffle=True)
    used = joined([walk(loader, place) if place else [] for loader in first])
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states), "the state is the same on every rank"
    second = ranks(Numbers(length), batch_size, after, shuffle=True)
    for loader in second:
        loader.load_state_dict(states[0])
    rest = joined([walk(loader) for loader in second])
    following = joined([walk(loader) for loader in second])
    if place == len(whole[0]):
        # Left at its last batch: that epoch is done.
        assert [used, rest] == whole
    else:
        assert [used + rest, following] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_every_place_with_workers(workers: int) -> None:
    """Batches that workers have read ahead don't count as used; draws go on as they would have."""

    def make() -> GlobalLoader:
        return GlobalLoader(Augmented(11), 3, shuffle=True, num_workers=workers, feed=Feed())

    one = make()
    whole = [walk(one), walk(one)]
    places = range(1, 4) if not workers else (2,)
    for place in places:
        loader = make()
        iterator = iter(loader)
        for _ in range(place):
            next(iterator)
        state = loader.state_dict()
        assert state["batches"] == place
        del iterator
        restored = make()
        restored.load_state_dict(state)
        assert walk(restored) == whole[0][place:]
        assert walk(restored) == whole[1]


def test_state_inside_the_loop_counts_the_batch_in_hand() -> None:
    loader = GlobalLoader(Numbers(6), 2, feed=Feed())
    places = []
    for _ in loader:
        state = loader.state_dict()
        places.append((state["epoch"], state["batches"]))
    assert places == [(0, 1), (0, 2), (0, 3)]
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)


def test_saved_inside_the_loop_at_the_last_batch_nothing_of_the_epoch_is_left() -> None:
    loader = GlobalLoader(Numbers(6), 2, feed=Feed())
    iterator = iter(loader)
    state = [loader.state_dict() for _ in itertools.islice(iterator, 3)][-1]
    restored = GlobalLoader(Numbers(6), 2, feed=Feed())
    restored.load_state_dict(state)
    assert walk(restored) == []
    assert restored.epoch == 0
    assert len(walk(restored)) == 3
    assert restored.epoch == 1


def test_set_epoch_of_the_restored_epoch_keeps_the_place() -> None:
    loader = GlobalLoader(Numbers(9), 2, shuffle=True, feed=Feed())
    walk(loader)
    walk(loader, 2)
    state = loader.state_dict()
    restored = GlobalLoader(Numbers(9), 2, shuffle=True, feed=Feed())
    restored.load_state_dict(state)
    restored.set_epoch(1)
    assert len(walk(restored)) == 3
    restored.load_state_dict(state)
    restored.set_epoch(2)
    assert len(walk(restored)) == 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_streams(workers: int, world_size: int) -> None:
    def make() -> list[GlobalLoader]:
        return ranks(Stream(11, shuffled=True), 3, world_size, num_workers=workers)

    loaders = make()
    whole = [joined([walk(loader) for loader in loaders]) for _ in range(2)]
    assert whole[0] != whole[1]
    loaders = make()
    for loader in loaders:
        walk(loader)
        walk(loader, 2)
    state = loaders[0].state_dict()
    restored = ranks(Stream(11, shuffled=True), 3, 1, num_workers=workers)
    restored[0].load_state_dict(state)
    assert joined([walk(restored[0])]) == whole[1][2:]


def test_a_shorter_stream_is_noticed() -> None:
    loader = GlobalLoader(Stream(9), 3, feed=Feed())
    walk(loader, 2)
    restored = GlobalLoader(Stream(3), 3, feed=Feed())
    restored.load_state_dict(loader.state_dict())
    with pytest.raises(BatchError, match="ended after 1 batches of epoch 0"):
        list(restored)


@pytest.mark.parametrize("generator", [None, 4])
def test_samplers(generator: int | None) -> None:
    def make(world_size: int) -> list[GlobalLoader]:
        data = Numbers(12)
        drawn = torch.Generator().manual_seed(generator) if generator is not None else None
        sampler = WeightedRandomSampler([1.0] * 12, 12, generator=drawn)
        return ranks(DataLoader(data, 4, sampler=sampler), None, world_size)

    loaders = make(1)
    whole = [joined([walk(loaders[0])]) for _ in range(3)]
    assert len({str(epoch) for epoch in whole}) == 3, "each epoch draws anew"
    loaders[0].set_epoch(1)
    walk(loaders[0], 1)
    torch.manual_seed(99)
    restored = make(2)
    for loader in restored:
        loader.load_state_dict(loaders[0].state_dict())
    assert joined([walk(loader) for loader in restored]) == whole[1][1:]
    assert joined([walk(loader) for loader in restored]) == whole[2]


class _OwnGenerator:
    """A sampler that can't be resumed: it draws from a generator nobody else sees."""

    def __init__(self, seed: int) -> None:
        self.drawn = random.Random(seed)

    def __iter__(self) -> Any:
        order = list(range(12))
        self.drawn.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 12


def test_a_sampler_that_cannot_be_resumed_is_noticed() -> None:
    def make() -> GlobalLoader:
        return GlobalLoader(DataLoader(Numbers(12), 4, sampler=_OwnGenerator(0)), feed=Feed())

    loader = make()
    walk(loader)
    walk(loader, 1)
    restored = make()
    restored.load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="another order for epoch 1"):
        list(restored)


def test_ranks_that_draw_different_orders_all_raise() -> None:
    prints = [ranks(DataLoader(Numbers(12), 4, sampler=_OwnGenerator(seed)), None, 1)[0] for seed in (0, 1)]
    for loader in prints:
        walk(loader, 1)
    told = [loader.state_dict()["order"] for loader in prints]
    for rank in range(2):
        gathers = iter([[(0, 12), (0, 12)], told])
        loader = GlobalLoader(
            DataLoader(Numbers(12), 4, sampler=_OwnGenerator(rank)),
            rank=rank,
            world_size=2,
            feed=Feed(),
            gather_objects=lambda _, gathers=gathers: next(gathers),  # type: ignore[misc]
        )
        with pytest.raises(SettingError, match="another order on ranks 1 than on rank 0"):
            list(loader)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"batch_size": 4}, "batch_size=4"), ({"shuffle": False}, "shuffle=False"), ({"length": 12}, "length=12")],
)
def test_changed_settings_in_the_middle_of_an_epoch_are_refused(change: dict[str, Any], named: str) -> None:
    loader = GlobalLoader(Numbers(10), 3, shuffle=True, feed=Feed())
    walk(loader, 2)
    settings_now = {"length": 10, "batch_size": 3, "shuffle": True, **change}
    length = settings_now.pop("length")
    other = GlobalLoader(Numbers(length), **settings_now, feed=Feed())
    with pytest.raises(SettingError, match=f"{named}: the checkpoint was made with .* 2 batches into an epoch"):
        other.load_state_dict(loader.state_dict())


def test_settings_may_change_between_epochs() -> None:
    loader = GlobalLoader(Numbers(10), 3, feed=Feed())
    walk(loader)
    other = GlobalLoader(Numbers(12), 4, feed=Feed())
    other.load_state_dict(loader.state_dict())
    assert len(walk(other)) == 3
    assert other.epoch == 1


def test_the_seed_comes_with_the_state() -> None:
    loader = GlobalLoader(Numbers(10), 3, shuffle=True, seed=5, feed=Feed())
    whole = walk(loader)
    loader.set_epoch(0)
    walk(loader, 1)
    other = GlobalLoader(Numbers(10), 3, shuffle=True, seed=6, feed=Feed())
    other.load_state_dict(loader.state_dict())
    assert walk(other) == whole[1:]


@pytest.mark.parametrize("state", [{}, {"epoch": "x"}, {"epoch": 1, "batches": None}])
def test_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not the state of a loader"):
        GlobalLoader(Numbers(10), 3, feed=Feed()).load_state_dict(state)


def test_the_state_is_plain() -> None:
    loader = GlobalLoader(DataLoader(Numbers(12), 4, sampler=RandomSampler(Numbers(12))), feed=Feed())
    walk(loader, 1)
    assert all(type(value) in (int, bool, type(None)) for value in loader.state_dict().values())


def test_sized_streams_resume_their_length_too() -> None:
    loader = GlobalLoader(SizedStream(7), 3, feed=Feed())
    assert len(loader) == 3
    walk(loader, 1)
    with pytest.raises(SettingError, match="length=8"):
        GlobalLoader(SizedStream(8), 3, feed=Feed()).load_state_dict(loader.state_dict())
