"""Streams and workers: each sample once with any number of them, or an error that says why not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from manycard.data import Feed, GlobalLoader
from manycard.errors import BatchError, SettingError

from .datasets import Stream, flat, joined, ranks, walk

# Three workers on a machine with two cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")


class Unsplit(IterableDataset[Any]):
    """0, 1, 2, ..., alike in every worker; PyTorch's DataLoader repeats it for each."""

    def __init__(self, length: int, *, draws: bool = False, shuffled: bool = False) -> None:
        self.length, self.draws, self.shuffled = length, draws, shuffled

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.length))
        if self.shuffled:
            random.shuffle(numbers)
        for number in numbers:
            yield torch.tensor([float(number), *_drawn()], dtype=torch.float64) if self.draws else number


def _drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class SplitAfterShuffle(Unsplit):
    """Shuffles everything, takes its worker's part, and draws."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.length))
        random.shuffle(numbers)
        info = get_worker_info()
        part = numbers if info is None else numbers[info.id :: info.num_workers]
        for number in part:
            yield torch.tensor([float(number), *_drawn()], dtype=torch.float64)


def _epoch(source: Any, size: int = 3, world_size: int = 1, **settings: Any) -> list[list[Any]]:
    return joined([walk(loader) for loader in ranks(source, size, world_size, **settings)])


@pytest.mark.parametrize("length", [0, 5, 12, 13, 14])
def test_a_stream_that_does_not_split_itself_is_not_repeated_by_workers(length: int) -> None:
    """PyTorch's DataLoader gives each sample once for each worker."""
    expected = [list(range(start, min(start + 3, length))) for start in range(0, length, 3)]
    assert _epoch(Unsplit(length), num_workers=3) == expected
    assert _epoch(Unsplit(length), num_workers=2, world_size=2) == expected
    full = [batch for batch in expected if len(batch) == 3]
    assert _epoch(Unsplit(length), num_workers=2, drop_last=True) == full
    assert sorted(flat([b.tolist() for b in DataLoader(Unsplit(length), 3, num_workers=2)])) == sorted(
        [*range(length)] * 2
    ), "what plain PyTorch does"


def test_its_order_and_draws_are_those_of_one_process() -> None:
    stream = Unsplit(14, draws=True, shuffled=True)
    alone = _epoch(stream)
    assert _epoch(stream, num_workers=1) == alone
    assert _epoch(stream, num_workers=3) == alone
    assert _epoch(stream, num_workers=2, world_size=2) == alone


def test_workers_draw_apart_in_a_stream_that_is_shuffled_and_then_split() -> None:
    """Under PyTorch each worker shuffles otherwise, so parts overlap."""
    for world_size in (1, 2):
        rows = flat(_epoch(SplitAfterShuffle(16), 4, world_size, num_workers=2))
        assert sorted(row[0] for row in rows) == list(range(16))
        for column in (1, 2, 3):
            assert len({row[column] for row in rows}) == 16, "a draw came twice"


@pytest.mark.parametrize(("length", "sizes"), [(14, [4, 4, 4, 2]), (16, [4] * 4), (3, [3])])
def test_what_workers_have_left_over_makes_full_batches(length: int, sizes: list[int]) -> None:
    """PyTorch's DataLoader gives one short batch for each worker, and drops that many."""
    batches = _epoch(Stream(length), 4, num_workers=3)
    assert [len(batch) for batch in batches] == sizes
    assert sorted(flat(batches)) == list(range(length))
    kept = _epoch(Stream(length), 4, num_workers=3, drop_last=True)
    assert [len(batch) for batch in kept] == [size for size in sizes if size == 4]
    assert _epoch(Stream(length), 4, 2, num_workers=3) == batches


class OwnPart(Unsplit):
    """Takes whichever part a worker_init_fn has given it."""

    part = slice(None)

    def __iter__(self) -> Iterator[int]:
        return iter(list(range(self.length))[self.part])


