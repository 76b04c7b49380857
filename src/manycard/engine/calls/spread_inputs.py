"""Spread tensors as inputs of spread calls: where one is cut as it lies, every card has its part already."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manycard.engine.batches.layout import Piece
from manycard.engine.spread_tensor import Held, SpreadTensor, plain

__all__ = ["piece_of", "spread_gradient"]


def piece_of(tensor: Tensor, piece: Piece | None, *, detach: bool) -> Tensor:
    """A shard's part of one of the script's tensors; of a spread one that is cut alike, the part that is there."""
    if isinstance(tensor, SpreadTensor):
        held = tensor.held
        if held.spread and piece is not None and piece.dim % tensor.dim() == held.rows.dim:
            for index, length in enumerate(held.rows.lengths):
                if (held.rows.start(index), length) == (piece.start, piece.size):
                    return held.parts[index].detach()
        tensor = plain(tensor)
    own = tensor.detach() if detach else tensor
    return own if piece is None else piece.of(own)


def spread_gradient(whole: Tensor, pieces: Sequence[tuple[Piece | None, Tensor | None]]) -> Tensor | None:
    """The gradient of a spread input that was cut as it lies, on the cards where it lies; None where it wasn't.

    Args:
        pieces: for each part that a card took: where it lies in the whole, and its gradient.
    """
    if not isinstance(whole, SpreadTensor) or not whole.held.spread:
        return None
    held = whole.held
    found = {(piece.dim % whole.dim(), piece.start, piece.size): own for piece, own in pieces if piece is not None}
    places = [(held.rows.dim, held.rows.start(index), length) for index, length in enumerate(held.rows.lengths)]
    if len(found) != len(pieces) or sorted(found) != sorted(places):
        return None
    parts = [found[place] for place in places]
    if any(part is None or part.is_sparse for part in parts):
        return None
    devices = [held.home.devices[position] for position in held.rows.positions]
    there = [
        part.to(device, non_blocking=True) for part, device in zip(parts, devices, strict=True) if part is not None
    ]
    return SpreadTensor(Held.of_parts(held.home, held.rows, there))
