"""What a spread tensor holds: a part on each card, and the whole once somebody needed it.

Behaviour:
    * Parts are read, never written: a card's own graph may have saved them.
    * Tensors that are views of one another are a family. What only reads one of them puts that one's parts together.
      What may write, now or later (an operation in place, a view that the script gets), gathers the tensor with which
      the family began; from then on all of the family read and write that, as views of one memory do.
    * The whole is in memory of its own, with the strides that were promised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manycard.engine.batches.input_copies import InputCopies
from manycard.engine.driving.threads import CardThreads

__all__ = ["NOT_SPREAD", "Held", "Home", "Rows", "sent"]

NOT_SPREAD = object()
"""What comes instead of a result where an operation needs the whole."""

_gathering = threading.RLock()


@dataclass(frozen=True)
class Rows:
    """Where parts lie in the whole: one after another on one dimension."""

    dim: int
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    """The card of each part."""

    @property
    def total(self) -> int:
        """How many rows the whole has."""
        return sum(self.lengths)

    def start(self, index: int) -> int:
        """Where part `index` begins."""
        return sum(self.lengths[:index])

    def of(self, whole: Tensor, index: int) -> Tensor:
        """Part `index` of a whole, as a view."""
        return whole.narrow(self.dim, self.start(index), self.lengths[index])

    def on(self, dim: int) -> Rows:
        """The same parts on another dimension."""
        return Rows(dim, self.lengths, self.positions)


@dataclass(frozen=True)
class Home:
    """The cards that parts are on, and what becomes of them."""

    threads: CardThreads
    copies: InputCopies
    position: int
    """The card on which wholes are put together."""
    least: int
    """Bytes of a whole below which a result is put together at once: handing it over would cost more."""

    @property
    def devices(self) -> list[torch.device]:
        """The cards' devices, by position."""
        return self.threads.devices

    @property
    def device(self) -> torch.device:
        """Where wholes are put together."""
        return self.devices[self.position]


class Held:
    """The content of one spread tensor.

    Args:
        home: its cards.
        rows: where the parts lie in the whole.
        parts: a tensor for each of `rows`, on its card, without a graph.
        shape: of the whole, with its strides and dtype; on the meta device.
        source: the tensor that this one is a view of.
        view: makes this one's whole of the source's.
    """

    def __init__(
        self,
        home: Home,
        rows: Rows,
        parts: Sequence[Tensor],
        shape: Tensor,
        source: Held | None = None,
        view: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.home = home
        self.rows = rows
        self.parts = tuple(parts)
        self.shape = shape
        self._source = source
        self._view = view
        self._whole: Tensor | None = None
        self._copy: Tensor | None = None
        """The parts put together for reading, while the family is spread."""

    @classmethod
    def of_parts(cls, home: Home, rows: Rows, parts: Sequence[Tensor]) -> Held:
        """What cards have computed; the whole's shape follows from the parts'."""
        first = parts[0]
        size = [*first.shape]
        size[rows.dim] = rows.total
        return cls(home, rows, parts, _shape(size, first, all(part.is_contiguous() for part in parts)))

    @property
    def _root(self) -> Held:
        return self if self._source is None else self._source._root

    @property
    def spread(self) -> bool:
        """Whether the parts are what counts, since the family has not been gathered."""
        return self._root._whole is None

    @property
    def bytes(self) -> int:
        """The size of the whole."""
        return self.shape.numel() * self.shape.element_size()

    def matches(self, other: Held) -> bool:
        """Whether both lie on the same cards in the same rows, dimensions counted from the last."""
        return self.rows.dim - self.shape.dim() == other.rows.dim - other.shape.dim() and self.lies_as(
            other.rows.on(self.rows.dim), other.home
        )

    def lies_as(self, rows: Rows, home: Home) -> bool:
        """Whether the parts are those `rows`, on the same cards."""
        return self.rows == rows and self.home.devices == home.devices and self.home.position == home.position

    def joined(self, device: torch.device, *, non_blocking: bool = True) -> Tensor:
        """The parts put together on a device, in memory of their own."""
        with torch.inference_mode(False), torch.no_grad():
            like = self.shape
            whole = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
            for index, part in enumerate(self.parts):
                self.rows.of(whole, index).copy_(part, non_blocking=non_blocking)
        return whole

    def read(self) -> Tensor:
        """The whole, to be read only."""
        with _gathering:
            if not self.spread:
                return self.gather()
            if self._copy is None:
                self._copy = self.joined(self.home.device)
            return self._copy

    def gather(self) -> Tensor:
        """The whole, of which views may be handed out, and which may be written."""
        with _gathering:
            if self._whole is None:
                if self._source is None:
                    self._whole = self.joined(self.home.device) if self._copy is None else self._copy
                else:
                    assert self._view is not None, "a view knows how it is made"
                    self._whole = self._view(self._source.gather())
                self._copy = None
                self.parts = ()
            return self._whole


def _shape(size: Sequence[int], like: Tensor, contiguous: bool) -> Tensor:
    """A whole's shape, in the order of memory that its first part has."""
    if contiguous:
        return torch.empty(size, dtype=like.dtype, device="meta")
    order = sorted(range(len(size)), key=lambda dim: (-like.stride()[dim], dim))
    strides, step = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(size[dim], 1)
    return torch.empty_strided(size, strides, dtype=like.dtype, device="meta")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on a device; of one number repeated, one number is sent."""
    ahead = device.type != "cpu"  # the host would read what isn't there yet
    if tensor.device != device and tensor.numel() > 1 and not any(tensor.stride()):
        return tensor.as_strided((), ()).to(device, non_blocking=ahead).expand(tensor.shape)
    return tensor.to(device, non_blocking=ahead)