def split_in_worker(worker: int) -> None:
    """A worker_init_fn as PyTorch's documentation shows."""
    info: Any = get_worker_info()
    info.dataset.part = slice(info.id, None, info.num_workers)


def split_unseen(worker: int) -> None:
    """The same, with the number of workers known from elsewhere."""
    info: Any = get_worker_info()
    info.dataset.part = slice(worker, None, 2)


def test_a_worker_init_fn_may_split_the_stream() -> None:
    for _ in range(2):
        batches = _epoch(OwnPart(12), 3, num_workers=2, worker_init_fn=split_in_worker)
        assert batches == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]


def test_parts_that_nobody_can_see_are_refused() -> None:
    with pytest.raises(SettingError, match=r"workers 0 and 1 see different samples of OwnPart.*Fix"):
        _epoch(OwnPart(24), 3, num_workers=2, worker_init_fn=split_unseen)


class AsksInVain(Unsplit):
    """Reads its worker info and gives everything all the same."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is not None and info.num_workers > 99:
            raise RuntimeError("too many")
        return iter(range(self.length))


class AsksLate(Unsplit):
    """Reads its worker info when it is under way."""

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            if number == 20:
                info: Any = get_worker_info()
                assert info.num_workers
            yield number


class SeedsItself(Unsplit):
    """Shuffles with a generator that no seed reaches."""

    def __iter__(self) -> Iterator[Any]:
        return iter(np.random.default_rng().permutation(self.length).tolist())


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (AsksInVain(40), "workers 0 and 1 give the same samples of AsksInVain"),
        (AsksLate(40), "only after its first samples"),
        (SeedsItself(40), "workers 0 and 1 see different samples of SeedsItself"),
    ],
)
def test_streams_that_would_repeat_or_lose_samples_are_refused(stream: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said) as raised:
        _epoch(stream, 4, num_workers=2)
    assert raised.value.fix


class HalfOverlaps(Unsplit):
    """Parts that start apart, and overlap after."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(range(info.id * 9 // info.num_workers, self.length))


def test_parts_that_overlap_are_noticed_by_the_streams_length() -> None:
    with pytest.raises(BatchError, match="the workers of HalfOverlaps gave 36 samples so far, and it has 20"):
        _epoch(HalfOverlaps(20), 4, num_workers=2)


