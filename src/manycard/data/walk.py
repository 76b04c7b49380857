"""One walk over an epoch: the batches of this process, with what a step needs to know about each.

Two ways, one for each kind of source:

* `ShardWalk`: the dataset is indexed, so each rank loads its shard of a global batch and nothing else.
* `CutWalk`: whole batches come from the dataset (a stream, or items that are batches), so each rank takes its cut of
  every one. Every rank reads everything: right without any splitting in the dataset, as long as all ranks see one
  stream, and as costly in reading as one card.

Both cut by `manycard.engine.sizes.shard_sizes`. Where a global batch has fewer samples than there are ranks, a rank
without any gets one of its samples as a stand-in that counts 0, so that every rank has every batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from manycard.data.draws import OwnDraws, SeededSamples, SeededStream, Shard, StartWorker, mix
from manycard.data.feed import BatchInfo
from manycard.data.sampler import EpochOrder
from manycard.data.source import Source
from manycard.engine.batch import count_samples, cut
from manycard.engine.sizes import shard_sizes
from manycard.errors import BatchError, SettingError

__all__ = ["CutWalk", "ShardWalk", "Walk", "make_walk"]

_BATCH_BITS = 32
"""Room for the samples of one global batch in a place, which is ``number of the batch << 32 | sample in it``."""


class _ShardOrder:
    """The ``batch_sampler`` of PyTorch's DataLoader: this rank's shards of the global batches that are left."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._order: EpochOrder = ()
        self._start = 0
        self._key = 0

    def aim(self, order: EpochOrder, start: int, key: int) -> None:
        """Set what the next iteration gives."""
        self._order, self._start, self._key = order, start, key

    def __iter__(self) -> Iterator[Shard]:
        # Arguments are bound now, before workers ask: a later aim is not this iteration's.
        return self._shards(self._order, self._start, self._key)

    def _shards(self, order: EpochOrder, start: int, key: int) -> Iterator[Shard]:
        for number in range(start, len(order)):
            batch = order[number]
            sizes = shard_sizes(len(batch), self.world_size)
            first = sum(sizes[: self.rank]) if sizes[self.rank] else 0
            indices = list(batch[first : first + max(sizes[self.rank], 1)])
            yield Shard(key, number << _BATCH_BITS | first, indices)

    def __len__(self) -> int:
        return len(self._order) - self._start


class Walk(ABC):
    """What `ShardWalk` and `CutWalk` share: PyTorch's DataLoader, made once so that its workers may persist."""

    def __init__(self, source: Source, rank: int, world_size: int) -> None:
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._worker_seeds = torch.Generator()
        self._in_process = not source.options["num_workers"]
        self._shares_workers = bool(source.options.get("persistent_workers"))
        self._may_draw = True
        self._walks = 0

    def _make_loader(self, dataset: Any, **batching: Any) -> DataLoader[Any]:
        options = dict(self._source.options)
        if not self._in_process:
            options["worker_init_fn"] = StartWorker(options.get("worker_init_fn"))
        return DataLoader(dataset, generator=self._worker_seeds, **batching, **options)

    def _begin(self) -> int:
        """Number a walk, for `_check_newest`."""
        self._walks += 1
        return self._walks

    def _check_newest(self, walk: int) -> None:
        """Stop a walk whose workers went on to a newer one: it would be given that one's batches."""
        if self._shares_workers and walk != self._walks:
            raise SettingError(
                "persistent_workers",
                True,
                "a newer iteration of this loader has taken the workers over",
                fix="make a second loader, or leave out persistent_workers",
            )

    def _draws(self, key: int) -> AbstractContextManager[object]:
        """Keeps the draws of loading apart from the process's, where both happen in one process (0.2 ms a batch)."""
        return OwnDraws(key) if self._in_process and self._may_draw else nullcontext()

    @abstractmethod
    def batches(
        self, epoch: int, start: int, seed: int, order: EpochOrder
    ) -> Generator[tuple[Any, BatchInfo], None, None]:
        """Walk `epoch` from global batch `start` on."""


