"""An existing DataLoader's settings are respected, and settings that can't work are refused in words."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from manycard.data import Feed, GlobalLoader
from manycard.errors import BatchError, SettingError

from .datasets import Numbers, Stream, WorkerSeen, flat, joined, ranks, tell_dataset, walk


def _whole(source: Any, world_size: int = 1, **settings: Any) -> list[list[Any]]:
    return joined([walk(loader) for loader in ranks(source, None, world_size, **settings)])


def _double(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 2


def test_a_plain_dataloader_walks_what_its_dataset_does() -> None:
    data = Numbers(13)
    for shuffle in (False, True):
        given = joined([walk(loader) for loader in ranks(data, 4, 2, shuffle=shuffle, seed=9)])
        assert _whole(DataLoader(data, 4, shuffle=shuffle), 2, seed=9) == given


@pytest.mark.parametrize("world_size", [1, 3])
def test_unshuffled_equals_plain_pytorch(world_size: int) -> None:
    for drop_last in (False, True):
        plain = DataLoader(Numbers(13), 4, drop_last=drop_last, collate_fn=_double)
        assert _whole(plain, world_size) == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("world_size", [1, 2])
def test_samplers_are_respected(world_size: int) -> None:
    data = Numbers(10)
    subset = _whole(DataLoader(data, 2, sampler=SubsetRandomSampler([1, 3, 5, 7, 9])), world_size)
    assert [len(batch) for batch in subset] == [2, 2, 1]
    assert sorted(flat(subset)) == [1, 3, 5, 7, 9]
    repeated = _whole(DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=16)), world_size)
    assert [len(batch) for batch in repeated] == [4] * 4
    listed = _whole(DataLoader(data, 2, sampler=[5, 5, 0]), world_size)
    assert listed == [[5, 5], [0]]
    assert joined([walk(loader) for loader in ranks(data, 2, world_size, sampler=[5, 5, 0])]) == [[5, 5], [0]]


def test_random_samplers_draw_anew_each_epoch() -> None:
    loader = GlobalLoader(DataLoader(Numbers(20), 20, sampler=SubsetRandomSampler(range(20))), feed=Feed())
    assert walk(loader) != walk(loader)


class _ByEpoch:
    """A sampler of the kind that repeats itself when nobody calls set_epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 3)

    def __len__(self) -> int:
        return 3


class _Around(BatchSampler):
    """A batch sampler around a sampler, as people write them."""


def test_samplers_are_told_the_epoch() -> None:
    plain = GlobalLoader(DataLoader(Numbers(8), 3, sampler=_ByEpoch()), feed=Feed())
    inside = GlobalLoader(DataLoader(Numbers(8), batch_sampler=_Around(_ByEpoch(), 3, False)), feed=Feed())
    for loader in (plain, inside):
        assert [walk(loader)[0][0] for _ in range(3)] == [[0] * 3, [1] * 3, [2] * 3]