class Constant(Unsplit):
    """Equal samples, split right."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter([7] * (self.length // info.num_workers))


def test_equal_samples_are_no_sign_of_repeating() -> None:
    assert _epoch(Constant(12), 3, num_workers=2) == [[7] * 3] * 4


def test_ranks_whose_streams_differ_all_raise() -> None:
    """As where a stream splits itself by rank, or draws from a generator of its own."""
    streams = [OwnPart(20), OwnPart(20)]
    streams[1].part = slice(1, None, 2)
    seen: dict[int, Any] = {}
    for rank, stream in enumerate(streams):  # what each rank would tell
        loader = GlobalLoader(
            stream, 4, rank=rank, world_size=2, feed=Feed(), gather_objects=_Told(seen, rank, [(0, None)] * 2)
        )
        next(iter(loader))
    for rank, stream in enumerate(streams):
        told = [seen[0], seen[1]]
        loader = GlobalLoader(
            stream, 4, rank=rank, world_size=2, feed=Feed(), gather_objects=_Answers([[(0, None)] * 2, told])
        )
        with pytest.raises(SettingError, match="gives other samples on ranks 1 than on rank 0"):
            list(loader)


class _Told:
    """Notes what a rank tells, and answers that all say the same."""

    def __init__(self, seen: dict[int, Any], rank: int, first: list[Any]) -> None:
        self.seen, self.rank, self.first = seen, rank, first

    def __call__(self, value: Any) -> list[Any]:
        if self.first:
            first, self.first = self.first, []
            return first
        self.seen[self.rank] = value
        return [value, value]


class _Answers:
    """Gives what all ranks told, call by call."""

    def __init__(self, answers: list[list[Any]]) -> None:
        self.answers = iter(answers)

    def __call__(self, value: Any) -> list[Any]:
        return next(self.answers)


def test_resuming_in_the_middle_with_workers_on_any_number_of_ranks() -> None:
    for stream, workers in ((Unsplit(14, shuffled=True), (3, 2)), (SplitAfterShuffle(15), (2, 2))):
        whole = _epoch(stream, 3, num_workers=workers[0])
        for place in (1, 3, 4):
            loader = GlobalLoader(stream, 3, num_workers=workers[0], feed=Feed())
            walk(loader, place)
            restored = ranks(stream, 3, 2, num_workers=workers[1])
            for each in restored:
                each.load_state_dict(loader.state_dict())
            assert joined([walk(each) for each in restored]) == whole[place:]


def test_a_stream_that_splits_itself_resumes_with_as_many_workers_only() -> None:
    loader = GlobalLoader(Stream(12), 2, num_workers=2, feed=Feed())
    walk(loader, 2)
    for workers in (0, 1, 3):
        with pytest.raises(SettingError, match=rf"num_workers={workers}: the checkpoint was made with 2"):
            GlobalLoader(Stream(12), 2, num_workers=workers, feed=Feed()).load_state_dict(loader.state_dict())
    for workers in (0, 1):
        alone = GlobalLoader(Stream(12), 2, num_workers=workers, feed=Feed())
        walk(alone, 2)
        spread = GlobalLoader(Stream(12), 2, num_workers=2, feed=Feed())
        spread.load_state_dict(alone.state_dict())
        with pytest.raises(SettingError, match="2 batches into an epoch that one process read, and Stream splits"):
            walk(spread)
    unsplit = GlobalLoader(Unsplit(12), 2, num_workers=2, feed=Feed())
    walk(unsplit, 2)
    other = GlobalLoader(Unsplit(12), 2, feed=Feed())
    other.load_state_dict(unsplit.state_dict())
    assert [batch for batch, _ in walk(other)] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def collate_by_worker(samples: list[int]) -> torch.Tensor:
    """A collate function that looks at its worker."""
    info = get_worker_info()
    assert info is None or info.num_workers == 2
    return torch.tensor(samples)


def test_a_collate_function_that_asks_for_its_worker_splits_nothing() -> None:
    batches = _epoch(Unsplit(20), 4, num_workers=2, collate_fn=collate_by_worker)
    assert batches == [list(range(start, start + 4)) for start in range(0, 20, 4)]


class Batches(Unsplit):
    """Gives batches, alike in every worker."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.arange(start, start + 2) for start in range(0, self.length, 2))


class BatchesInVain(Batches):
    """Asks for its worker, and gives everything all the same."""

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        assert info.num_workers
        return super().__iter__()


def test_streams_of_batches_are_not_repeated_by_workers_either() -> None:
    expected = [[start, start + 1] for start in range(0, 10, 2)]
    for world_size in (1, 2):
        source: Any = DataLoader(Batches(10), batch_size=None, num_workers=2)
        assert joined([walk(loader) for loader in ranks(source, None, world_size)]) == expected
    with pytest.raises(SettingError, match="workers 0 and 1 give the same samples of BatchesInVain"):
        list(GlobalLoader(DataLoader(BatchesInVain(10), batch_size=None, num_workers=2), feed=Feed()))


class Opaque(Unsplit):
    """Samples that nobody can pickle."""

    def __iter__(self) -> Iterator[Any]:
        return (lambda number=number: number for number in range(self.length))


class OpaqueParts(Opaque):
    """The same, split."""

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        return itertools.islice(super().__iter__(), info.id, None, info.num_workers)


def _called(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([sample() for sample in samples])


def test_samples_that_cannot_be_sent_are_joined_in_their_worker_or_named() -> None:
    assert _epoch(Opaque(8), 3, num_workers=2, collate_fn=_called) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    with pytest.raises(
        SettingError, match="workers have samples left over that fill no batch, and those can't be sent"
    ):
        _epoch(OpaqueParts(8), 3, num_workers=2, collate_fn=_called)
