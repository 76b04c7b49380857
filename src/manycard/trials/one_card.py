"""One card's step by size of batch, its memory, and what the host needs to launch it.

Behaviour:
    * The shard that every card would get, its half, and the whole batch where that fits and is quick. A size that
      runs out of memory is halved until one fits.
    * Host cost is the time until an eager step has been handed to an idle card. On the CPU, which computes as it is
      told, there is no such thing, and it is left None.
    * CUDA graphs are tried where there are GPUs; why they can't be recorded is kept in the engine's words.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from manycard.cards import Card
from manycard.data import Feed
from manycard.errors import ManycardError
from manycard.planner import Candidate, Measured, StepFacts, StepPoint
from manycard.precision import make_precision
from manycard.strategies import StrategyOptions, make_strategy
from manycard.strategies.train_step import TrainStep, TrainStepSettings
from manycard.trials.confirm import Timing, release, run_candidate, wait
from manycard.trials.subject import Subject, preserving_draws

__all__ = ["measure_one_card"]

_QUICK_MS = 2_000.0
"""A step that would take longer isn't tried on the whole batch."""

Said = Callable[[str], None]


def measure_one_card(
    subject: Subject, card: Card, cards: int, timing: Timing, *, compile_too: bool = False, say: Said = lambda _: None
) -> StepFacts:
    """Measure the steps of one card.

    Args:
        cards: how many cards would share the batch.
        compile_too: also measure it compiled, which takes as long as compiling does.
        say: told what is being tried.
    """
    shard = -(-subject.samples // cards)
    points = _eager(subject, card, shard, timing, say)
    facts = StepFacts(eager=tuple(points), host_ms=None if card.simulated else _host_ms(subject, card, points))
    if card.simulated or not points:
        return facts
    sizes = sorted({point.samples for point in points})[-2:]
    graphed = _kind(subject, card, Candidate("dp", 1, graphs=True), sizes, timing, say)
    if isinstance(graphed, str):
        return replace(facts, no_graphs=graphed)
    facts = replace(facts, graphed=graphed)
    if compile_too:
        compiled = _kind(subject, card, Candidate("dp", 1, graphs=True, compile=True), sizes[-1:], timing, say)
        facts = facts if isinstance(compiled, str) else replace(facts, compiled=compiled)
    return facts


def _eager(subject: Subject, card: Card, shard: int, timing: Timing, say: Said) -> list[StepPoint]:
    points: list[StepPoint] = []
    size = shard
    while size:
        found = _try(subject, card, Candidate("single", 1), size, timing, say)
        if found.step_ms is not None:
            points.append(StepPoint(size, found.step_ms, found.memory_mib))
            if len(points) == 2 or size == 1:
                break
        elif "out of memory" not in found.error:
            raise ManycardError(f"one step on one card failed: {found.error}", fix="mend that first")
        size //= 2
    points.sort(key=lambda point: point.samples)
    whole = subject.samples
    if points and whole > points[-1].samples == shard and _estimated(points, whole) < _QUICK_MS:
        found = _try(subject, card, Candidate("single", 1), whole, timing, say)
        if found.step_ms is not None:
            points.append(StepPoint(whole, found.step_ms, found.memory_mib))
    return points


def _estimated(points: list[StepPoint], samples: int) -> float:
    return (points[-1].ms or 0.0) * samples / points[-1].samples


def _kind(
    subject: Subject, card: Card, candidate: Candidate, sizes: list[int], timing: Timing, say: Said
) -> tuple[StepPoint, ...] | str:
    """Points of one kind of step, or why there are none."""
    points = []
    for size in sizes:
        found = _try(subject, card, candidate, size, timing, say)
        if found.step_ms is None:
            return found.error
        points.append(StepPoint(size, found.step_ms, found.memory_mib))
    return tuple(points)


def _try(subject: Subject, card: Card, candidate: Candidate, size: int, timing: Timing, say: Said) -> Measured:
    say(f"measuring {candidate.name} on one card, {size} samples")
    return run_candidate(subject, candidate, [card], timing, batch=subject.part(size))


def _host_ms(subject: Subject, card: Card, points: list[StepPoint]) -> float | None:
    """How long the host takes to hand one small step to an idle card: with few samples the card never makes it wait."""
    if not points:
        return None
    batch: Any = subject.part(max(1, points[0].samples // 4))
    with preserving_draws([card]):
        strategy = make_strategy("single", [card], make_precision(subject.precision), Feed(), StrategyOptions())
        module, optimizers = subject.copies(card.device)
        model = strategy.setup_module(module)
        settings = TrainStepSettings(1, subject.clip_norm, check_loss=False, graphs="off")
        step = TrainStep(strategy, subject.loss_fn, model, optimizers, None, settings)
        times = []
        for _ in range(8):
            wait([card])
            start = time.perf_counter()
            step(batch)
            times.append(1e3 * (time.perf_counter() - start))
        wait([card])
        strategy.close()
        del step, model, module, optimizers
        release([card])
    return statistics.median(times[3:])
