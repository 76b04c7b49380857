"""Recording what a card does once, to replay it without Python.

`CudaRecorder` records CUDA graphs. Behaviour:
    * What is recorded does not run; each replay runs it on the card's current stream, on the same memory.
    * All graphs of a card share one memory pool, which is safe because replays of one card never overlap and hand
      their results over before the next begins.
    * A recording that fails leaves the card as it was: its random generator, which PyTorch leaves in a state in which
      the next draw raises, is given back the state from before.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from manycard.cards.card import Card

__all__ = ["CudaRecorder", "Recorder", "make_recorders"]

T = TypeVar("T")


class Recorder(ABC):
    """Records the work of one card."""

    @abstractmethod
    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record `work`; runs in the card's thread while no other card does anything.

        Returns:
            What replays it, and what `work` returned: tensors in it are written by every replay.

        Raises:
            Exception: it can't be recorded, or `work` raised.
        """


class CudaRecorder(Recorder):
    """Records CUDA graphs on one GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # torch.cuda.graph's own capture stream is made once, on whichever card came first.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._generator = torch.cuda.default_generators[device.index]
        self._device = device
        self._pool: Any = None

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        before = self._generator.clone_state()
        self._stream.wait_stream(current)
        pool = {} if self._pool is None else {"pool": self._pool}
        with _no_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(**pool, capture_error_mode="thread_local")
            try:
                value = work()
            except BaseException:
                # The failed capture must end before the stream is good for anything; it says so by raising.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                self._generator.graphsafe_set_state(before)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._generator.graphsafe_set_state(before)
                raise
        current.wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay, value


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing another graph or an event in the middle of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def make_recorders(cards: Sequence[Card]) -> list[Recorder]:
    """A recorder for each card; none where the cards can't record."""
    if any(card.simulated for card in cards):
        return []
    return [CudaRecorder(card.device) for card in cards]
