"""One output tensor of a spread call: the cards' tensors, how they become one, and how its gradient is taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manycard.engine.batches.joining import Concatenated, Join
from manycard.engine.spread_tensor import Held, Home, Rows, SpreadTensor

__all__ = ["OutputLeaf"]


@dataclass(frozen=True)
class OutputLeaf:
    """One tensor of the joined output: the cards' tensors it is made of, and how."""

    positions: tuple[int, ...]
    parts: tuple[Tensor, ...]
    join: Join | None
    """None for a tensor that one card alone has."""

    def joined(self, device: torch.device) -> Tensor:
        """The whole on `device`, in memory of its own."""
        if self.join is None:
            return self.parts[0].detach().to(device, copy=True, non_blocking=True)
        return self.join.join([part.detach().to(device, non_blocking=True) for part in self.parts])

    def rows(self) -> Rows | None:
        """Where the parts lie in the whole, if they lie end to end."""
        if not isinstance(self.join, Concatenated):
            return None
        return Rows(self.join.dim % self.parts[0].dim(), self.join.lengths, self.positions)

    def left_spread(self, home: Home, lent: bool) -> Tensor | None:
        """The whole as a tensor whose parts stay where they are; None where it is joined at once.

        Args:
            lent: the parts' memory is used again by the next call.
        """
        rows = self.rows()
        first = self.parts[0]
        if rows is None or first.layout is not torch.strided or any(part.dtype != first.dtype for part in self.parts):
            return None
        if first.numel() // max(rows.lengths[0], 1) * rows.total * first.element_size() < home.least:
            return None
        if any(
            part.device != home.devices[position] for part, position in zip(self.parts, self.positions, strict=True)
        ):
            return None  # forward has moved it elsewhere, to the host say
        kept = [part.detach() if _is_fresh(part) and not lent else part.detach().clone() for part in self.parts]
        return SpreadTensor(Held.of_parts(home, rows, kept))

    def gradient(self, whole: Tensor, index: int) -> Tensor:
        """Part `index` of the whole's gradient."""
        if isinstance(whole, SpreadTensor):  # made to lie as the parts do by `accept`
            return whole.held.parts[index]
        return self.join.gradient(whole, index) if self.join is not None else whole

    def accept(self, gradient: Tensor | None) -> Tensor | None:
        """The whole's gradient as `gradient` takes it: spread as the parts are, or whole."""
        if isinstance(gradient, SpreadTensor):
            held = gradient.held
            if not held.spread or held.rows != self.rows():
                return held.read()
        return gradient


def _is_fresh(part: Tensor) -> bool:
    """Whether a card's output is the result of an operation, in memory that nothing else writes."""
    base = part._base
    return part.grad_fn is not None and part._version == 0 and (base is None or base.grad_fn is not None)
