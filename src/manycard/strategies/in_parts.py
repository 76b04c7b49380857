"""A batch in parts that fit on the cards, one after another, with the gradient of the whole.

Behaviour:
    * ``per_card_batch=N``: a batch is cut into as few parts as leave no card more than N samples at once. Each sample
      counts as in the whole batch, since a group's parts are weighted by their samples or counts
      (`manycard.strategies.strategy`).
    * ``per_card_batch="auto"``: the largest number that fits is found at the first batch. Two small forward and
      backward passes tell what a sample takes and what is there without any, and one confirms the number that they
      promise, with a margin; one that runs out of memory is halved. No trial updates anything, and buffers and random
      states are put back after each.
    * Cards agree, since the fullest one decides; so do ranks, on the smallest number, and every trial is made by all.
    * When a later batch runs out of memory all the same, the number is halved, for good, and the unfinished group of
      micro-batches is computed anew from its start, with its buffers and random states: the same samples, the same
      weights. Dropout draws what it would have drawn, but for other parts; which is said.
    * A rank that runs out of memory tells the others in the exchange that ends each part. So gradients of ranks are
      reduced after their backward passes, not within them.
    * Where not even one sample fits, `ModelError` says so.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manycard.cards import in_words
from manycard.data.feed import BatchInfo
from manycard.engine.batches.batch import count_samples, cut
from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import ModelError
from manycard.strategies.before import Before
from manycard.strategies.card_memory import CardMemory, is_out_of_memory, state_to_come
from manycard.strategies.strategy import MicroBatch, Strategy

__all__ = ["InParts", "RunPart"]

RunPart = Callable[[Any, bool], MicroBatch]
"""Runs one part forward and backward in the open group; told whether it ends the group."""

MARGIN = 0.1
"""The part of a card's memory that stays free: gaps of the allocator, longer samples, NCCL's buffers."""
_MOST_TRIALS = 6


class InParts:
    """Cuts the batches of one train step, and finds how far they must be cut.

    Args:
        strategy: how the work is spread.
        model: what `Parallel.setup` returned.
        per_card: the most samples that a card gets at once; None finds it.
        memory: of this process's cards.
    """

    def __init__(self, strategy: Strategy, model: nn.Module, per_card: int | None, memory: CardMemory) -> None:
        self.per_card = per_card
        """The most samples that a card gets at once; None until it is found."""
        self.parts = 1
        """Into how many parts the newest batch was cut."""
        self._strategy = strategy
        self._model = model
        self._memory = memory
        self._searches = per_card is None
        self._spread = 1 if strategy.ranks else len(strategy.cards)
        self._calls: list[tuple[Any, BatchInfo | None, bool]] = []
        self._before: Before | None = None
        strategy.tells_of_memory = self._searches
        memory.holds(strategy.unwrap(model).parameters())

    @property
    def reduces_after(self) -> bool:
        """Whether gradients of ranks are reduced after their backward passes."""
        return self._searches and self._strategy.ranks

    def run(
        self, batch: Any, run_part: RunPart, drop_group: Callable[[], None], *, first: bool, ends_group: bool
    ) -> MicroBatch:
        """Run one batch in parts.

        Args:
            run_part: runs one part.
            drop_group: drops the open group's gradients.
            first: whether the batch begins a group.
            ends_group: whether it ends it.

        Returns:
            The batch as one micro-batch.
        """
        if not self._searches:
            return self._run_batch(batch, run_part, ends_group)
        if first:
            self._calls, self._before = [], Before(self._strategy, self._model)
        self._calls.append((batch, self._strategy.feed.current, ends_group))
        found = self._attempt(batch, run_part, ends_group)
        while found is None:
            self._make_smaller(drop_group)
            found = self._anew(run_part)
        if ends_group:
            self._calls, self._before = [], None
        return found

    def find(
        self, batch: Any, run_part: RunPart, drop_group: Callable[[], None], optimizers: Sequence[Optimizer]
    ) -> None:
        """Find how many samples of a batch like this fit on a card at once; does nothing when that is known.

        Raises:
            ModelError: not even one does.
        """
        if self.per_card is not None:
            return
        whole = -(-count_samples(batch) // self._spread)
        largest = max(self._strategy.peers.gather_objects(whole))
        limits = self._memory.limits()
        if limits is None:
            self.per_card = largest
            self._say(f"per_card_batch auto: {largest}, since simulated cards have no memory of their own to fill")
            return
        come = state_to_come(optimizers)
        rooms = [(1 - MARGIN) * limit - come for limit in limits]
        feed = self._strategy.feed
        before, info = Before(self._strategy, self._model), feed.current

        def peaks(size: int) -> list[int] | None:
            """Peak of each card with `size` samples; None where that is too many for some card of some rank."""
            self._memory.reset()
            try:
                run_part(self._sample(batch, size * self._spread), False)
                found: list[int] | None = self._memory.peaks()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found = None
            drop_group()
            self._clean()
            before.restore()
            feed.current = info
            return found

        self.per_card, peak = _search(largest, rooms, peaks, self._strategy.peers.gather_objects)
        parts = -(-largest // self.per_card)
        cards = "" if parts == 1 else f", a batch in {parts} parts"
        self._say(
            f"per_card_batch auto: {self.per_card} samples a card at once{cards}"
            f" ({in_words(peak + come)} of {in_words(min(limits))})"
        )

    # ---- one batch -----------------------------------------------------------------------------------------

    def _attempt(self, batch: Any, run_part: RunPart, ends_group: bool) -> MicroBatch | None:
        try:
            return self._run_batch(batch, run_part, ends_group)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return None  # out of the handler, so that nothing holds what its traceback does

    def _anew(self, run_part: RunPart) -> MicroBatch | None:
        """Run all batches of the group again: the earlier ones have lost their gradients with it."""
        found: MicroBatch | None = None
        for batch, info, ends_group in self._calls:
            self._strategy.feed.current = info
            found = self._attempt(batch, run_part, ends_group)
            if found is None:
                break
        self._strategy.feed.current = self._calls[-1][1]
        return found

    def _run_batch(self, batch: Any, run_part: RunPart, ends_group: bool) -> MicroBatch:
        feed, held = self._strategy.feed, count_samples(batch)
        info, samples = feed.current, feed.samples(held)
        assert self.per_card is not None, "find comes before the first batch"
        wanted = max(1, -(-held // (self.per_card * self._spread)))
        self.parts = self._strategy.peers.largest(wanted) if self._strategy.ranks else wanted
        if self.parts == 1:
            return run_part(batch, ends_group and not self.reduces_after)
        sizes = [size for size in shard_sizes(held, self.parts) if size]
        pieces = cut(batch, sizes)
        done: list[MicroBatch] = []
        try:
            for place in range(self.parts):
                # A rank with fewer samples than parts takes part with a stand-in that weighs nothing.
                own = place < len(pieces)
                piece = pieces[place] if own else self._sample(batch, 1)
                size = sizes[place] if own else 1
                feed.current = BatchInfo(size, size if own and samples else 0, info is not None and info.last)
                last = place == self.parts - 1
                done.append(run_part(piece, ends_group and last and not self.reduces_after))
        finally:
            feed.current = info
        return _joined(done)

    def _sample(self, batch: Any, size: int) -> Any:
        held = count_samples(batch)
        return batch if size >= held else cut(batch, [size, held - size])[0]

    def _make_smaller(self, drop_group: Callable[[], None]) -> None:
        assert self.per_card is not None, "something ran"
        drop_group()
        self._clean()
        if self.per_card == 1:
            raise _nothing_fits()
        before, self.per_card = self.per_card, self.per_card // 2
        assert self._before is not None, "a group is open"
        self._before.restore()
        self._say(
            f"out of memory with {before} samples a card at once: {self.per_card} from now on, in more parts of the"
            " same global batch. This update is computed anew, with the same weights; dropout draws for other parts"
        )

    def _clean(self) -> None:
        gc.collect()
        self._memory.release()

    def _say(self, line: str) -> None:
        if self._strategy.peers.rank == 0:
            print(f"manycard: {line}", file=sys.stderr)


def _search(
    largest: int,
    rooms: Sequence[float],
    peaks: Callable[[int], list[int] | None],
    gather: Callable[[Any], list[Any]],
) -> tuple[int, int]:
    """The largest number of samples a card that fits, and the fullest card's peak with it.

    Args:
        largest: what a card would get of a whole batch.
        rooms: bytes that each card may hold.
        peaks: tries a number.
        gather: every rank's value.
    """
    size = largest
    low, high = max(1, largest // 8), max(2, largest // 4)
    if high < largest:
        one, two = peaks(low), peaks(high)
        if one is None:
            size = max(1, low // 2)
        elif two is None:
            size = low
        else:
            size = min(largest, *(_promised(*each, low, high) for each in zip(one, two, rooms, strict=True)))
    for _ in range(_MOST_TRIALS):
        size = min(gather(max(1, size)))
        found = peaks(size)
        over = 1.0 if found is None else max(peak / max(room, 1.0) for peak, room in zip(found, rooms, strict=True))
        fits = found is not None and over <= 1.0
        if all(gather(fits)):
            assert found is not None, "it fits"
            return size, max(found)
        if size == 1:
            if found is not None:
                return 1, max(found)  # within the margin: it ran, and nothing smaller could
            raise _nothing_fits()
        size = size // 2 if found is None else min(size - 1, int(size / over))
    return 1, 0


def _promised(small: int, large: int, room: float, low: int, high: int) -> int:
    """How many samples fit a card whose peak was `small` with `low` of them and `large` with `high`."""
    each = (large - small) / (high - low)
    return sys.maxsize if each <= 0 else max(1, int((room - (small - each * low)) / each))


def _joined(parts: Sequence[MicroBatch]) -> MicroBatch:
    """The parts of one batch as one: means weighted by what they are over."""
    samples = sum((part.samples for part in parts[1:]), start=parts[0].samples)
    count = sum((part.count for part in parts[1:]), start=parts[0].count)
    sums = [part.loss * part.count for part in parts]
    return MicroBatch(sum(sums[1:], start=sums[0]) / count, samples, count)


def _nothing_fits() -> ModelError:
    return ModelError(
        "not even one sample a card fits beside the model, its gradients and the optimizer's state",
        fix="take a smaller model or precision='bf16', or a strategy that shards the model",
    )
