"""A walk over a stream (an iterable dataset): parts of global batches from one reader or several, in order.

Behaviour:
    * Every rank walks the whole stream and keeps its part of each global batch: right without any splitting in the
      dataset, and as costly in reading as one card. With `dp`, one process reads for all cards.
    * Workers read as `manycard.data.streams` says: each sample comes once, with any number of them. What workers have
      left over at the end makes batches too, so an epoch has one batch that is not full at most.
    * One batch is read ahead, to know the last.
    * Caught, in words: workers that repeat one another (a stream that asks for its worker and doesn't split by it),
      workers or ranks whose streams differ where they must not (a generator of the stream's own, or splitting by rank),
      more samples than the stream's own length, a stream that is shorter than when a checkpoint was made.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from typing import Any

from manycard.data.draws import OwnDraws, mix
from manycard.data.feed import BatchInfo
from manycard.data.parts import OwnPart, as_it_is, own_part
from manycard.data.sampler import EpochOrder
from manycard.data.source import Source, length_of
from manycard.data.streams import Cut, Head, Part, Rest, StreamReader
from manycard.data.walk import Batches, Reader, Walk
from manycard.errors import BatchError, SettingError

__all__ = ["StreamWalk"]

_Own = tuple[Any, OwnPart]


class StreamWalk(Walk):
    """Takes this rank's part of each global batch of a stream."""

    def __init__(self, source: Source, reader: Reader) -> None:
        super().__init__(source, reader)
        cut = Cut(
            None if source.whole_items else source.batch_size,
            self._collate,
            reader.rank,
            reader.world_size,
            source.drop_last,
        )
        self._stream = StreamReader(source.dataset, cut, outlives_epochs=self._shares_workers)
        self._loader = self._make_loader(self._stream, as_it_is, batch_size=None)
        self._splits = False

    @property
    def splits(self) -> bool:
        return self._splits

    def batches(self, epoch: int, start: int, seed: int, order: EpochOrder) -> Batches:
        waiting: list[_Own] = []
        with closing(self._own_parts(epoch, start, seed)) as parts:
            for batch, part in parts:
                if waiting:
                    yield _told(waiting.pop(), last=False)
                waiting.append((batch, part))
        if waiting:
            yield _told(waiting.pop(), last=True)

    def _own_parts(self, epoch: int, start: int, seed: int) -> Generator[_Own, None, None]:
        """This rank's part of each global batch from `start` on."""
        key = mix(seed, epoch)
        # Alike on all ranks: they must see one stream.
        self._worker_seeds.manual_seed(key >> 1)
        self._stream.aim(epoch, key, start)
        check = _StreamCheck(self._source, self._reader)
        rests: list[Rest] = []
        # Where workers share batches out, they skip what was used before; of parts of their own nobody knows how many.
        unread = start
        with closing(self._items(key)) as items:
            for item in items:
                check.see(item)
                self._splits = check.splits
                if start and check.splits and not self.resumes_split:
                    raise self._resumed_apart(start)
                if isinstance(item, Rest):
                    rests.append(item)
                elif check.splits and unread:
                    unread -= 1
                else:
                    yield item.batch, OwnPart(0, item.held, item.samples)
        if not check.splits:
            unread = max(start - max((self._batches_seen(rest) for rest in rests), default=0), 0)
        for own in self._left_over(rests, key):
            if unread:
                unread -= 1
            else:
                yield own
        if unread:
            raise BatchError(
                f"the stream ended after {start - unread} batches of epoch {epoch}, and the checkpoint was made after "
                f"{start}",
                fix="resume with the stream that the checkpoint was made with",
            )

    def _batches_seen(self, rest: Rest) -> int:
        """Batches of a stream that does not split itself, of which every worker sees all."""
        return rest.batches + (rest.left > 0 and not self._source.drop_last)

    def _resumed_apart(self, start: int) -> SettingError:
        return SettingError(
            "num_workers",
            self._reader.workers,
            f"the checkpoint was made {start} batches into an epoch that one process read, and "
            f"{type(self._source.dataset).__name__} splits itself over workers, which is another order",
            fix="resume with num_workers=1, or start an epoch anew with set_epoch",
        )

    def _left_over(self, rests: list[Rest], key: int) -> Iterator[_Own]:
        """Batches of the samples that filled none in their worker."""
        size, reader = self._source.batch_size, self._reader
        if size is None or self._source.whole_items:
            return
        samples: list[Any] = []
        for rest in sorted(rests, key=lambda each: each.worker):
            samples += pickle.loads(rest.samples)
        draws = OwnDraws(mix(key, len(samples))) if reader.workers else nullcontext()
        for start in range(0, len(samples), size):
            group = samples[start : start + size]
            if len(group) < size and self._source.drop_last:
                return
            part = own_part(len(group), reader.rank, reader.world_size)
            with draws, self._draws(key):
                batch = self._collate(group[part.first : part.first + part.held])
            yield batch, part


