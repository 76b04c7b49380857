"""A stream (an iterable dataset) as each worker reads it: whose samples are whose, and what they draw.

Behaviour:
    * A global batch is made of samples that follow one another. A worker makes this rank's part of it and sends only
      that. What workers of a stream that splits itself have left over is sent raw, and joined.
    * A stream that splits itself by ``get_worker_info()``, in ``__iter__`` or in a ``worker_init_fn``, is left to:
      workers' batches take turns, as under PyTorch. Whether it does is seen: it can't without ``num_workers`` of the
      worker info, and reading that is noticed.
    * A stream that doesn't is read by every worker, each of which makes every n-th batch: the order of one worker, and
      no sample twice. It costs reading everything in each worker.
    * Draws follow from the seed, the epoch and the worker. All workers draw alike until the stream asks how many there
      are, and apart from there on: a stream may be shuffled before it is split, and augmented after.

What each worker sees first is sent along as a `Head`, so that `manycard.data.stream_walk` can tell workers that repeat
one another and streams that differ where they should not.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from manycard.data.draws import place_seed, seed_draws
from manycard.data.parts import Refused, cut_part, own_part
from manycard.data.prints import samples_print
from manycard.errors import ManycardError, SettingError

__all__ = ["Cut", "Head", "Part", "Rest", "StreamReader", "watch_worker"]

_HEAD = 8
"""Samples that heads are made of, at least ..."""
_HEAD_BATCHES = 2
"""... and batches, where the stream gives batches."""


class Head(NamedTuple):
    """The first samples that a worker sees of a stream."""

    print: int
    """Differs where the samples do."""
    varied: bool
    """Whether the samples differ among themselves: a stream of equal samples tells nothing."""
    splits: bool
    """Whether the stream has asked how many workers there are, and so is one that splits itself."""


class Part(NamedTuple):
    """This rank's part of one global batch."""

    worker: int
    batch: Any
    """None where the batch was used before and is skipped."""
    held: int
    samples: int
    head: Head | None
    """Of the worker's first part only."""


class Rest(NamedTuple):
    """What a worker sends when its stream has ended."""

    worker: int
    samples: bytes
    """Where streams split themselves, the samples that fill no batch, pickled: tensors sent as such would each hold an
    open file."""
    batches: int
    """Full batches that the worker has seen."""
    left: int
    """Samples after them."""
    head: Head | None


class Cut(NamedTuple):
    """How a stream becomes this rank's parts."""

    batch_size: int | None
    """Samples in a global batch; None where each item is one."""
    collate: Callable[[Any], Any]
    rank: int
    world_size: int
    drop_last: bool


