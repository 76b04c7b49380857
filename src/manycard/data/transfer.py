"""Batches on their way to the card.

Behaviour:
    * Simulated cards: nothing to do; tensors are moved as `manycard.engine.batches.batch.move` does.
    * CUDA cards: copies run on a stream of their own, from pinned memory, so that they pass beside the computing of
      earlier steps. A batch is handed out when its copy is queued; the stream that asks for it waits for that copy, the
      host doesn't. Where workers load, the copy of the batch after is queued as well, so that it runs while the step of
      this one computes.
    * Memory of a batch isn't used again before the stream that it was handed to has come past its last use
      (``record_stream``).
    * A batch whose tensors can't be seen, or are on a card already, is moved on the current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import children, move, tensors_in
from manycard.errors import BatchError

__all__ = ["CudaTransfer", "Transfer", "make_transfer", "sent_ahead"]


class Transfer:
    """Moves batches to `device`, on the current stream.

    Args:
        device: the card; None leaves batches where they are.
    """

    ahead = False
    """Whether a batch should be sent before the one before it is used."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def send(self, batch: Any) -> Any:
        """Begin to move a batch."""
        return batch if self.device is None else move(batch, self.device)

    def receive(self, sent: Any) -> Any:
        """What `send` gave, ready for the current stream."""
        return sent


class CudaTransfer(Transfer):
    """Copies on a stream of its own."""

    ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> Any:
        assert self.device is not None, "a CUDA transfer has a card"
        if not _on_host(batch):
            return move(batch, self.device), None
        with torch.cuda.stream(self._stream):
            # A pinned source isn't given out again before the copy is done: PyTorch notes this stream on it.
            sent = move(batch, self.device)
        return sent, self._stream.record_event()

    def receive(self, sent: Any) -> Any:
        batch, copied = sent
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in tensors_in(batch):
                if tensor.is_cuda:
                    tensor.record_stream(current)
        return batch


def _on_host(batch: Any) -> bool:
    """Whether all of a batch's tensors can be seen and are on the host."""
    if isinstance(batch, Tensor):
        return batch.device.type == "cpu" and batch.layout == torch.strided
    try:
        parts = children(batch)
    except BatchError:
        return False
    if parts is None:
        return not callable(getattr(batch, "to", None))
    return all(_on_host(part) for _, part in parts)


def make_transfer(device: torch.device | None) -> Transfer:
    """What moves batches to `device`."""
    return CudaTransfer(device) if device is not None and device.type == "cuda" else Transfer(device)


def sent_ahead(batches: Iterable[tuple[Any, Any]], transfer: Transfer) -> Iterator[tuple[Any, Any]]:
    """Each batch on its card, when the next one has been sent."""
    waiting: list[tuple[Any, Any]] = []
    for batch, info in batches:
        waiting.append((transfer.send(batch), info))
        if len(waiting) > 1:
            sent, told = waiting.pop(0)
            yield transfer.receive(sent), told
    for sent, told in waiting:
        yield transfer.receive(sent), told
