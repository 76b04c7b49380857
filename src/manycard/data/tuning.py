"""How long the cards wait for data, and ``num_workers="auto"``: as many workers as end the waiting.

Behaviour:
    * Time is measured in the script's process: waiting is the time inside the loader, the rest is the script's. While
      workers keep up, batches lie ready and the waiting is nearly nothing, however far the host runs ahead of cards.
    * "auto" starts without workers. After a window of batches it goes on where cards wait for more than 5 % of the
      time: to as many workers as the measured times call for, then to twice as many, never more than this rank's share
      of the cores. Where more workers didn't make batches come at least 5 % faster, it goes back to the number before,
      so a disk or a library that is slower with company ends the search. An epoch that waits for more than 10 % of its
      time with what was enough opens it again.
    * A change comes between two batches. Loaders walk on from the number of the next global batch, and what a sample
      draws depends on its place, so no sample is lost, repeated or drawn otherwise. What workers had read ahead is
      read again.
    * Workers that the machine can't hold (`manycard.data.limits`) are not tried; where workers can't start, loading
      goes on without, and the loader says why.
    * Ranks decide each for themselves: workers change nothing that others could see.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

__all__ = ["Tuner", "Waiting"]

_ENOUGH = 0.05
"""The part of the time that cards may wait."""
_NO_LONGER_ENOUGH = 0.1
"""A whole epoch with more than this opens the search again."""
_WORTH = 0.95
"""More workers must bring the time of a batch below this much of what it was."""
_LONG_WAIT = 5.0
"""Seconds of an epoch from which on waiting is worth a word ..."""
_LARGE_SHARE = 0.3
"""... if they are more than this much of it ..."""
_FEW_BATCHES = 20
"""... and not the start of workers, which so few batches would not outweigh."""
_WINDOW_BATCHES = 8
_WINDOW_SECONDS = 0.5
_FIRST_STEPS = 3


@dataclass
class Waiting:
    """Time spent on some batches."""

    batches: int = 0
    waited: float = 0.0
    """Seconds inside the loader."""
    worked: float = 0.0
    """Seconds between its batches."""

    @property
    def share(self) -> float:
        """Which part of the time was waited; 0 before any."""
        return self.waited / (self.waited + self.worked) if self.batches else 0.0

    @property
    def seconds_a_batch(self) -> float:
        """Seconds from batch to batch."""
        return (self.waited + self.worked) / max(self.batches, 1)


class Tuner:
    """Finds the number of workers.

    Args:
        workers: a number that stays; None to find one.
        most: the most there may be.
        ahead: batches that each worker reads ahead.
    """

    def __init__(self, workers: int | None, most: int, ahead: int) -> None:
        self.settled = workers is not None
        """Whether the number stays as it is."""
        self.workers = 0 if workers is None else workers
        """How many workers there should be now."""
        self.waiting = Waiting()
        """Time spent in the newest epoch."""
        self.tried: dict[int, Waiting] = {}
        """What was measured with each number of workers."""
        self._most = most
        self._ahead = ahead
        self._window = Waiting()
        self._skip = 0
        self._counts = False
        self._quiet = False
        self._before: int | None = None
        self._mark = time.perf_counter()

    def begin(self, *, epoch: bool) -> None:
        """Loading begins: of an epoch, or anew in the middle of one after a change."""
        if epoch:
            self.waiting = Waiting()
        self._window = Waiting()
        # First steps compile and allocate; workers start, and what they have read by then comes for nothing.
        self._skip = _FIRST_STEPS + self.workers * self._ahead
        self._mark = time.perf_counter()

    def asked(self) -> None:
        """The script asks for the next batch."""
        self._add(worked=self._lap())

    def handed(self) -> None:
        """The script is given a batch."""
        self._counts = self._skip == 0
        self._skip = max(self._skip - 1, 0)
        self._add(waited=self._lap())
        self.waiting.batches += 1
        self._window.batches += self._counts

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    def _add(self, waited: float = 0.0, worked: float = 0.0) -> None:
        for times in (self.waiting, self._window)[: 2 if self._counts else 1]:
            times.waited += waited
            times.worked += worked

    def decide(self, *, ended: bool) -> bool:
        """Look at what was measured, after a batch was used.

        Args:
            ended: whether the epoch did; a short epoch is then a window as a whole.

        Returns:
            Whether `workers` has changed.
        """
        if self.settled and not (ended and self._grew_loud()):
            return False
        window = self._window
        full = window.batches >= _WINDOW_BATCHES and window.waited + window.worked >= _WINDOW_SECONDS
        if not full:
            if not ended or self.waiting.batches < 2:
                return False
            window = window if window.batches >= _WINDOW_BATCHES else self.waiting
        before, self.tried[self.workers] = self.workers, window
        self.workers = self._next(window)
        self._window = Waiting()
        return self.workers != before

    def _grew_loud(self) -> bool:
        """Whether a number that was enough is so no longer, by the epoch that has ended."""
        times = self.waiting
        loud = self._quiet and times.batches >= _WINDOW_BATCHES and times.share > _NO_LONGER_ENOUGH
        if loud:
            self.settled, self._before = False, None
        return loud

    def _next(self, now: Waiting) -> int:
        """The number of workers to go on with; settles where there is nothing to gain."""
        before = None if self._before is None else self.tried[self._before]
        if before is not None and now.seconds_a_batch > before.seconds_a_batch * _WORTH:
            self.settle(self._before or 0)
            return self.workers
        if now.share <= _ENOUGH or self.workers >= self._most:
            self.settled, self._quiet = True, now.share <= _ENOUGH
            return self.workers
        self._before = self.workers
        if self.workers == 0:
            # One process loads a batch while the script works on another: that many at once end the waiting.
            needed = math.ceil(now.waited / max(now.worked, 1e-9) - _ENOUGH)
            return max(min(needed, self._most), 1)
        return min(self.workers * 2, self._most)

    def take_back(self) -> bool:
        """The new number can't be had: stay with the one before. Gives whether that is another than there is: no."""
        self.settle(self._before or 0)
        return False

    def settle(self, workers: int) -> None:
        """End the search."""
        self.workers, self.settled, self._quiet = workers, True, False

    def describe(self, epoch: int) -> str:
        """What is worth a word after an epoch: the number that was found, or a long wait; empty otherwise."""
        if not self.settled:
            return ""
        if self.tried:
            measured = ", ".join(
                f"{times.share:.0%} of the time with {workers} ({times.seconds_a_batch * 1e3:.3g} ms a batch)"
                for workers, times in sorted(self.tried.items())
            )
            return f"num_workers={self.workers}: waiting for data took {measured}"
        times = self.waiting
        if times.waited < _LONG_WAIT or times.share < _LARGE_SHARE or times.batches < _FEW_BATCHES:
            return ""
        whom = f"waiting for {self.workers} loader workers" if self.workers else "loading in the script's own process"
        if self.workers < self._most:
            advice = f'num_workers="auto" finds how many end it ({self._most} cores are there)'
        else:
            advice = f"there are no more than {self._most} cores for them, so let a sample cost less (docs/data.md)"
        seconds = times.waited + times.worked
        return f"{times.waited:.0f} of the {seconds:.0f} seconds of epoch {epoch} went into {whom}; {advice}"
