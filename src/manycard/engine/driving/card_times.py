"""How long each card computes in a step, and what memory that takes, noted without waiting for any card.

Behaviour:
    * The base does nothing. `MeasuredTimes` notes spans of work: by events on the card's own stream. A simulated
      card's time is what its thread computes, times its slowdown: the cards run in turn, and what other processes take
      from the CPU meanwhile says nothing about a card.
    * The spans of a step (forward and backward of each micro-batch, and the update) make one `StepTime`, which is
      handed out once its events have come to pass on every card. Reading it waits for nothing.
    * A step that fails is forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import thread_time
from typing import Any

import torch

from manycard.cards.card import Card

__all__ = ["CardTimes", "MeasuredTimes", "StepTime"]

_LONGEST_BACKLOG = 64
"""Steps whose times may be unread; the host is never as far ahead of the cards."""
_BACKWARD = 1.3
"""What backward takes at its peak, in terms of what forward has kept for it: gradients of activations come on top."""
_OF_FREE = 0.85
"""The part of the free memory that a larger share may fill; the rest is for fragments and for batches that vary."""


@dataclass(frozen=True)
class StepTime:
    """One step, on every card."""

    samples: tuple[int, ...]
    """Samples of each card, over all micro-batches of the step."""
    seconds: tuple[float, ...]
    """How long each card computed."""


class CardTimes:
    """Notes nothing."""

    def of(self, position: int) -> AbstractContextManager[object]:
        """What is given to a card inside counts as its work."""
        return nullcontext()

    def of_all(self) -> AbstractContextManager[object]:
        """What is given to cards inside, from one thread, counts as their work."""
        return nullcontext()

    def timed(self, position: int, job: Callable[[], Any]) -> Any:
        """Run a card's job inside `of`, in the thread that drives the card."""
        return job()

    def between(self, position: int, samples: int) -> None:
        """A card has been given the forward pass of `samples` samples, and not its backward pass."""

    def note_samples(self, sizes: Sequence[int]) -> None:
        """A micro-batch with so many samples a card belongs to the step."""

    def drop(self) -> None:
        """Forget the unfinished step."""

    def close(self) -> None:
        """The step has been given to the cards."""


class MeasuredTimes(CardTimes):
    """Notes what there is to note while `on`.

    Args:
        cards: the cards, the primary first.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self.on = True
        self._cards = tuple(cards)
        self._spans: list[list[_Span]] = [[] for _ in cards]
        self._samples = [0] * len(self._cards)
        self._closed: deque[tuple[tuple[int, ...], list[list[_Span]]]] = deque(maxlen=_LONGEST_BACKLOG)
        self._before = [0] * len(self._cards)
        self._bytes_a_sample = [0.0] * len(self._cards)

    @contextmanager
    def of(self, position: int) -> Iterator[None]:
        if not self.on:
            yield
            return
        card = self._cards[position]
        if not card.simulated:
            self._before[position] = torch.cuda.memory_allocated(card.device)
        span = _HostSpan(card.slowdown) if card.simulated else _EventSpan(card.device)
        try:
            yield
        finally:
            span.end()
            self._spans[position].append(span)

    @contextmanager
    def of_all(self) -> Iterator[None]:
        with ExitStack() as stack:
            for position in range(len(self._cards)):
                stack.enter_context(self.of(position))
            yield

    def timed(self, position: int, job: Callable[[], Any]) -> Any:
        with self.of(position):
            return job()

    def between(self, position: int, samples: int) -> None:
        card = self._cards[position]
        if self.on and not card.simulated and not torch.cuda.is_current_stream_capturing():
            kept = torch.cuda.memory_allocated(card.device) - self._before[position]
            self._bytes_a_sample[position] = max(self._bytes_a_sample[position], _BACKWARD * kept / samples)

    def note_samples(self, sizes: Sequence[int]) -> None:
        self._samples = [held + size for held, size in zip(self._samples, sizes, strict=True)]

    def drop(self) -> None:
        self._spans = [[] for _ in self._cards]
        self._samples = [0] * len(self._cards)

    def close(self) -> None:
        if self.on and any(self._spans):
            self._closed.append((tuple(self._samples), self._spans))
        self.drop()

    def finished(self) -> list[StepTime]:
        """The steps that have come to pass on every card since the last call."""
        found = []
        while self._closed and all(span.done for spans in self._closed[0][1] for span in spans):
            samples, of_cards = self._closed.popleft()
            found.append(StepTime(samples, tuple(sum(span.seconds for span in spans) for spans in of_cards)))
        return found

    def forget(self) -> None:
        """Forget all steps so far: what comes is cut in another way, and the cards may still be at what was before."""
        self._closed.clear()
        self.drop()

    def most_samples(self) -> list[float]:
        """How many samples of one micro-batch each card has memory for, between two steps; inf where it can't tell."""
        return [
            float("inf") if not each else _OF_FREE * _free_memory(card.device) / each
            for card, each in zip(self._cards, self._bytes_a_sample, strict=True)
        ]


def _free_memory(device: torch.device) -> int:
    """Bytes that this process could still take on a card, with what its allocator holds and nothing uses."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


class _Span(ABC):
    """From its making to its end."""

    @abstractmethod
    def end(self) -> None:
        """Note the end."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `seconds` can be read."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long it was."""


class _HostSpan(_Span):
    """What the calling thread computes."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._begin = self._end = thread_time()

    def end(self) -> None:
        self._end = thread_time()

    @property
    def done(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return self._slowdown * (self._end - self._begin)


class _EventSpan(_Span):
    """Between two events on the card's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)

    @property
    def done(self) -> bool:
        return bool(self._end.query())

    @property
    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3
