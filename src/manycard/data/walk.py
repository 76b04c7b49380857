"""One walk over an epoch: the batches of this process, with what a step needs to know about each.

Three ways, one for each kind of source:

* `ShardWalk`: the dataset is indexed, so each rank loads its shard of a global batch and nothing else.
* `ItemWalk`: the dataset is indexed and its items are whole batches, so each rank takes its cut of every one.
* `StreamWalk` (`manycard.data.stream_walk`): the samples come in an order of their own.

All cut by `manycard.engine.batches.sizes.shard_sizes`. Where a global batch has fewer samples than there are ranks, a
rank without any gets one of its samples as a stand-in that counts 0, so that every rank has every batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from manycard.data.ahead import collate_pending
from manycard.data.draws import OwnDraws, SeededSamples, Shard, mix
from manycard.data.failures import starting_workers, watch_workers, worker_failure
from manycard.data.feed import BatchInfo
from manycard.data.limits import Checked, read_limits, warn_of_copies, warn_of_cores
from manycard.data.parts import OwnPart, Refused, cut_part, own_part
from manycard.data.sampler import EpochOrder
from manycard.data.source import Source
from manycard.data.start import StartWorker
from manycard.errors import SettingError

__all__ = ["Batches", "ItemWalk", "Reader", "ShardWalk", "Walk"]

_BATCH_BITS = 32
"""Room for the samples of one global batch in a place, which is ``number of the batch << 32 | sample in it``."""

_FOR_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Settings of PyTorch's DataLoader that only workers have."""

Batches = Generator[tuple[Any, BatchInfo], None, None]
"""This process's batches, each with what the feed is told."""


@dataclass(frozen=True)
class Reader:
    """The process that reads: which one, with how many workers, for which device."""

    rank: int
    world_size: int
    workers: int
    device: torch.device | None = None
    """Where batches go afterwards; None where they stay."""
    gather_objects: Callable[[Any], list[Any]] | None = None
    """Every rank's value, by rank; None where ranks can't talk, or there is one."""


class ShardOrder:
    """The ``batch_sampler`` of PyTorch's DataLoader: this rank's shards of the global batches that are left."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._order: EpochOrder = ()
        self._start = 0
        self._key = 0
        self._asked: deque[OwnPart] = deque()

    def aim(self, order: EpochOrder, start: int, key: int) -> deque[OwnPart]:
        """Set what the next iteration gives; what comes back is filled with the part of each shard it asks for."""
        self._order, self._start, self._key, self._asked = order, start, key, deque()
        return self._asked

    def __iter__(self) -> Iterator[Shard]:
        # Arguments are bound now, before workers ask: a later aim is not this iteration's.
        return self._shards(self._order, self._start, self._key, self._asked)

    def _shards(self, order: EpochOrder, start: int, key: int, asked: deque[OwnPart]) -> Iterator[Shard]:
        for number in range(start, len(order)):
            batch = order[number]
            part = own_part(len(batch), self.rank, self.world_size)
            asked.append(part)
            indices = list(batch[part.first : part.first + part.held])
            yield Shard(key, number << _BATCH_BITS | part.first, indices)

    def __len__(self) -> int:
        return len(self._order) - self._start


class Walk(ABC):
    """What all walks share: PyTorch's DataLoader, made once so that its workers may persist."""

    _loader: DataLoader[Any]

    def __init__(self, source: Source, reader: Reader) -> None:
        self._source = source
        self._reader = reader
        self._worker_seeds = torch.Generator()
        self._shares_workers = reader.workers > 0 and bool(source.options.get("persistent_workers"))
        self._may_draw = True
        self._walks = 0
        self.resumes_split = True
        """Whether the place of a checkpoint was counted in the order of as many workers as there are."""
        usual = default_convert if source.whole_items else default_collate
        self._collate = Checked(source.options.get("collate_fn") or usual)

    @property
    def workers(self) -> int:
        """Processes that load."""
        return self._reader.workers

    @property
    def splits(self) -> bool:
        """Whether the order of the batches depends on the number of workers."""
        return False

    def _make_loader(self, dataset: Any, collate: Callable[[Any], Any], **batching: Any) -> DataLoader[Any]:
        options = {**self._source.options, "num_workers": self._reader.workers, "collate_fn": collate}
        if options["pin_memory"] is None:
            # Without workers, pinning would be one more copy that the script waits for.
            options["pin_memory"] = self._reader.workers > 0 and self._on_cuda
        if self._reader.workers:
            options["worker_init_fn"] = StartWorker(options.get("worker_init_fn"))
        elif self._source.workers is None:
            # They are for the workers that "auto" may choose later.
            options = {name: value for name, value in options.items() if name not in _FOR_WORKERS}
        try:
            return DataLoader(dataset, generator=self._worker_seeds, **batching, **options)
        except ValueError as error:
            raise SettingError("num_workers", self._reader.workers, f"PyTorch's DataLoader says: {error}") from error

    def _items(self, key: int) -> Generator[Any, None, None]:
        """What PyTorch's DataLoader gives in one walk."""
        self._walks += 1
        walk = self._walks
        loader, draws = self._loader, self._draws(key)
        self._look_at_the_machine()
        with draws, self._on_device(), starting_workers(loader):
            loaded = iter(loader)
        watch_workers(loader, loaded)
        try:
            while True:
                self._check_newest(walk)
                with draws:
                    item = next(loaded, _END)
                if item is _END:
                    return
                if isinstance(item, Refused):
                    raise item.error
                yield item
        except (RuntimeError, OSError) as error:
            failure = worker_failure(loader, loaded, error)
            if failure is None:
                raise
            raise failure from error
        finally:
            if not self._shares_workers:
                _end_workers(loaded)

    def _look_at_the_machine(self) -> None:
        """Before workers start: note what is free, and say once what will be slow or may not fit."""
        workers = self._reader.workers
        if not workers:
            return
        self._collate.limits = read_limits(workers, self._loader.prefetch_factor or 2)
        if self._walks == 1 and self._reader.rank == 0:
            context: Any = self._loader.multiprocessing_context or torch.multiprocessing.get_context()
            warn_of_cores(workers)
            warn_of_copies(self._source.dataset, workers, sent=context.get_start_method() != "fork")

    def _on_device(self) -> AbstractContextManager[object]:
        """The device of the batches is current, so that the thread that pins them belongs to it."""
        return torch.cuda.device(self._reader.device) if self._on_cuda else nullcontext()

    @property
    def _on_cuda(self) -> bool:
        return self._reader.device is not None and self._reader.device.type == "cuda"

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
        return OwnDraws(key) if not self._reader.workers and self._may_draw else nullcontext()

    @abstractmethod
    def batches(self, epoch: int, start: int, seed: int, order: EpochOrder) -> Batches:
        """Walk `epoch` from global batch `start` on."""


