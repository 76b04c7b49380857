"""Calls that may show what no call before could: labels of a new kind, masks that are no longer empty.

A loss inside forward may weigh samples by their classes, or divide by the number of positives. While all labels are
alike it can't be told from a mean over samples. `Novelty` notes which values the tensors of a kind of call have held,
so that the first call with others can be compared with one card. Looking waits for the card.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import tensors_in

__all__ = ["Novelty"]

_LOW, _HIGH = -256, 1024
"""Whole numbers between these are told apart."""
_FEW = 64
"""A tensor with more different numbers in the first call holds no classes, but words or pixels."""
_MOST = 12
"""How often something new is told; after that, new values are the rule."""


class Novelty:
    """The values that one kind of call has held so far."""

    def __init__(self) -> None:
        self._seen: dict[int, Tensor] | None = None
        self._told = 0

    def finds(self, batch: Any) -> bool:
        """Note what a call holds; whether that is of a kind that no call before held. False for the first."""
        if self._told >= _MOST:
            return False
        held = {
            place: _values(tensor)
            for place, tensor in enumerate(tensors_in(batch))
            if tensor.numel() and (self._seen is None or place in self._seen)
        }
        if self._seen is None:
            # Of fractions with zeros and others among them, nothing new can come.
            most = {place: min(_FEW, len(values) - 1) for place, values in held.items()}
            self._seen = {place: values for place, values in held.items() if int(values.sum()) <= most[place]}
            return False
        known = [place for place in held if len(self._seen[place]) == len(held[place])]
        new = [(held[place] & ~self._seen[place].to(held[place].device)).any() for place in known]
        found = bool(torch.stack([each.cpu() if len(new) > 1 else each for each in new]).any()) if new else False
        if found:
            self._told += 1
            for place in known:
                self._seen[place] = self._seen[place].to(held[place].device) | held[place]
        return found


def _values(tensor: Tensor) -> Tensor:
    """Which values a tensor holds: of whole numbers each, of fractions whether there are zeros and others."""
    flat = tensor.detach().flatten()
    if flat.is_floating_point() or flat.is_complex():
        return torch.stack([(flat == 0).any(), (flat != 0).any()])
    held = torch.zeros(_HIGH - _LOW, dtype=torch.bool, device=flat.device)
    held[(flat.long() - _LOW).clamp(0, _HIGH - _LOW - 1)] = True
    return held
