"""The loader: walks global batches, and hands each process its part.

Behaviour:
    * Every rank walks the same global batches in the same order, the same number of them, and gets its contiguous
      part of each: all ranks' parts together are the global batch, each sample once an epoch. Nothing is padded or
      repeated, so evaluation is exact. A rank without a sample in a small batch gets a stand-in that counts 0.
    * Each new iteration is the next epoch, in an order of its own; nobody calls ``set_epoch``. A loader with restored
      state goes on in the middle of its epoch first.
    * Before a batch is handed out, the feed is told how many samples it holds, how many of them count, and whether it
      is the epoch's last. The feed is cleared when an epoch ends or is left.
    * Its state is a number of global batches handed out, so it can be restored on any number of cards. What workers
      have read ahead does not count. Leaving an epoch early (``break``) leaves the state in the middle of it: restored,
      it goes on with the batch after; leaving at its last batch ends it.
    * A stream (an iterable dataset) is read whole by every rank, which keeps its part of each global batch; workers
      share it out without repeating a sample (`manycard.data.stream_walk`).
    * If a sampler of the user's, or a stream, differs between ranks, and ranks can compare, all of them raise.
    * What the machine lacks for workers, and workers that end, give errors that say so (`manycard.data.limits`,
      `manycard.data.failures`). An epoch that waited long for data says so once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from manycard.data.ahead import finished_ahead
from manycard.data.feed import BatchInfo, Feed
from manycard.data.limits import cores_for_workers, read_limits
from manycard.data.order import SamplerOrder, fingerprint
from manycard.data.sampler import EpochOrder, GlobalBatchSampler, whole_number
from manycard.data.source import Source, make_source
from manycard.data.stream_walk import StreamWalk
from manycard.data.transfer import make_transfer, sent_ahead
from manycard.data.tuning import Tuner
from manycard.data.walk import ItemWalk, Reader, ShardWalk, Walk
from manycard.errors import CheckpointError, SettingError
from manycard.hangs import PULSE

__all__ = ["GlobalLoader"]


@dataclass
class _Position:
    """Where an iteration stands."""

    epoch: int
    batches: int = 0
    """Global batches handed out in this epoch."""
    order: int | None = None
    """The fingerprint that the epoch's order must have; None where nothing is known of it."""
    begun: bool = False
    """Whether an iteration walks, or walked, from here."""
    finished: bool = False
    """Whether that iteration came to the epoch's end."""


