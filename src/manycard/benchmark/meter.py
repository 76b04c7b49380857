"""`StepMeter`: times the steps of a training that runs in this process, from its first step until it is steady.

Behaviour:
    * Steps are timed in blocks of about a quarter of a second. At both ends of a block the cards are idle and all
      ranks are there, so a block's time is that of its work, whatever queues stand between Python and the cards.
    * The first step is timed by itself, from when the row began: importing, starting ranks, compiling, loading.
    * Warm-up ends where block times say so (`steady`); a block's figures before that don't count. The meter is done
      when enough steps are steady, or `Goal.patience` is over: what is then known is marked as not steady.
    * All ranks end at the same step: what rank 0 decides between two blocks holds for all.
    * `pause` leaves out what happens until the next `resume`: evaluation and checkpoints between epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from manycard.benchmark.gauges import peak_memory_mib, reserved_memory_mib, reset_peak_memory, synchronize
from manycard.benchmark.steady import find_steady, quartiles
from manycard.strategies.peers import Peers

__all__ = ["Block", "Figures", "Goal", "StepMeter", "figures_of"]

_BLOCK_SECONDS = 0.25
_FEWEST_BLOCKS = 5


@dataclass(frozen=True)
class Goal:
    """When a training has been measured for long enough."""

    steps: int = 20
    """Steady steps, at least."""
    seconds: float = 1.0
    """Seconds that they take together, at least."""
    patience: float = 90.0
    """Seconds after the first step, after which it is measured as it is; infinite for a training of fixed length."""

    @property
    def longest_block(self) -> int:
        """Steps in a block, at most: enough blocks of the fewest steady steps, where these alone are asked for."""
        return max(1, self.steps // _FEWEST_BLOCKS) if self.seconds == 0 else 1_000_000


@dataclass(frozen=True)
class Block:
    """Steps between two moments at which all cards were idle."""

    steps: int
    samples: int
    """Of all ranks together."""
    seconds: float
    joules: float | None = None
    peaks: tuple[float | None, ...] = ()
    """MiB allocated at most, on every card."""
    reserved: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Figures:
    """What the steady blocks say."""

    samples_per_s: float
    """The median of blocks."""
    quartiles: tuple[float, float]
    """Of the blocks' samples/s."""
    step_ms: float
    steady: bool
    """Whether the times had settled."""
    warm_up_steps: int
    """Steps before the steady ones, the first included."""
    steps: int
    """Steady steps."""
    first_step_s: float
    peaks: tuple[float | None, ...]
    reserved: tuple[float | None, ...]
    joules_per_sample: float | None


def figures_of(blocks: Sequence[Block], first_step_s: float) -> Figures:
    """What is known after `blocks`, of which there is at least one."""
    start = find_steady([block.seconds / block.samples for block in blocks])
    steady = start is not None
    first = start if start is not None else len(blocks) // 2
    kept = blocks[first:]
    rates = [block.samples / block.seconds for block in kept]
    seconds, steps = sum(block.seconds for block in kept), sum(block.steps for block in kept)
    drawn = [block.joules for block in kept]
    known = [value for value in drawn if value is not None]
    return Figures(
        samples_per_s=median(rates),
        quartiles=quartiles(rates),
        step_ms=1e3 * median(block.seconds / block.steps for block in kept),
        steady=steady,
        warm_up_steps=1 + sum(block.steps for block in blocks[:first]),
        steps=steps,
        first_step_s=first_step_s,
        peaks=_largest([block.peaks for block in kept]),
        reserved=_largest([block.reserved for block in kept]),
        # Counters move a few times a second: over less than that, they say nothing.
        joules_per_sample=sum(known) / sum(block.samples for block in kept)
        if len(known) == len(drawn) and seconds >= _BLOCK_SECONDS
        else None,
    )


