"""Copying parts of a batch from one card to the others without holding up either.

PyTorch runs a copy between two cards on the stream of the card it comes from. In the primary's compute stream, such
a copy would wait for all that is queued there, and what comes after it would wait for the other card: cards would
run one after the other. So these copies run on a stream of their own, and all are queued before any card computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from manycard.cards.card import Card

__all__ = ["InputCopies"]


class InputCopies:
    """Copies from the primary to the other cards.

    Args:
        cards: the cards, the primary first.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self._primary = cards[0].device
        several = len(cards) > 1 and self._primary.type == "cuda"
        self._stream = torch.cuda.Stream(self._primary) if several else None  # type: ignore[no-untyped-call]
        self._compute: torch.cuda.Stream | None = None
        """The primary's stream outside `apart`."""

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Copies inside wait for what the primary has been given so far, and nothing on the primary waits for them."""
        if self._stream is None:
            yield
            return
        self._compute = torch.cuda.current_stream(self._primary)
        self._stream.wait_stream(self._compute)
        with torch.cuda.stream(self._stream):
            yield

    def ahead(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor` on `device`, inside `apart`; what isn't on the primary stays, to be copied when it is used.

        Copied to the primary in here, it would be there for the stream of these copies, and for no other.
        """
        if not tensor.is_cuda or tensor.device == device or tensor.device != self._primary:
            return tensor
        self._keep(tensor)
        return tensor.to(device, non_blocking=True)

    def at_once(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor` on `device` for what the card computes next, inside `apart`."""
        if tensor.device == device:
            return tensor
        with torch.cuda.stream(self._compute):
            return tensor.to(device, non_blocking=True)

    def write(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second of each pair into the first; from the primary to other cards, apart."""
        leaves = [source.is_cuda and source.device == self._primary != target.device for target, source in pairs]
        with self.apart():
            for (target, source), apart in zip(pairs, leaves, strict=True):
                if apart:
                    self._keep(source)
                    target.copy_(source, non_blocking=True)
        for (target, source), apart in zip(pairs, leaves, strict=True):
            if not apart:
                target.copy_(source, non_blocking=True)

    def _keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until its copy is done, should the script drop it before."""
        if self._stream is not None and tensor.device == self._primary:
            tensor.record_stream(self._stream)
