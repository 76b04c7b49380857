"""Comparing what a replay of CUDA graphs gives with what an eager run gives.

A graph repeats what it recorded, whatever changes in Python meanwhile. So replays 1, 2, 8, 64, 512 and every 4096th are
compared with an eager run of the same work, from the same buffers and random states (`Moment`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from manycard.engine.driving.random import CardGenerators

__all__ = ["MOST_NOISE", "TOLERANCE", "Moment", "due", "relative_gap"]

TOLERANCE = 1e-4
"""How far a replay's values may lie from an eager run's, relative, where eager runs give the same each time."""
MOST_NOISE = 2e-2
"""How far at most, where they don't."""
_COMPARED = frozenset({1, 2, 8, 64, 512})
_COMPARED_EVERY = 4096


def due(number: int) -> bool:
    """Whether replay number `number`, from 1, is to be compared."""
    return number in _COMPARED or number % _COMPARED_EVERY == 0


class Moment:
    """What work is about to change: buffers, random states, and tensors that it adds to.

    Args:
        modules: the replicas, whose buffers are kept.
        generators: the cards' random states.
        added_to: further tensors that are kept.
    """

    def __init__(
        self, modules: Iterable[nn.Module], generators: CardGenerators, added_to: Iterable[Tensor] = ()
    ) -> None:
        self._generators = generators
        self._random = generators.state_dict(), torch.get_rng_state()
        tensors = [*(buffer for module in modules for buffer in module.buffers()), *added_to]
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put all of it back. Version counters stay: a graph may have saved a buffer as it is again now."""
        for tensor, kept in self._kept:
            tensor.data.copy_(kept)
        self._generators.load_state_dict(self._random[0])
        torch.set_rng_state(self._random[1])

    def gap(self) -> float:
        """How far the tensors lie from what they were."""
        return max((relative_gap([kept], [tensor]) for tensor, kept in self._kept), default=0.0)


def relative_gap(own: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """The 2-norm of a difference of tensors, taken together, relative to `own`; inf where one is None in one only.

    Where both are inf or NaN they don't differ. What has no fraction is equal, or infinitely far away.
    """
    apart = size = 0.0
    for one, another in zip(own, other, strict=True):
        if one is None or another is None:
            if one is not another:
                return float("inf")
            continue
        one, another = one.detach(), another.detach()
        finite = one.isfinite()
        if not torch.equal(finite, another.isfinite()):
            return float("inf")
        if not (one.is_floating_point() or one.is_complex()):
            if not torch.equal(one, another):
                return float("inf")
            continue
        if not bool(finite.all()):  # filled, not selected: places of numbers take 8 bytes each on a card
            one, another = one.masked_fill(~finite, 0), another.masked_fill(~finite, 0)
        apart += _norm(one - another) ** 2
        size += _norm(one) ** 2
    return float((apart / max(size, 1e-30)) ** 0.5)


def _norm(tensor: Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide))