class ShardWalk(Walk):
    """Loads this rank's shard of each global batch."""

    def __init__(self, source: Source, reader: Reader) -> None:
        super().__init__(source, reader)
        self._shards = ShardOrder(reader.rank, reader.world_size)
        samples = SeededSamples(source.dataset)
        self._may_draw = samples.draws or self._collate.collate is not default_collate
        if not reader.workers and self._collate.collate is default_collate:
            self._collate = Checked(collate_pending)
        self._loader = self._make_loader(samples, self._collate, batch_sampler=self._shards)

    def batches(self, epoch: int, start: int, seed: int, order: EpochOrder) -> Batches:
        key, reader = mix(seed, epoch), self._reader
        asked = self._shards.aim(order, start, key)
        self._worker_seeds.manual_seed(mix(key, reader.rank) >> 1)
        with closing(self._items(key)) as items:
            for number, batch in enumerate(items, start):
                part = asked.popleft()
                yield batch, BatchInfo(part.held, part.samples, number == len(order) - 1)


class ItemWalk(Walk):
    """Takes this rank's cut of each item of the dataset, which is a global batch."""

    def __init__(self, source: Source, reader: Reader) -> None:
        super().__init__(source, reader)
        self._order = ShardOrder(0, 1)
        samples = SeededSamples(source.dataset)
        self._loader = self._make_loader(samples, self._collate, batch_size=None, sampler=self._order)

    def batches(self, epoch: int, start: int, seed: int, order: EpochOrder) -> Batches:
        key, reader = mix(seed, epoch), self._reader
        self._order.aim(order, start, key)
        self._worker_seeds.manual_seed(key >> 1)
        with closing(self._items(key)) as items:
            for number, item in enumerate(items, start):
                batch, part = cut_part(item, reader.rank, reader.world_size)
                yield batch, BatchInfo(part.held, part.samples, number == len(order) - 1)


_END = object()


def _end_workers(loaded: Any) -> None:
    """End the workers of an iteration now. Left to the garbage collector, which meets iterations that an exception's
    traceback holds, their queues may be gone first, and each worker is waited for in vain for 5 seconds."""
    end = getattr(loaded, "_shutdown_workers", None)
    if end is not None:
        end()