def _largest(rows: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    return tuple(None if None in column else max(column) for column in zip(*rows, strict=True))


@dataclass
class StepMeter:
    """Call `step` after every step; it says when enough is known.

    Args:
        devices: what this process's steps run on.
        peers: the run's other processes.
        goal: when it is enough.
        began: ``time.time()`` when the row began.
        joules: what the row's cards have drawn so far; None where it isn't known.
        on_progress: called with the steps done and the steps in all, as far as is known.
    """

    devices: Sequence[torch.device]
    peers: Peers
    goal: Goal
    began: float
    joules: Callable[[], float | None] = lambda: None
    on_progress: Callable[[int, int], None] = lambda done, total: None
    blocks: list[Block] = field(default_factory=list)
    first_step_s: float = 0.0
    steps_done: int = 0
    _left: int = 1
    _steps: int = 0
    _samples: int = 0
    _started: float | None = None
    _joules: float | None = None
    _first_at: float = 0.0
    _done: bool = False

    def step(self, samples: int) -> bool:
        """Note a step on `samples` samples of this process; whether the meter is done."""
        if self._done:
            return True
        self.steps_done += 1
        self.on_progress(self.steps_done, max(self.steps_done + self._left - 1, self.goal.steps + 1))
        if self.steps_done == 1:
            synchronize(self.devices)
            self.first_step_s, self._first_at = time.time() - self.began, time.perf_counter()
            self._next()
            return False
        if self._started is None:  # it began in a pause, so that nobody knows how long it took
            self._begin()
            return False
        self._steps += 1
        self._samples += samples
        self._left -= 1
        if self._left <= 0:
            self._close()
            self._next()
        return self._done

    def pause(self) -> None:
        """Leave out what follows, until `resume`."""
        if self._steps:
            self._close()
        self._started = None

    def resume(self) -> None:
        """Count time again."""
        if self._started is None and self.steps_done:
            self._begin()

    def figures(self) -> Figures | None:
        """What is known; None where no step was timed but the first."""
        if self._steps:
            self._close()
        return figures_of(self.blocks, self.first_step_s) if self.blocks else None

    def _begin(self) -> None:
        synchronize(self.devices)
        self.peers.barrier()
        reset_peak_memory(self.devices)
        synchronize(self.devices)  # a barrier of NCCL's is itself work that was given to the card
        self._steps = self._samples = 0
        self._joules = self.joules()
        self._started = time.perf_counter()

    def _close(self) -> None:
        """End the block once the cards have done its last step."""
        synchronize(self.devices)
        assert self._started is not None, "a block was closed and never begun"
        seconds = time.perf_counter() - self._started
        joules = self.joules()
        own = (self._samples, seconds, peak_memory_mib(self.devices), reserved_memory_mib(self.devices))
        everyone: list[Any] = self.peers.gather_objects(own)
        self.blocks.append(
            Block(
                self._steps,
                max(sum(each[0] for each in everyone), 1),
                max(each[1] for each in everyone),
                None if joules is None or self._joules is None else joules - self._joules,
                tuple(peak for each in everyone for peak in each[2]),
                tuple(held for each in everyone for held in each[3]),
            )
        )
        self._steps = self._samples = 0
        self._started = None

    def _next(self) -> None:
        """Decide, as rank 0 sees it, how many steps the next block has; none where enough is known."""
        self._left = self.peers.gather_objects(self._wanted())[0]
        self._done = self._left == 0
        if not self._done:
            self._begin()

    def _wanted(self) -> int:
        if not self.blocks:
            return 1
        if time.perf_counter() - self._first_at > self.goal.patience:
            return 0
        last = self.blocks[-1]
        start = find_steady([block.seconds / block.samples for block in self.blocks])
        if start is not None:
            steady = self.blocks[start:]
            steps, seconds = sum(block.steps for block in steady), sum(block.seconds for block in steady)
            enough = len(steady) >= min(_FEWEST_BLOCKS, self.goal.steps)
            if enough and steps >= self.goal.steps and seconds >= self.goal.seconds:
                return 0
        fitting = int(_BLOCK_SECONDS / (last.seconds / last.steps))
        # At most twice the last one: of a warm-up, short blocks say more.
        return max(1, min(fitting, 2 * last.steps, self.goal.longest_block))