class _Buckets:
    """A batch sampler with batches of different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3, 4], [5], [6, 7]])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batch_samplers_are_respected(world_size: int) -> None:
    expected = [[0, 1, 2, 3, 4], [5], [6, 7]]
    assert _whole(DataLoader(Numbers(8), batch_sampler=_Buckets()), world_size) == expected
    assert (
        joined([walk(loader) for loader in ranks(Numbers(8), None, world_size, batch_sampler=_Buckets())]) == expected
    )
    own = DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(Numbers(8)), 3, True))
    assert _whole(own, world_size) == [[0, 1, 2], [3, 4, 5]]


def test_the_generator_chooses_the_order() -> None:
    def order(seed: int, script: int) -> list[list[int]]:
        torch.manual_seed(script)
        return _whole(DataLoader(Numbers(20), 5, shuffle=True, generator=torch.Generator().manual_seed(seed)))

    assert order(1, 0) == order(1, 7)
    assert order(1, 0) != order(2, 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_items_that_are_batches_are_cut(world_size: int) -> None:
    batches = [torch.arange(4), torch.arange(4, 5), torch.arange(5, 8)]
    assert _whole(DataLoader(batches, batch_size=None), world_size) == [batch.tolist() for batch in batches]  # type: ignore[arg-type]
    shuffled = GlobalLoader(DataLoader(batches, batch_size=None, shuffle=True), feed=Feed())  # type: ignore[arg-type]
    assert len(shuffled) == 3
    assert len({str(walk(shuffled)) for _ in range(8)}) > 1


def test_worker_settings_are_respected() -> None:
    loader = GlobalLoader(DataLoader(WorkerSeen(4), 2, num_workers=1, worker_init_fn=tell_dataset), feed=Feed())
    assert {row[1] for batch, _ in walk(loader) for row in batch} == {100.0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_distributed_sampler_is_replaced_and_said_once(world_size: int) -> None:
    data = Numbers(7)
    source = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=True, seed=3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaders = ranks(source, None, world_size)
    assert ["DistributedSampler is replaced" in str(each.message) for each in said] == [True]
    assert joined([walk(loader) for loader in loaders]) == joined(
        [walk(loader) for loader in ranks(data, 4, 1, shuffle=True, seed=3)]
    )


class _SplitsByRank:
    num_replicas, rank = 2, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 8, 2))

    def __len__(self) -> int:
        return 4


class _OwnDistributedSampler(DistributedSampler[int]):
    pass


@pytest.mark.parametrize("sampler", [_SplitsByRank(), _OwnDistributedSampler(Numbers(8), 2, 0)])
def test_other_samplers_that_split_are_refused(sampler: Any) -> None:
    with pytest.raises(SettingError, match=r"gives each rank a part of its own.*Fix"):
        GlobalLoader(DataLoader(Numbers(8), 2, sampler=sampler), feed=Feed())


def test_lists_and_tensor_datasets() -> None:
    assert _whole(DataLoader([10, 11, 12], 2)) == [[10, 11], [12]]  # type: ignore[arg-type]
    data = Subset(TensorDataset(torch.arange(6)), [5, 4, 3])
    assert [batch[0].tolist() for batch in GlobalLoader(data, 2, feed=Feed())] == [[5, 4], [3]]


class _TooFar:
    def __iter__(self) -> Iterator[int]:
        return iter([0, 8])

    def __len__(self) -> int:
        return 2


class _Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class _EmptyBatch(_Buckets):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], []])


def test_what_samplers_give_is_checked() -> None:
    with pytest.raises(SettingError, match=r"sampler='_TooFar': it gave index 8, and the dataset has 8 samples.*Fix"):
        _whole(DataLoader(Numbers(8), 2, sampler=_TooFar()))
    with pytest.raises(SettingError, match="without an end"):
        _whole(DataLoader(Numbers(8), 2, sampler=_Endless()))
    with pytest.raises(BatchError, match="empty batch"):
        _whole(DataLoader(Numbers(8), batch_sampler=_EmptyBatch()))


class _NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("source", "given", "named"),
    [
        (Numbers(0), {"batch_size": 4}, "dataset='Numbers': it has 0 samples"),
        (Numbers(4), {}, "batch_size=None"),
        (Numbers(4), {"batch_size": 0}, "batch_size=0"),
        (Numbers(4), {"batch_size": -3}, "batch_size=-3"),
        (Numbers(4), {"batch_size": 2.5}, "batch_size=2.5"),
        (Numbers(4), {"batch_size": 2, "num_workers": -1}, "num_workers=-1"),
        (Numbers(4), {"batch_size": 2, "num_worker": 1}, "num_worker=1: a loader has no such setting"),
        (Numbers(4), {"batch_size": 2, "in_order": False}, "in_order=False"),
        (Numbers(4), {"batch_size": 2, "seed": "x"}, "seed='x'"),
        (Numbers(4), {"batch_size": 2, "sampler": [0], "shuffle": True}, "shuffle=True"),
        (Numbers(4), {"batch_size": 2, "batch_sampler": _Buckets()}, "batch_sampler='_Buckets'"),
        (DataLoader(Numbers(4), 2), {"batch_size": 4}, "batch_size=4: the DataLoader given has its own settings"),
        (DataLoader(Numbers(4), 2), {"shuffle": True}, "shuffle=True"),
        (DataLoader(Numbers(4), 2), {"num_workers": 2}, "num_workers=2"),
        (_NoLength(), {"batch_size": 2}, "dataset='_NoLength': it has no length"),
        (iter([1, 2]), {"batch_size": 2}, "walked once only"),
        (Stream(4), {"batch_size": 2, "shuffle": True}, "shuffle=True"),
        (Stream(4), {"batch_size": 2, "sampler": [0]}, "sampler='list'"),
    ],
)
def test_settings_that_cannot_work(source: Any, given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named) as raised:
        GlobalLoader(source, feed=Feed(), **given)
    assert raised.value.fix


def test_an_empty_epoch_is_said() -> None:
    with pytest.warns(UserWarning, match="drop_last=True leaves nothing of 3 samples with batch_size=4"):
        loader = GlobalLoader(Numbers(3), 4, drop_last=True, feed=Feed())
    assert walk(loader) == []


def test_a_dataloader_with_an_iterator_of_its_own_is_said() -> None:
    class Prefetching(DataLoader[int]):
        def __iter__(self) -> Any:
            return super().__iter__()

    with pytest.warns(UserWarning, match="Prefetching iterates in a way of its own"):
        GlobalLoader(Prefetching(Numbers(4), 2), feed=Feed())
