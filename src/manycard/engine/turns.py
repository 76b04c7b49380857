"""Whether the cards' threads run their forward passes at once or in turn.

Python runs one thread at a time. Threads that all launch kernels from Python hand the interpreter lock to and fro at
every operator, and each hand-over costs more than many an operator. In turn, a thread has the lock for itself, while
the cards before it run their backward passes in PyTorch's own threads, without it. But a forward pass that waits for
its card (``.item()``, a copy to the host) lets the cards wait for one another then.

So it is measured: after some passes to warm up, both ways are tried alternately, and the one that takes the host less
is kept. Both are tried again from time to time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from manycard.cards.card import Card

__all__ = ["Turns"]

_WARM_UP, _TRIES, _KEPT = 6, 12, 500
"""Passes before anything is measured, passes of a trial (half of them in turn), and passes until the next trial."""
_WORTH = 0.97
"""The other way is taken where it needs less than this share of the time."""


class Turns:
    """The choice for one kind of pass.

    Args:
        cards: whose threads; with one card, or simulated ones, there is nothing to choose.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self._choose = len(cards) > 1 and not any(card.simulated for card in cards)
        self.in_turn = False
        """The way that is kept."""
        self._passes = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    @contextmanager
    def timed(self) -> Iterator[bool]:
        """Around one pass: whether it runs in turn."""
        if not self._choose:
            yield False
            return
        trial = self._passes - _WARM_UP
        tried = self.in_turn if not 0 <= trial < _TRIES else trial % 2 == 1
        begin = time.perf_counter()
        yield tried
        self.took(tried, time.perf_counter() - begin)

    def took(self, tried: bool, seconds: float) -> None:
        """Note how long a pass took the host, and decide at the end of a trial."""
        trial = self._passes - _WARM_UP
        self._passes += 1
        if 0 <= trial < _TRIES:
            self._seconds[tried].append(seconds)
        if trial == _TRIES - 1:
            medians = {way: statistics.median(times) for way, times in self._seconds.items()}
            self.in_turn ^= medians[not self.in_turn] < _WORTH * medians[self.in_turn]
            self._seconds = {False: [], True: []}
        elif trial >= _TRIES + _KEPT:
            self._passes = _WARM_UP
