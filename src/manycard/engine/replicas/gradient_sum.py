"""Adding up the gradients of one backward pass on the primary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.engine.replicas.collective import Collective
from manycard.engine.replicas.flat import FlatLayout, copy_all

__all__ = ["GradientSum"]


class GradientSum:
    """The gradients of one backward pass, from every card.

    The buffers are made anew each time: what comes out becomes the script's own ``grad`` and stays its own.

    Args:
        cards: the cards, the primary first.
        parameters: the primary's parameters that require gradients.
        collective: how buffers are added up.
    """

    def __init__(self, cards: Sequence[Card], parameters: Sequence[nn.Parameter], collective: Collective) -> None:
        self._cards = tuple(cards)
        self._parameters = parameters
        self._collective = collective
        self._layout = FlatLayout(parameters)
        self._buffers: dict[int, dict[torch.dtype, Tensor]] = {}
        self._found: dict[int, list[Tensor | None]] = {}

    def collect(self, position: int, gradients: list[Tensor | None]) -> None:
        """Take in one card's gradients, in the order of the parameters. Runs in the card's thread."""
        self._found[position] = gradients
        if self._cards[0].simulated:
            return
        buffers = self._layout.allocate(self._cards[position].device)
        views = self._layout.views(buffers)
        dense = {index for index, gradient in enumerate(gradients) if gradient is not None and not gradient.is_sparse}
        groups = {dtype: [i for i in indices if i in dense] for dtype, indices in self._layout.groups.items()}
        filled = [view if gradient is None else gradient for view, gradient in zip(views, gradients, strict=True)]
        with torch.no_grad():
            for index in range(len(views)):
                if index not in dense:
                    views[index].zero_()
            copy_all(views, filled, groups)
        self._buffers[position] = buffers

    def on_primary(self) -> list[Tensor | None]:
        """The sum of each parameter's gradients, on the primary; None for one that no card used."""
        with torch.no_grad():
            return self._added_one_by_one() if self._cards[0].simulated else self._added_flat()

    def _added_one_by_one(self) -> list[Tensor | None]:
        return [self._add(index) for index in range(len(self._parameters))]

    def _add(self, index: int) -> Tensor | None:
        home = self._parameters[index].device
        parts = [found[index] for _, found in sorted(self._found.items())]
        there = [part.to(home) for part in parts if part is not None]
        return sum(there[1:], start=there[0]) if there else None

    def _added_flat(self) -> list[Tensor | None]:
        for position, card in enumerate(self._cards):
            if position not in self._buffers:
                empty = self._layout.allocate(card.device)
                self._buffers[position] = {dtype: buffer.zero_() for dtype, buffer in empty.items()}
        for dtype in self._layout.groups:
            self._collective.reduce([self._buffers[position][dtype] for position in range(len(self._cards))])
        views = self._layout.views(self._buffers[0])
        return [self._chosen(index, view) for index, view in enumerate(views)]

    def _chosen(self, index: int, view: Tensor) -> Tensor | None:
        found = [gradients[index] for gradients in self._found.values() if gradients[index] is not None]
        if not found:
            return None
        return self._add(index) if any(gradient.is_sparse for gradient in found if gradient is not None) else view
