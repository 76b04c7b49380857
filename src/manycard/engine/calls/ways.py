"""How one spread call runs on the cards: eager, unless CUDA graphs say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from manycard.engine.calls.boundary import SpreadCall

__all__ = ["Way"]


class Way:
    """Runs every card's forward and backward pass eager."""

    lends = False
    """Whether outputs lie in memory that the next call overwrites."""

    def forward(self, call: SpreadCall) -> list[Any]:
        """Each card's outputs."""
        return call.forward_eager()

    def backward(self, call: SpreadCall, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """Gradients of the call's whole inputs and of the primary's parameters.

        Args:
            gradients: those of the joined outputs.
            keep: another backward pass of the same call may follow.
        """
        return call.backward_eager(gradients, keep=keep)

    def differentiated(self) -> None:
        """The script differentiates the call's backward pass itself."""