def _told(own: _Own, *, last: bool) -> tuple[Any, BatchInfo]:
    batch, part = own
    return batch, BatchInfo(part.held, part.samples, last)


class _StreamCheck:
    """Looks at what comes from workers and ranks for samples that come twice or never.

    Args:
        source: the stream.
        reader: who reads it.
    """

    def __init__(self, source: Source, reader: Reader) -> None:
        self._name = type(source.dataset).__name__
        self._reader = reader
        self._length = length_of(source.dataset) if not source.whole_items else None
        self._size = source.batch_size or 1
        self._heads: dict[int, Head] = {}
        self._samples: dict[int, int] = {}
        self._compared = False
        self.splits = False

    def see(self, item: Part | Rest) -> None:
        """Look at the next item of the epoch."""
        if item.head is not None:
            self._see_head(item.worker, item.head)
        self._compare_ranks(item.head)
        if isinstance(item, Rest):
            self._samples[item.worker] = item.batches * self._size + item.left
            self._check_length()

    def _see_head(self, worker: int, head: Head) -> None:
        self.splits = self._reader.workers > 1 and (self.splits or head.splits)
        for other, known in self._heads.items():
            if self.splits and known.varied and known.print == head.print:
                raise SettingError(
                    "num_workers",
                    self._reader.workers,
                    f"workers {other} and {worker} give the same samples of {self._name}: it reads get_worker_info() "
                    "and doesn't split by it, so samples would be used more than once",
                    fix="let each worker give its own part (such as samples[info.id :: info.num_workers]), or don't "
                    "read info.num_workers: manycard then shares the batches out itself",
                )
            if not self.splits and known.print != head.print:
                raise SettingError(
                    "num_workers",
                    self._reader.workers,
                    f"workers {other} and {worker} see different samples of {self._name}, which doesn't read "
                    "info.num_workers and so isn't split by workers; samples would be lost and others used twice",
                    fix="split by info.id and info.num_workers of get_worker_info(), or draw from random, numpy.random "
                    "or torch, which manycard seeds alike, or use num_workers=1",
                )
        self._heads[worker] = head

    def _compare_ranks(self, head: Head | None) -> None:
        """Once an epoch, all ranks compare the first samples that they see."""
        gather = self._reader.gather_objects
        if self._compared or gather is None:
            return
        self._compared = True
        prints = gather(None if head is None else head.print)
        others = [str(rank) for rank, value in enumerate(prints) if value != prints[0]]
        if others:
            raise SettingError(
                "dataset",
                self._name,
                f"it gives other samples on ranks {', '.join(others)} than on rank 0, and every rank must see one "
                "stream: manycard cuts each global batch over the ranks",
                fix="let it give the whole stream on every rank (no splitting by rank), in one order: draw from "
                "random, numpy.random or torch, which are seeded alike",
            )

    def _check_length(self) -> None:
        """Where the stream says its length, its workers' parts may not be more together."""
        if self.splits and self._length is not None and sum(self._samples.values()) > self._length:
            raise BatchError(
                f"the workers of {self._name} gave {sum(self._samples.values())} samples so far, and it has "
                f"{self._length}: their parts overlap",
                fix="let each worker give its own part, such as samples[info.id :: info.num_workers]",
            )
