"""A thread that finishes batches of images, so that they are made while the script computes.

Behaviour:
    * Batches are finished in the order they were begun, one at a time: torchvision's decoder on a card belongs to the
      thread that uses it, and another thread would make another.
    * On a card it works on a stream of its own. `result` lets the asking thread's current stream wait for the batch,
      not the host, and keeps its memory until that stream has come past its last use.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manycard.data.ahead import Pending

__all__ = ["PendingBatch", "ReadingThread"]


class Made(NamedTuple):
    """A batch that was finished."""

    images: Tensor
    rest: Any
    ready: torch.cuda.Event | None
    """When the images are there; None where they are."""


class PendingBatch(Pending):
    """A batch that the thread will finish: ``[images, rest]``."""

    def __init__(self, made: Future[Made]) -> None:
        self._made = made

    def result(self) -> list[Any]:
        images, rest, ready = self._made.result()
        if ready is not None:
            current = torch.cuda.current_stream(images.device)
            current.wait_event(ready)
            images.record_stream(current)
        return [images, rest]

    def drop(self) -> None:
        self._made.cancel()


class ReadingThread:
    """Finishes batches, one after another."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "manycard-batches")
        self._streams: dict[torch.device, Any] = {}

    def submit(self, finish: Callable[[], tuple[Tensor, Any]], device: torch.device | None) -> PendingBatch:
        """Let the thread do `finish`.

        Args:
            finish: gives images, and the rest of the batch.
            device: the card that `finish` works on; None for the host.
        """
        return PendingBatch(self._thread.submit(self._finish, finish, device))

    def _finish(self, finish: Callable[[], tuple[Tensor, Any]], device: torch.device | None) -> Made:
        with nullcontext() if device is None else torch.cuda.stream(self._stream_on(device)):
            images, rest = finish()
            ready = torch.cuda.current_stream(images.device).record_event() if images.is_cuda else None
        return Made(images, rest, ready)

    def _stream_on(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def close(self) -> None:
        """End the thread; what was not begun is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
