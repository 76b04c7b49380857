"""A short trial of one candidate: the step that it would run, on copies, timed from end to end.

Behaviour:
    * Steps before the clock starts let the allocator, cuDNN and graphs settle; what they take isn't counted.
    * What goes wrong is the trial's result (`Measured.error`), never the caller's failure; memory is given back.
    * Candidates with one process a card can't be tried from one process: `run_candidate` says so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manycard.cards import Card
from manycard.data import Feed
from manycard.engine.batches.batch import count_samples, cut, move, tensors_in
from manycard.engine.data_parallel import DataParallel
from manycard.planner import Candidate, Measured
from manycard.precision import make_precision
from manycard.strategies import Strategy, StrategyOptions, make_strategy
from manycard.strategies.train_step import TrainStep, TrainStepSettings
from manycard.trials.subject import Subject, preserving_draws

__all__ = ["Timing", "run_candidate", "time_steps"]

_WARM_UP = {False: 4, True: 14}
"""Steps before the clock, eager and with graphs: those are recorded at the second batch of a shape and compared with
eager steps at replays 1, 2 and 8."""


@dataclass(frozen=True)
class Timing:
    """How long a trial may take."""

    seconds: float = 1.5
    """Timed steps stop after so long."""
    steps: int = 20
    """At most so many are timed."""
    warm_up: int | None = None
    """Steps before the clock; None for what the candidate needs."""


def run_candidate(
    subject: Subject,
    candidate: Candidate,
    cards: Sequence[Card],
    timing: Timing | None = None,
    *,
    batch: Any = None,
) -> Measured:
    """Try one candidate.

    Args:
        cards: those of the machine; the candidate takes as many as it needs.
        batch: another batch than the subject's.
    """
    if candidate.ranks:
        return Measured(error="it needs one process a card, and this is one process")
    own, whole = cards[: candidate.cards], subject.batch if batch is None else batch
    with preserving_draws(cards):
        strategy: Strategy | None = None
        try:
            before = _held_mib(own, whole)
            strategy, step = _make(subject, candidate, own)
            parts = _parts(move(whole, own[0].device), candidate.accumulate)
            return time_steps(
                lambda: [step(part) for part in parts], own, timing or Timing(), graphs=candidate.graphs, held=before
            )
        except Exception as error:  # a script's own model and loss may raise anything
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            found = Measured(error=f"out of memory: {text}" if isinstance(error, torch.OutOfMemoryError) else text)
        finally:
            if strategy is not None:
                strategy.close()
            step = None  # type: ignore[assignment]
            release(own)
    return found


def time_steps(
    step: Callable[[], Any],
    cards: Sequence[Card],
    timing: Timing,
    *,
    graphs: bool,
    together: Callable[[], Any] | None = None,
    held: Sequence[float] = (),
) -> Measured:
    """Run `step` until it is settled, then time it.

    Args:
        together: waits for the other ranks, where there are any. All then time the same number of steps.
        held: MiB on each card that are not the trial's own: what a run holds that is being planned.
    """
    for _ in range(_WARM_UP[graphs] if timing.warm_up is None else timing.warm_up):
        step()
    once = _timed(step, cards)
    steps = max(2, min(timing.steps, int(timing.seconds / max(once, 1e-6)))) if together is None else timing.steps
    for card in cards:
        if not card.simulated:
            torch.cuda.reset_peak_memory_stats(card.device)
    if together is not None:
        together()
    wait(cards)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(cards)
    return Measured(1e3 * (time.perf_counter() - start) / steps, _peak_mib(cards, held, graphs=graphs))


def _timed(step: Callable[[], Any], cards: Sequence[Card]) -> float:
    start = time.perf_counter()
    step()
    wait(cards)
    return time.perf_counter() - start


def wait(cards: Sequence[Card]) -> None:
    """Wait until the cards are idle."""
    for card in cards:
        if not card.simulated:
            torch.cuda.synchronize(card.device)


def release(cards: Sequence[Card]) -> None:
    """Give back what dropped copies held."""
    gc.collect()
    if any(not card.simulated for card in cards):
        torch.cuda.empty_cache()


def _held_mib(cards: Sequence[Card], batch: Any) -> list[float]:
    """What each card holds before a trial, without the batch, which is the trial's."""
    if cards[0].simulated:
        return []
    own = [sum(t.nbytes for t in tensors_in(batch) if t.device == card.device) for card in cards]
    return [(torch.cuda.memory_allocated(card.device) - size) / 2**20 for card, size in zip(cards, own, strict=True)]


def _peak_mib(cards: Sequence[Card], held: Sequence[float], *, graphs: bool) -> float | None:
    # Graphs keep their memory in pools, which count as reserved and not as allocated.
    read = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated
    peaks = [read(card.device) / 2**20 for card in cards if not card.simulated]
    return max((peak - other for peak, other in zip(peaks, held or [0.0] * len(peaks), strict=True)), default=None)


def _parts(batch: Any, count: int) -> list[Any]:
    samples = count_samples(batch)
    sizes = [samples // count + (place < samples % count) for place in range(count)]
    return cut(batch, [size for size in sizes if size])


def _make(subject: Subject, candidate: Candidate, cards: Sequence[Card]) -> tuple[Strategy, Callable[[Any], Any]]:
    """The candidate's strategy, and its step on copies of the subject."""
    precision = make_precision(subject.precision)
    options = StrategyOptions(compile={} if candidate.compile else None)
    strategy = make_strategy(candidate.strategy, cards, precision, Feed(), options)
    module, optimizers = subject.copies(cards[0].device)
    if candidate.drop_in:
        return strategy, _loop_step(subject, candidate, cards, module, optimizers)
    model = strategy.setup_module(module)
    for optimizer in optimizers:
        strategy.setup_optimizer(model, optimizer)
    graphs = "on" if candidate.graphs and not cards[0].simulated else "off"
    settings = TrainStepSettings(candidate.accumulate, subject.clip_norm, check_loss=False, graphs=graphs)
    return strategy, TrainStep(strategy, subject.loss_fn, model, optimizers, None, settings)


def _loop_step(
    subject: Subject, candidate: Candidate, cards: Sequence[Card], module: nn.Module, optimizers: Sequence[Any]
) -> Callable[[Any], Any]:
    """A loop as people write it, round a module whose calls are spread."""
    model = DataParallel(module, cards, graphs="auto" if candidate.graphs else "off")
    precision = make_precision(subject.precision)

    def step(batch: Any) -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with precision.autocast(cards[0].device):
            loss = subject.loss_fn(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step