class ShardWalk(Walk):
    """Loads this rank's shard of each global batch."""

    def __init__(self, source: Source, rank: int, world_size: int) -> None:
        super().__init__(source, rank, world_size)
        self._shards = _ShardOrder(rank, world_size)
        samples = SeededSamples(source.dataset)
        self._loader = self._make_loader(samples, batch_sampler=self._shards)
        self._may_draw = samples.draws or self._loader.collate_fn is not default_collate

    def batches(
        self, epoch: int, start: int, seed: int, order: EpochOrder
    ) -> Generator[tuple[Any, BatchInfo], None, None]:
        key = mix(seed, epoch)
        self._shards.aim(order, start, key)
        self._worker_seeds.manual_seed(mix(key, self._rank) >> 1)
        draws = self._draws(key)
        walk = self._begin()
        loaded = iter(self._loader)
        for number in range(start, len(order)):
            self._check_newest(walk)
            with draws:
                batch = next(loaded)
            samples = shard_sizes(len(order[number]), self._world_size)[self._rank]
            yield batch, BatchInfo(max(samples, 1), samples, number == len(order) - 1)


class CutWalk(Walk):
    """Takes this rank's cut of each global batch that the dataset gives; one batch is read ahead to know the last."""

    def __init__(self, source: Source, rank: int, world_size: int) -> None:
        super().__init__(source, rank, world_size)
        self._items = _ShardOrder(0, 1)
        self._stream: SeededStream | None = None
        if source.order is not None:
            self._loader = self._make_loader(SeededSamples(source.dataset), batch_size=None, sampler=self._items)
            return
        self._stream = SeededStream(source.dataset, outlives_epochs=self._shares_workers)
        drop_last = source.drop_last and source.batch_size is not None
        self._loader = self._make_loader(self._stream, batch_size=source.batch_size, drop_last=drop_last)

    def batches(
        self, epoch: int, start: int, seed: int, order: EpochOrder
    ) -> Generator[tuple[Any, BatchInfo], None, None]:
        waiting: list[Any] = []
        for batch in self._whole_batches(epoch, start, seed, order):
            if waiting:
                yield self._own_part(waiting.pop(), last=False)
            waiting.append(batch)
        if waiting:
            yield self._own_part(waiting.pop(), last=True)

    def _whole_batches(self, epoch: int, start: int, seed: int, order: EpochOrder) -> Iterator[Any]:
        key = mix(seed, epoch)
        # Alike on all ranks: they must see one stream.
        self._worker_seeds.manual_seed(key >> 1)
        if self._stream is not None:
            self._stream.start(epoch, key)
        self._items.aim(order, start, key)
        draws = self._draws(key)
        walk = self._begin()
        with draws:
            loaded = iter(self._loader)
        # A stream can only be walked from its start: a resume reads again what was used before.
        unread = start if self._stream is not None else 0
        while True:
            self._check_newest(walk)
            with draws:
                batch = next(loaded, _END)
            if batch is _END:
                break
            if unread:
                unread -= 1
                continue
            yield batch
        if unread:
            raise BatchError(
                f"the stream ended after {start - unread} batches of epoch {epoch}, and the checkpoint was made after "
                f"{start}",
                fix="resume with the stream that the checkpoint was made with",
            )

    def _own_part(self, batch: Any, *, last: bool) -> tuple[Any, BatchInfo]:
        count = count_samples(batch)
        if self._world_size == 1:
            return batch, BatchInfo(count, count, last)
        sizes = shard_sizes(count, self._world_size)
        samples = sizes[self._rank]
        first = sum(sizes[: self._rank]) if samples else 0
        held = max(samples, 1)
        return cut(batch, [first, held, count - first - held])[1], BatchInfo(held, samples, last)


_END = object()


def make_walk(source: Source, rank: int, world_size: int) -> Walk:
    """The walk that fits `source`."""
    kind = CutWalk if source.order is None or source.whole_items else ShardWalk
    return kind(source, rank, world_size)
