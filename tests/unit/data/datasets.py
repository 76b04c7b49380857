"""Small datasets, and ranks played one after another in one process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from manycard.data import BatchInfo, Feed, GlobalLoader


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


class Augmented(Numbers):
    """Sample i is i with a draw from each of the three generators."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


class AugmentedAtOnce(Augmented):
    """The same, fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class WorkerSeen(Numbers):
    """Sample i is i, and what ``get_worker_info().dataset`` was told by a worker_init_fn."""

    told = -1.0

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return torch.tensor([float(index), self.told, float(os.getpid())], dtype=torch.float64)


def tell_dataset(worker: int) -> None:
    """A worker_init_fn as people write it: it sets attributes of the dataset it finds."""
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, WorkerSeen), type(info.dataset)
    info.dataset.told = 100.0 + worker


def same_seed_everywhere(worker: int) -> None:
    """A worker_init_fn with the classic mistake."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class Stream(IterableDataset[int]):
    """0, 1, 2, ..., split over the workers as PyTorch's documentation shows."""

    def __init__(self, length: int, *, shuffled: bool = False) -> None:
        self.length = length
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        numbers = list(range(self.length))
        if self.shuffled:
            random.shuffle(numbers)
        return iter(numbers if info is None else numbers[info.id :: info.num_workers])


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.length


class EpochStream(IterableDataset[int]):
    """A stream that gives the epoch it was told, as Hugging Face's do."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


Handed = tuple[list[Any], BatchInfo]


def walk(loader: GlobalLoader, batches: int | None = None) -> list[Handed]:
    """One epoch, or its first `batches`: each batch as a list, with what the feed said about it."""
    handed = []
    for batch in loader:
        info = loader.feed.current
        assert info is not None
        handed.append((batch.tolist(), info))
        if batches is not None and len(handed) == batches:
            break
    assert loader.feed.current is None
    return handed


def ranks(dataset: Any, batch_size: int | None, world_size: int, **settings: Any) -> list[GlobalLoader]:
    """One loader for each rank."""
    return [
        GlobalLoader(dataset, batch_size, rank=rank, world_size=world_size, feed=Feed(), **settings)
        for rank in range(world_size)
    ]


def joined(parts: list[list[Handed]]) -> list[list[Any]]:
    """The global batches that the ranks' parts make, counting what counts."""
    numbers = {len(part) for part in parts}
    assert len(numbers) == 1, f"ranks had different numbers of batches: {numbers}"
    whole = []
    for shards in zip(*parts, strict=True):
        assert len({info.last for _, info in shards}) == 1
        for rows, info in shards:
            assert len(rows) == info.held >= 1
            assert info.samples in (info.held, 0)
        whole.append([row for rows, info in shards for row in rows[: info.samples]])
    return whole


def flat(batches: list[list[Any]]) -> list[Any]:
    """The samples of all batches, in order."""
    return [sample for batch in batches for sample in batch]
