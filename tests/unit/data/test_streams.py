"""Iterable datasets: every rank walks the stream and keeps its cut of each global batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from manycard.data import BatchInfo, Feed, GlobalLoader

from .datasets import EpochStream, SizedStream, Stream, flat, joined, ranks, walk


@settings(deadline=None, max_examples=40)
@given(length=st.integers(0, 40), batch_size=st.integers(1, 12), world_size=st.integers(1, 4), drop_last=st.booleans())
def test_parts_make_the_stream(length: int, batch_size: int, world_size: int, drop_last: bool) -> None:
    loaders = ranks(Stream(length), batch_size, world_size, drop_last=drop_last)
    parts = [walk(loader) for loader in loaders]
    plain = [batch.tolist() for batch in DataLoader(Stream(length), batch_size, drop_last=drop_last)]
    assert joined(parts) == plain
    assert [info.last for _, info in parts[0]] == [number == len(plain) - 1 for number in range(len(plain))]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_split_as_they_do_in_pytorch(workers: int) -> None:
    plain = [batch.tolist() for batch in DataLoader(Stream(11), 3, num_workers=workers)]
    assert joined([walk(loader) for loader in ranks(Stream(11), 3, 2, num_workers=workers)]) == plain


def test_ranks_see_one_shuffled_stream() -> None:
    """Though the ranks' processes are seeded differently."""
    parts = []
    for rank, loader in enumerate(ranks(Stream(20, shuffled=True), 6, 3)):
        torch.manual_seed(rank)
        parts.append([walk(loader), walk(loader)])
    epochs = [joined([part[epoch] for part in parts]) for epoch in range(2)]
    assert [sorted(flat(epoch)) for epoch in epochs] == [list(range(20))] * 2
    assert epochs[0] != epochs[1]


def test_persistent_workers_shuffle_anew_each_epoch_and_as_new_ones_do() -> None:
    kept, new = (
        GlobalLoader(Stream(20, shuffled=True), 6, num_workers=1, persistent_workers=persistent, feed=Feed())
        for persistent in (True, False)
    )
    epochs = [walk(kept) for _ in range(3)]
    assert epochs == [walk(new) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_are_told_the_epoch(workers: int) -> None:
    loader = GlobalLoader(EpochStream(), 4, num_workers=workers, persistent_workers=bool(workers), feed=Feed())
    assert [walk(loader)[0][0] for _ in range(3)] == [[epoch] * 4 for epoch in range(3)]


def test_any_iterable_that_can_be_walked_again() -> None:
    class Lines:
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from range(5)

    loader = GlobalLoader(Lines(), 2, feed=Feed())
    assert joined([walk(loader)]) == joined([walk(loader)]) == [[0, 1], [2, 3], [4]]


def test_streams_of_batches() -> None:
    class Batches(Stream):
        def __iter__(self):  # type: ignore[no-untyped-def, override]
            yield from ({"x": torch.arange(size), "name": [str(size)] * size} for size in (3, 1))

    def make(rank: int) -> GlobalLoader:
        return GlobalLoader(DataLoader(Batches(0), batch_size=None), rank=rank, world_size=2, feed=Feed())

    assert [(batch["x"].tolist(), batch["name"]) for batch in make(0)] == [([0, 1], ["3", "3"]), ([0], ["1"])]
    second = make(1)
    assert [(batch["x"].tolist(), batch["name"], second.feed.current) for batch in second] == [
        ([2], ["3"], BatchInfo(1, 1, False)),
        ([0], ["1"], BatchInfo(1, 0, True)),
    ]


def test_length() -> None:
    assert len(GlobalLoader(SizedStream(7), 3, feed=Feed())) == 3
    assert len(GlobalLoader(SizedStream(7), 3, drop_last=True, feed=Feed())) == 2
    with pytest.raises(TypeError):
        len(GlobalLoader(Stream(7), 3, feed=Feed()))