class StreamReader(IterableDataset[Any]):
    """Walks a stream, in the script's own process or in a worker, and gives a `Part` for each batch and a `Rest`.

    A dataset with a ``set_epoch`` method (Hugging Face's streams) is told the epoch.

    Args:
        dataset: any iterable that can be walked again and again.
        cut: what becomes of it.
        outlives_epochs: whether workers do, so that they must be told the epoch through shared memory.
    """

    def __init__(self, dataset: Any, cut: Cut, *, outlives_epochs: bool) -> None:
        self.dataset = dataset
        self._cut = cut
        self._told = torch.zeros(3, dtype=torch.int64)
        if outlives_epochs:
            self._told.share_memory_()  # type: ignore[no-untyped-call]

    def aim(self, epoch: int, key: int, start: int) -> None:
        """Set what the next walk is: its epoch, the seed of its draws, and the global batch that comes first."""
        self._told.copy_(torch.tensor([epoch, key >> 1, start]))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        try:
            yield from self._read(info)
        except ManycardError as error:
            if info is None:
                raise
            yield Refused(error)

    def _read(self, info: Any) -> Iterator[Any]:
        epoch, key, start = self._told.tolist()
        worker, workers = (0, 1) if info is None else (_unnoticed(info, "id"), _unnoticed(info, "num_workers"))
        follow = getattr(self.dataset, "set_epoch", None)
        if callable(follow):
            follow(epoch)
        _watch.begin(key, worker, workers)
        seed_draws(place_seed(key, worker if _watch.split_at_start else 0))
        samples = iter(self.dataset)
        head = None
        if workers > 1 or self._cut.world_size > 1:
            size = self._cut.batch_size
            first = list(itertools.islice(samples, _HEAD_BATCHES if size is None else max(size, _HEAD)))
            head = Head(*samples_print(first), _watch.splits)
            samples = itertools.chain(first, samples)
        yield from self._parts(samples, head, start, worker, workers)

    def _parts(self, samples: Iterator[Any], head: Head | None, start: int, worker: int, workers: int) -> Iterator[Any]:
        """A `Part` for each of the worker's batches, and the `Rest`."""
        turn = _Turn(start, worker, workers, splits=head is not None and head.splits and workers > 1)
        size = self._cut.batch_size
        number = 0
        while True:
            group = list(itertools.islice(samples, size or 1))
            if not turn.splits and workers > 1 and _watch.splits:
                raise _asked_late(self.dataset)
            if len(group) < (size or 1):
                break
            if turn.used(number):
                yield Part(worker, None, 0, 0, head)
                head = None
            elif turn.mine(number):
                yield self._part(group, worker, head)
                head = None
            number += 1
        left = len(group)
        if group and not turn.splits:
            # It is no other worker's business, and a batch as any.
            if turn.mine(number) and not self._cut.drop_last:
                yield self._part(group, worker, head)
                head = None
            group = []
        yield Rest(worker, self._pickled(group), number, left, head)

    def _pickled(self, samples: list[Any]) -> bytes:
        try:
            return pickle.dumps(samples)
        except Exception as error:
            raise SettingError(
                "dataset",
                type(self.dataset).__name__,
                f"its workers have samples left over that fill no batch, and those can't be sent to be joined: {error}",
                fix="let it give samples that can be pickled, or use num_workers=1",
            ) from error

    def _part(self, group: list[Any], worker: int, head: Head | None) -> Any:
        cut = self._cut
        if cut.batch_size is None:
            batch, own = cut_part(group[0], cut.rank, cut.world_size, apart=get_worker_info() is not None)
        else:
            own = own_part(len(group), cut.rank, cut.world_size)
            batch = group[own.first : own.first + own.held]
        with _watch.deaf():
            batch = cut.collate(batch)
        return batch if isinstance(batch, Refused) else Part(worker, batch, own.held, own.samples, head)


class _Turn(NamedTuple):
    """Which of the batches that a worker sees it makes."""

    start: int
    worker: int
    workers: int
    splits: bool

    def mine(self, number: int) -> bool:
        """Whether this worker makes its batch `number`: all of them, where the stream splits itself."""
        return self.splits or (number >= self.start and (number - self.start) % self.workers == self.worker)

    def used(self, number: int) -> bool:
        """Whether a batch of a stream that splits itself was surely used before; the rest is counted in the script's
        process, which knows how many batches the other workers had."""
        return self.splits and number * self.workers + self.worker < self.start


def _asked_late(dataset: Any) -> SettingError:
    return SettingError(
        "dataset",
        type(dataset).__name__,
        "it reads get_worker_info() only after its first samples, and by then its workers share the batches out",
        fix="read it where __iter__ begins, before the first sample",
    )


# ---- whether a stream splits itself ----------------------------------------------------------------------------


class _Watch:
    """What the stream of this worker process has asked for; there is one a process."""

    def __init__(self) -> None:
        self.asked = False
        self.split_at_start = False
        """Whether a worker_init_fn asked."""
        self._seed: int | None = None
        self._listens = True

    @property
    def splits(self) -> bool:
        """Whether the stream, or what prepared it, has asked how many workers there are."""
        return self.asked or self.split_at_start

    def begin(self, key: int, worker: int, workers: int) -> None:
        """A walk begins."""
        self.asked = False
        self._seed = place_seed(key, worker) if workers > 1 and not self.split_at_start else None

    def ask(self) -> None:
        """The stream reads how many workers there are: from here on it draws apart from the others."""
        if not self._listens:
            return
        self.asked = True
        seed, self._seed = self._seed, None
        if seed is not None:
            seed_draws(seed)

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """What is asked inside is not the stream's."""
        self._listens = False
        try:
            yield
        finally:
            self._listens = True


_watch = _Watch()


class _WatchedInfo(WorkerInfo):
    """A worker info that notices when it is asked how many workers there are."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name == "num_workers":
            _watch.ask()
        return super().__getattribute__(name)


def _unnoticed(info: Any, name: str) -> Any:
    return WorkerInfo.__getattribute__(info, name)


def watch_worker(info: Any, prepare: Callable[[], object]) -> None:
    """Let this worker's info notice who reads it, while `prepare` (a ``worker_init_fn``) runs and ever after."""
    object.__setattr__(info, "__class__", _WatchedInfo)
    _watch.asked = False
    prepare()
    _watch.split_at_start = _watch.asked
