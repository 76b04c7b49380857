"""Recording what a card does once, to replay it without Python.

`CudaRecorder` records CUDA graphs. Behaviour:
    * What is recorded does not run; each replay runs it on the card's current stream, on the same memory.
    * All graphs of a card share one memory pool, which is safe because replays of one card never overlap and hand
      their results over before the next begins.
    * The script may switch streams between replays: `catch_up` keeps them in order then.
    * A recording that fails leaves the card as it was, also its random generator, from which graphs recorded before
      draw: PyTorch leaves it in a state in which the next draw raises, until another recording has ended.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from manycard.cards.card import Card
from manycard.engine.batches.batch import map_tensors

__all__ = ["CudaRecorder", "Recorder", "make_recorders", "make_room", "own_inputs", "without_autocast_cache"]

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

    def catch_up(self) -> None:
        """Let what comes next on the card wait for the last replay, should that have run on another stream."""


class CudaRecorder(Recorder):
    """Records CUDA graphs on one GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # torch.cuda.graph's own capture stream is made once, on whichever card came first.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._keeper: tuple[Any, ...] = ()
        self._last: torch.cuda.Stream | None = None
        """The stream of the last replay."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with _no_collection(), torch.cuda.stream(self._stream):
            # Made now where this thread has none: a recording can't make it.
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            try:
                graph.capture_begin(pool=self._pool(), capture_error_mode="thread_local")
                value = work()
                graph.capture_end()
            except BaseException:
                self._end_failed(graph)
                raise
        current.wait_stream(self._stream)

        def replay() -> None:
            graph.replay()
            self._last = torch.cuda.current_stream(self._device)

        return replay, value

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed: before that, its stream is good for nothing."""
        keeper, self._keeper = self._keeper, ()  # dropped at the end: not in the middle of a capture
        try:
            graph.capture_end()
        except RuntimeError:
            if not keeper:
                return
            # It raises before it tells the allocator, which would go on as in a capture: memory that several streams
            # have used is not given out again meanwhile.
            with contextlib.suppress(RuntimeError):  # the capture failed to begin, and counts for no use of the pool
                torch._C._cuda_endAllocateToPool(self._device.index, keeper[0].pool())
                torch._C._cuda_releasePool(self._device.index, keeper[0].pool())
            with contextlib.suppress(RuntimeError):  # the card is lost, which the error in hand tells
                self._pool()

    def _pool(self) -> Any:
        """The memory of all recordings. A pool that no graph uses any more can't be used again, so one graph stays."""
        if not self._keeper:
            graph, written = torch.cuda.CUDAGraph(), torch.zeros(1, device=self._device)
            graph.capture_begin(capture_error_mode="thread_local")
            written.zero_()
            graph.capture_end()
            self._keeper = graph, written
        return self._keeper[0].pool()

    def catch_up(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)


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


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Cast weights anew inside: those cast before a recording are not those of a replay."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def make_room(cards: Sequence[Card]) -> None:
    """Before recording, give back the memory that eager passes took: it is for the graphs now."""
    if not any(card.simulated for card in cards):
        for card in cards:
            torch.cuda.synchronize(card.device)
        gc.collect()
        torch.cuda.empty_cache()


def own_inputs(cards: Sequence[Card], shards: Sequence[Any]) -> tuple[list[list[Tensor]], list[Any]]:
    """Copies of every card's shard, for replays to read from: their tensors, and the shards made of them."""
    inputs, own = [], []
    for card, shard in zip(cards, shards, strict=True):
        tensors: list[Tensor] = []

        def copy(tensor: Tensor, card: Card = card, tensors: list[Tensor] = tensors) -> Tensor:
            tensors.append(torch.empty_like(tensor, device=card.device).copy_(tensor))
            return tensors[-1]

        own.append(map_tensors(copy, shard))
        inputs.append(tensors)
    return inputs, own


def make_recorders(cards: Sequence[Card]) -> list[Recorder]:
    """A recorder for each card; none where the cards can't record."""
    if any(card.simulated for card in cards):
        return []
    return [CudaRecorder(card.device) for card in cards]
