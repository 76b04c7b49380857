"""Adding up and handing out flat buffers between the cards of one process.

`Collective` says what is done; `SumsOnHost` does it with plain tensor operations (simulated cards, and real ones
that NCCL can't join), `Nccl` with one grouped call over distinct GPUs. All calls are made from one thread and take
their place on each card's current stream; none waits for a card.

Tensors in every call: one per card, [n] each, equal n and dtype, the primary's first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from manycard.cards.card import Card

__all__ = ["Collective", "Rounded", "make_collective"]


class Collective(ABC):
    """What cards of one process do together."""

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum of all into each, bit-equal on every card."""

    @abstractmethod
    def reduce(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> None:
        """Put the sum of all into the first, or `into` a further tensor of the primary's."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Put the first into each."""

    @abstractmethod
    def all_gather(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Put every card's part [n] into each card's `into`, [cards, n]; a part may be its own place there."""


class SumsOnHost(Collective):
    """Plain additions and copies, in card order."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        self.reduce(tensors)
        self.broadcast(tensors)

    def reduce(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> None:
        first = tensors[0] if into is None else into.copy_(tensors[0])
        for tensor in tensors[1:]:
            first.add_(tensor.to(first.device, non_blocking=True))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors[1:]:
            tensor.copy_(tensors[0], non_blocking=True)

    def all_gather(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        for position, gathered in enumerate(into):
            for owner, part in enumerate(parts):
                if owner != position:
                    gathered[owner].copy_(part, non_blocking=True)


class Nccl(Collective):
    """NCCL over distinct GPUs, grouped in one call from one thread."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        nccl.all_reduce([_real(tensor) for tensor in tensors])  # type: ignore[no-untyped-call]

    def reduce(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> None:
        nccl.reduce([_real(tensor) for tensor in tensors], _real(tensors[0] if into is None else into), root=0)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        nccl.broadcast([tensor.view(torch.uint8) for tensor in tensors], root=0)

    def all_gather(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        nccl.all_gather([part.view(torch.uint8) for part in parts], [whole.view(torch.uint8) for whole in into])


class Rounded(Collective):
    """Sums of fp32 and wider gradients in a shorter dtype: half the bytes to send, with that dtype's rounding.

    Args:
        collective: what sums.
        dtype: what it sums in.
    """

    def __init__(self, collective: Collective, dtype: torch.dtype) -> None:
        self._collective = collective
        self._dtype = dtype

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        if not tensors[0].is_floating_point() or tensors[0].element_size() <= self._dtype.itemsize:
            self._collective.all_reduce(tensors)
            return
        short = [tensor.to(self._dtype) for tensor in tensors]
        self._collective.all_reduce(short)
        for tensor, total in zip(tensors, short, strict=True):
            tensor.copy_(total)

    def reduce(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> None:
        self._collective.reduce(tensors, into)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._collective.broadcast(tensors)

    def all_gather(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        self._collective.all_gather(parts, into)


def _real(tensor: Tensor) -> Tensor:
    """`tensor` as NCCL can add it."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def make_collective(cards: Sequence[Card]) -> Collective:
    """The fastest collective that these cards can use."""
    devices = {card.device for card in cards}
    if len(devices) == len(cards) and all(device.type == "cuda" for device in devices):
        probe = [torch.zeros(1, device=card.device) for card in cards]
        if nccl.is_available(probe):  # type: ignore[no-untyped-call]
            return Nccl()
    return SumsOnHost()
