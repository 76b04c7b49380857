"""Streams over any number of workers and ranks, from any place: what `streams` sends makes each global batch once.

Workers are played one after another in this process, in the order in which PyTorch's DataLoader takes their batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from manycard.data import Feed, GlobalLoader, stream_walk
from manycard.data.streams import watch_worker

from .datasets import Stream, flat, joined, walk
from .test_stream_workers import Unsplit

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create . worker processes")


def _played(walk_of: stream_walk.StreamWalk, key: int) -> Iterator[Any]:
    """Every worker's items, a batch from each in turn; one that has ended is left out."""
    workers = walk_of.workers
    queues = []
    for number in range(workers):
        info: Any = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=0, dataset=walk_of._stream.dataset)
        torch_worker._worker_info = info
        try:
            watch_worker(info, lambda: None)
            queues.append(list(walk_of._stream))
        finally:
            torch_worker._worker_info = None
    while any(queues):
        for queue in queues:
            if queue:
                yield queue.pop(0)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are played."""
    usual = stream_walk.StreamWalk._items

    def items(self: stream_walk.StreamWalk, key: int) -> Iterator[Any]:
        return _played(self, key) if self.workers else usual(self, key)

    monkeypatch.setattr(stream_walk.StreamWalk, "_items", items)
    assert get_worker_info() is None


def _loaders(source: Any, size: int, workers: int, world_size: int, drop_last: bool) -> list[GlobalLoader]:
    return [
        GlobalLoader(
            source, size, num_workers=workers, rank=rank, world_size=world_size, drop_last=drop_last, feed=Feed()
        )
        for rank in range(world_size)
    ]


@pytest.mark.usefixtures("played")
@settings(deadline=None, max_examples=150)
@given(
    length=st.integers(0, 60),
    size=st.integers(1, 9),
    workers=st.integers(0, 4),
    after=st.integers(0, 4),
    world_size=st.integers(1, 3),
    place=st.integers(0, 30),
    drop_last=st.booleans(),
    splits=st.booleans(),
)
def test_each_sample_comes_once_and_a_resume_goes_on(
    length: int, size: int, workers: int, after: int, world_size: int, place: int, drop_last: bool, splits: bool
) -> None:
    source: Any = Stream(length, shuffled=True) if splits else Unsplit(length, shuffled=True)
    after = workers if splits else after
    (alone,) = _loaders(source, size, workers, 1, drop_last)
    whole = joined([walk(alone)])
    full, rest = divmod(length, size)
    assert [len(batch) for batch in whole] == [size] * full + [rest] * (rest > 0 and not drop_last)
    assert len(set(flat(whole))) == len(flat(whole))
    if not drop_last:
        assert sorted(flat(whole)) == list(range(length))
    if not splits:
        assert whole == joined([walk(_loaders(source, size, 0, 1, drop_last)[0])])
    assert joined([walk(loader) for loader in _loaders(source, size, workers, world_size, drop_last)]) == whole
    place = min(place, len(whole) - 1)
    if place > 0:
        (left,) = _loaders(source, size, workers, 1, drop_last)
        walk(left, place)
        resumed = _loaders(source, size, after, world_size, drop_last)
        for loader in resumed:
            loader.load_state_dict(left.state_dict())
        assert joined([walk(loader) for loader in resumed]) == whole[place:]


@pytest.mark.usefixtures("played")
def test_rows_of_tensors_are_cut_for_each_rank() -> None:
    parts = [walk(loader) for loader in _loaders(_Rows(), 4, 2, 3, False)]
    assert [row[0] for row in flat(joined(parts))] == list(range(10))


class _Rows(Unsplit):
    def __init__(self) -> None:
        super().__init__(10)

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([number, number]) for number in range(self.length))