class GlobalLoader:
    """Hand out this process's part of every global batch, epoch after epoch.

    Args:
        dataset: map-style, an iterable, or a `torch.utils.data.DataLoader` whose settings are taken over.
        batch_size: samples in a global batch; left out for a DataLoader or with a ``batch_sampler``.
        shuffle: draw a new order each epoch.
        drop_last: leave out a last batch that is not full.
        seed: what orders and draws come from.
        rank: which process this is.
        world_size: how many processes share each global batch.
        feed: is told about each batch handed out.
        num_workers: processes that load; 0 loads in this one; ``"auto"`` starts without and adds as many as end the
            waiting (`manycard.data.tuning`).
        collate_fn: joins samples to a batch; None for PyTorch's.
        pin_memory: copy batches to pinned memory; None does where workers load for a CUDA card.
        device: where batches are moved before they are handed out; None leaves them on the host.
        gather_objects: every rank's value, by rank. Where it is given, ranks take rank 0's seed and check that
            they agree on the dataset's length and on orders that come from a sampler of the user's.
        dataloader_kwargs: further settings of PyTorch's DataLoader: ``sampler``, ``batch_sampler``, ``generator``,
            ``worker_init_fn``, ``persistent_workers``, ``prefetch_factor``, ``timeout``, ``multiprocessing_context``.

    Raises:
        SettingError: a setting has a value that can't work, or is given twice.

    Example:
        >>> loader = GlobalLoader(list(range(5)), 4, feed=Feed(), rank=1, world_size=2)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4]]
        >>> loader.feed.current is None
        True
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        feed: Feed,
        num_workers: int | str = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        device: torch.device | None = None,
        gather_objects: Callable[[Any], list[Any]] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        self.world_size = whole_number("world_size", world_size, 1, "give the number of ranks")
        self.rank = whole_number("rank", rank, 0, "count ranks from 0")
        if self.rank >= self.world_size:
            raise SettingError("rank", rank, f"there are {world_size} ranks", fix="count ranks from 0")
        self.feed = feed
        self._transfer = make_transfer(device)
        self._gather = gather_objects if self.world_size > 1 else None
        self._source = make_source(
            dataset,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=whole_number("seed", seed, 0, "give a number of at least 0"),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            warn=self.rank == 0,
            settings=dataloader_kwargs,
        )
        self._seed = self._agree_on_seed(self._source)
        self._ahead = self._source.options.get("prefetch_factor") or 2
        self._tuner = Tuner(self._source.workers, cores_for_workers(), self._ahead)
        self._walk = self._make_walk()
        self._position = _Position(0)
        self._said = False

    # ---- what it walks -------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self._source.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples in a global batch; None where the dataset or a batch sampler decides."""
        return self._source.batch_size

    @property
    def seed(self) -> int:
        """What orders and draws come from, with the number of the epoch."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the newest iteration; before the first, the one that it will walk."""
        return self._position.epoch

    @property
    def num_workers(self) -> int:
        """Processes that load, as of now."""
        return self._tuner.workers

    @property
    def waiting(self) -> float:
        """Which part of the newest epoch's time, so far, this process spent in the loader and not in the script."""
        return self._tuner.waiting.share

    def __len__(self) -> int:
        """Global batches an epoch, the same on every rank.

        Raises:
            TypeError: the dataset or sampler has no length.
        """
        if self._source.order is not None:
            return len(self._source.order)
        size = self._source.batch_size or 1
        full, rest = divmod(len(self._source.dataset), size)
        return full + (rest > 0 and not self._source.drop_last)

    # ---- iterating -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on where restored state says."""
        if self._position.begun:
            self._position = _Position(self._position.epoch + 1)
        self._position.begun = True
        self.feed.current = None
        return self._hand_out(self._position)

    def _hand_out(self, position: _Position) -> Iterator[Any]:
        shown: BatchInfo | None = None
        order = self._order_of(position)
        self._tuner.begin(epoch=True)
        walk = self._batches(position, order)
        try:
            while not position.finished:
                try:
                    for batch, info in PULSE.each("loader", walk):
                        position.batches += 1
                        self.feed.current = shown = info
                        self._tuner.handed()
                        yield batch
                        self._tuner.asked()
                        if self._tune(batch, info) and not info.last:
                            break
                    else:
                        position.finished = True
                        continue
                except SettingError as error:
                    self._do_without_workers(error)
                walk.close()
                walk = self._batches(position, order)
                self._tuner.begin(epoch=False)
            self._say(self._tuner.describe(position.epoch))
        except GeneratorExit:
            position.finished = shown is not None and shown.last
            raise
        finally:
            walk.close()
            # Another loader's batch may have been handed out meanwhile; it is not this one's to clear.
            if self.feed.current is shown:
                self.feed.current = None

    def _tune(self, batch: Any, info: BatchInfo) -> bool:
        """Whether there should be another number of workers from here on."""
        if not self._tuner.decide(ended=info.last):
            return False
        limits = read_limits(self._tuner.workers, self._ahead)
        return limits.refuse(batch) is None or self._tuner.take_back()

    def _do_without_workers(self, error: SettingError) -> None:
        """Workers that "auto" chose can't start: go on without; workers that were asked for are an error."""
        if self._source.workers is not None or not self._tuner.workers:
            raise error
        self._tuner.settle(0)
        self._say(f"num_workers='auto' goes on without workers: {error}")

    def _batches(self, position: _Position, order: EpochOrder) -> Generator[tuple[Any, BatchInfo], None, None]:
        """What is left of an epoch, on its device, loaded by as many workers as there should be now."""
        if self._tuner.workers != self._walk.workers:
            self._walk = self._make_walk()
        walk = self._walk.batches(position.epoch, position.batches, self._seed, order)
        try:
            # Loading ahead in this process would only put off the step that waits for the batch in hand.
            if self._transfer.ahead and self._walk.workers:
                yield from sent_ahead(walk, self._transfer)
            else:
                with closing(finished_ahead(walk)) as whole:
                    for batch, info in whole:
                        yield self._transfer.receive(self._transfer.send(batch)), info
        finally:
            walk.close()

    def _make_walk(self) -> Walk:
        """What walks the source, with as many workers as there should be now."""
        reader = Reader(self.rank, self.world_size, self._tuner.workers, self._transfer.device, self._gather)
        if self._source.order is None:
            return StreamWalk(self._source, reader)
        return (ItemWalk if self._source.whole_items else ShardWalk)(self._source, reader)

    def _say(self, words: str) -> None:
        """Say something about loading, once."""
        if words and not self._said and self.rank == 0:
            self._said = True
            print(f"manycard: {words}", file=sys.stderr)

    def _order_of(self, position: _Position) -> EpochOrder:
        """The epoch's order, after the checks that ranks and a checkpoint call for."""
        order = self._source.order
        if order is None:
            return ()
        order.seed = self._seed
        batches = order.of_epoch(position.epoch)
        if isinstance(order, GlobalBatchSampler):
            return batches
        print_ = fingerprint(batches)
        if position.order is not None and position.order != print_:
            raise CheckpointError(
                f"the sampler gives another order for epoch {position.epoch} than when the checkpoint was made, so "
                f"batch {position.batches} is not the next one",
                fix="resume with the same dataset and sampler; one that draws from a generator of its own must draw "
                "from random, numpy.random or torch instead, or start the next epoch with set_epoch",
            )
        position.order = print_
        self._agree_on_order(print_, position.epoch)
        return batches

    # ---- agreeing between ranks ----------------------------------------------------------------------------

    def _agree_on_seed(self, source: Source) -> int:
        """Rank 0's seed on every rank, where ranks can talk; their datasets must be equally long."""
        if self._gather is None:
            return source.seed
        told = self._gather((source.seed, source.length))
        lengths = [length for _, length in told]
        if any(length != lengths[0] for length in lengths):
            raise SettingError(
                "dataset",
                type(source.dataset).__name__,
                f"it has a different length on different ranks ({', '.join(map(str, lengths))})",
                fix="make the same dataset on every rank",
            )
        return int(told[0][0])

    def _agree_on_order(self, print_: int, epoch: int) -> None:
        if self._gather is None:
            return
        told = self._gather(print_)
        others = [str(rank) for rank, value in enumerate(told) if value != told[0]]
        if others:
            assert isinstance(self._source.order, SamplerOrder), "manycard's own order follows from the seed"
            raise SettingError(
                "sampler",
                type(self._source.order.sampler).__name__,
                f"in epoch {epoch} it draws another order on ranks {', '.join(others)} than on rank 0, so some samples "
                "would be used twice and others never",
                fix="let it draw from random, numpy.random or torch, which are seeded alike on all ranks for it, or "
                "seed its own generator alike on all ranks",
            )

    # ---- resuming ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it each iteration is one further.

        Called with the epoch that restored state is in the middle of, it changes nothing.
        """
        epoch = whole_number("epoch", epoch, 0, "count epochs from 0")
        if self._position.begun or self._position.epoch != epoch:
            self._position = _Position(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iteration stands, in global batches handed out, and what its order depends on."""
        position = self._position
        if position.finished:
            position = _Position(position.epoch + 1)
        return {
            "epoch": position.epoch,
            "batches": position.batches,
            "order": position.order,
            "seed": self._seed,
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        """What must not change in the middle of an epoch."""
        order = self._source.order
        return {
            "length": self._source.length,
            "batch_size": self._source.batch_size,
            "shuffle": order.shuffle if isinstance(order, GlobalBatchSampler) else None,
            "drop_last": self._source.drop_last,
            "num_workers": self._walk.workers if self._walk.splits else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on at the batch after the last one that was handed out.

        Raises:
            CheckpointError: `state` is not that of a loader.
            SettingError: it stands in the middle of an epoch, and this loader's batches are not those of then.
        """
        try:
            position = _Position(int(state["epoch"]), int(state["batches"]), state["order"])
            seed = int(state["seed"])
            then = {name: state[name] for name in self._settings() if name != "num_workers"}
            workers = state.get("num_workers")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"this is not the state of a loader ({type(error).__name__}: {error})",
                fix="give what state_dict() of a loader returned",
            ) from error
        if position.batches:
            now_set = self._settings()
            if workers is not None:
                # The order of a stream that splits itself is that of its workers.
                then["num_workers"], now_set["num_workers"] = workers, self._walk.workers
            for name, now in now_set.items():
                if now != then.setdefault(name, now):
                    raise SettingError(
                        name,
                        now,
                        f"the checkpoint was made with {then[name]!r}, {position.batches} batches into an epoch, so "
                        "the next batch can't be found",
                        fix=f"resume with {name}={then[name]!r}, or start an epoch anew with set_epoch",
                    )
        self._seed = seed
        self._position = position
        self._walk.resumes_split = workers is not None
