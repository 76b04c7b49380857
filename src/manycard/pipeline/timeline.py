"""Where the cards' time goes in one batch: who computed what, when, and who waited.

On real cards the times are those of CUDA events on the compute streams: a span begins when its inputs are there.
Simulated cards run in turn, so their spans are as long as measured and are laid out as cards that run at once would
have run them: each as soon as its card is free and what it needs is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from manycard.cards.card import Card
from manycard.pipeline.schedule import bubble

__all__ = ["Recorder", "Recording", "Span", "Timeline"]


@dataclass(frozen=True)
class Span:
    """One pass of one micro-batch on one card."""

    card: str
    stage: int
    backward: bool
    micro_batch: int
    start: float
    """Seconds since the batch began."""
    end: float


@dataclass(frozen=True)
class Timeline:
    """One batch, card by card."""

    schedule: str
    micro_batches: int
    cards: tuple[str, ...]
    """By replica, then by stage."""
    stages: tuple[str, ...]
    """Of each stage, its parts in words."""
    spans: tuple[Span, ...]
    in_flight: tuple[int, ...]
    """Of each card, the most micro-batches whose activations it held at once."""
    peak_memory_mib: tuple[int | None, ...]
    """Of each card; None for simulated ones."""
    simulated: bool

    @property
    def seconds(self) -> float:
        """From the first span's beginning to the last one's end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def busy(self, card: str) -> float:
        """The seconds in which a card computed."""
        return sum(span.end - span.start for span in self.spans if span.card == card)

    @property
    def bubble(self) -> float:
        """The idle share of the cards' time."""
        return 1 - sum(self.busy(card) for card in self.cards) / (len(self.cards) * self.seconds)

    @property
    def expected_bubble(self) -> float:
        """The idle share of stages of equal time under this schedule."""
        return bubble(len(self.stages), self.micro_batches)

    @property
    def scheduled_bubble(self) -> float:
        """The idle share that the schedule leaves where passes take as long as these did: what `bubble` has beyond it
        went into copies, launches and waiting."""
        stages = len(self.stages)
        whole = 0.0
        for first in range(0, len(self.cards), stages):
            own = sorted((s for s in self.spans if s.card in self.cards[first : first + stages]), key=lambda s: s.start)
            whole = max(whole, max(span.end for span in laid_out(own, stages)))
        return 1 - sum(self.busy(card) for card in self.cards) / (len(self.cards) * whole)

    @property
    def balance(self) -> float:
        """The mean busy time over that of the busiest card; 1 where all stages take equally long."""
        busy = [self.busy(card) for card in self.cards]
        return sum(busy) / len(busy) / max(busy)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        summary = {
            "seconds": self.seconds,
            "bubble": self.bubble,
            "expected_bubble": self.expected_bubble,
            "scheduled_bubble": self.scheduled_bubble,
            "balance": self.balance,
            "busy_seconds": [self.busy(card) for card in self.cards],
        }
        return {**asdict(self), **summary}


class Recorder:
    """The base: notes nothing."""

    def begin(self, stage: int, *, number: int, backward: bool) -> None:
        """A stage begins with a micro-batch."""

    def end(self, stage: int, *, number: int, backward: bool) -> None:
        """A stage has done with a micro-batch."""

    def spans(self) -> list[Span]:
        """What was noted."""
        return []


class Recording(Recorder):
    """Notes when each pass runs on the cards of one chain of stages."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = tuple(cards)
        self._real = not cards[0].simulated
        self._begun: dict[tuple[int, int, bool], Any] = {}
        self._ended: dict[tuple[int, int, bool], Any] = {}
        self._origins: list[Any] = []
        if self._real:
            for card in cards:
                torch.cuda.synchronize(card.device)
                torch.cuda.reset_peak_memory_stats(card.device)
            self._origins = [self._now(stage) for stage in range(len(cards))]

    def begin(self, stage: int, *, number: int, backward: bool) -> None:
        self._begun[stage, number, backward] = self._now(stage)

    def end(self, stage: int, *, number: int, backward: bool) -> None:
        self._ended[stage, number, backward] = self._now(stage)

    def _now(self, stage: int) -> Any:
        if not self._real:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._cards[stage].device))
        return event

    def spans(self) -> list[Span]:
        """What was noted; waits for the cards."""
        found = []
        for key, begun in self._begun.items():
            stage, number, backward = key
            if self._real:
                self._ended[key].synchronize()
                origin = self._origins[stage]
                start, end = (origin.elapsed_time(event) / 1000 for event in (begun, self._ended[key]))
            else:
                start, end = 0.0, self._ended[key] - begun
            found.append(Span(self._cards[stage].name, stage, backward, number, start, end))
        return found if self._real else laid_out(found, len(self._cards))


def laid_out(spans: Sequence[Span], stages: int) -> list[Span]:
    """Spans of cards that ran in turn, as cards that run at once would have run them.

    Args:
        spans: of each, only its length counts; those of one stage in the order in which it ran them.
        stages: how many stages there are.
    """
    queues = [[span for span in spans if span.stage == stage] for stage in range(stages)]
    done: dict[tuple[int, int, bool], float] = {}
    free = [0.0] * stages
    placed: list[Span] = []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                span = queue[0]
                needs = _needs(span, stages)
                if needs is not None and needs not in done:
                    break
                start = max(free[stage], done[needs] if needs is not None else 0.0)
                free[stage] = done[stage, span.micro_batch, span.backward] = start + span.end - span.start
                placed.append(Span(span.card, stage, span.backward, span.micro_batch, start, free[stage]))
                del queue[0]
    return placed


def _needs(span: Span, stages: int) -> tuple[int, int, bool] | None:
    """The pass that must be done before `span`; None for none."""
    if not span.backward:
        return (span.stage - 1, span.micro_batch, False) if span.stage else None
    last = span.stage == stages - 1
    return (span.stage if last else span.stage + 1, span.micro_batch, not last)
