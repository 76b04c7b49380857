"""The gradients of every replica, in buckets that are reduced in one call.

Behaviour:
    * The first micro-batch of a group finds ``grad`` set to None, so that backward hands over fresh gradients
      instead of adding to old ones; `collect` copies them into the card's buckets and makes ``grad`` the view there.
      Later micro-batches of the group add in place.
    * A parameter that no card used keeps ``grad`` None on every card, as on one card, so that optimizers skip it.
      One that only some cards used counts as zero on the others.
    * Sparse gradients stay outside the buckets and are added one by one.

One copy of the gradients costs less memory traffic than adding into zeroed views would: backward writes each
gradient once, where adding reads and writes both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.engine.replicas.collective import Collective
from manycard.engine.replicas.flat import FlatLayout, copy_all
from manycard.errors import ModelError

__all__ = ["Buckets"]


class Buckets:
    """Gradient buckets for one set of replicas.

    Args:
        parameters: each card's parameters that require gradients, in the same order.
        cards: the cards, the primary first.
        collective: how buckets are added up.
    """

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], cards: Sequence[Card], collective: Collective
    ) -> None:
        self._parameters = parameters
        self._collective = collective
        self._layout = FlatLayout(parameters[0])
        self._flats = [self._layout.allocate(card.device) for card in cards]
        self._views = [self._layout.views(flats) for flats in self._flats]

        self._held: set[int] = set()
        """Parameters whose gradient on the primary is in its buckets."""
        self._attached = False
        """Whether `attach` has seen to every card's gradients since a backward pass last did."""
        self.sparse = False
        """Whether a gradient of this group is sparse."""

    def forget(self) -> None:
        """A new group begins: gradients are None on every card."""
        self._held = set()
        self._attached = self.sparse = False

    @property
    def flats(self) -> list[dict[torch.dtype, Tensor]]:
        """Each card's buckets, by dtype: [n]."""
        return self._flats

    def used(self, position: int) -> frozenset[int]:
        """The parameters whose gradient on a card is in its buckets, by index."""
        pairs = zip(self._parameters[position], self._views[position], strict=True)
        return frozenset(index for index, (parameter, view) in enumerate(pairs) if parameter.grad is view)

    @property
    def held(self) -> frozenset[int]:
        """The parameters that have gradients in the primary's buckets, by index."""
        return frozenset(self._held)

    def views_of(self, position: int, used: frozenset[int]) -> list[Tensor]:
        """These parameters' places in a card's buckets."""
        return [self._views[position][index] for index in sorted(used)]

    def attach(self, used: frozenset[int]) -> None:
        """Let every card's gradients be what its buckets hold, which a replay has written; None where not in `used`."""
        last = max(used)
        if self._attached and self._held == used and self._parameters[0][last].grad is self._views[0][last]:
            return
        for parameters, views in zip(self._parameters, self._views, strict=True):
            for index, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
                parameter.grad = view if index in used else None
        self._held = set(used)
        self._attached = True

    def detach(self) -> None:
        """Let every card's gradients be None."""
        self.forget()
        for parameters in self._parameters:
            for parameter in parameters:
                parameter.grad = None

    def check_kept(self) -> None:
        """Check that the primary's gradients of earlier micro-batches are still there.

        Raises:
            ModelError: the script has dropped them, and could not drop the other cards'.
        """
        if any(self._parameters[0][index].grad is None for index in self._held):
            raise ModelError(
                "gradients were set to None between the micro-batches of a group, on the primary card only",
                fix="leave optimizer.zero_grad() out: a train step drops gradients when a group begins",
            )

    def collect(self, position: int) -> None:
        """Move what one backward pass left on a card into its buckets. Runs in the card's thread."""
        self._attached = False
        views, parameters = self._views[position], self._parameters[position]
        fresh = {
            index
            for index, parameter in enumerate(parameters)
            if parameter.grad is not None and parameter.grad is not views[index] and not parameter.grad.is_sparse
        }
        groups = {dtype: [i for i in indices if i in fresh] for dtype, indices in self._layout.groups.items()}
        self.sparse = self.sparse or any(p.grad is not None and p.grad.is_sparse for p in parameters)
        gradients = [parameter.grad if parameter.grad is not None else parameter for parameter in parameters]
        with torch.no_grad():
            copy_all(views, gradients, groups)
        for index in fresh:
            parameters[index].grad = views[index]
        if position == 0:
            self._held |= fresh

    def reduce(self) -> None:
        """Put the sum over cards into every card's gradients."""
        if len(self._parameters) == 1:
            return
        if not self._attached:
            self._fill_in()
        for dtype in self._layout.groups:
            self._collective.all_reduce([flats[dtype] for flats in self._flats])

    def _fill_in(self) -> None:
        """Add up what is outside the buckets, and let what only some cards used count as zero on the others."""
        sparse = self._reduce_sparse()
        used = [
            index
            for index in range(len(self._parameters[0]))
            if index not in sparse and any(parameters[index].grad is not None for parameters in self._parameters)
        ]
        self._held = set(used)
        for parameters, views in zip(self._parameters, self._views, strict=True):
            missing = [index for index in used if parameters[index].grad is None]
            for index in missing:
                parameters[index].grad = views[index].zero_()

    def _reduce_sparse(self) -> set[int]:
        """Add up the sparse gradients; returns the indices of their parameters."""
        found = {
            index
            for parameters in self._parameters
            for index, parameter in enumerate(parameters)
            if parameter.grad is not None and parameter.grad.is_sparse
        }
        for index in found:
            holders = [parameters[index] for parameters in self._parameters]
            home = holders[0].device
            parts = [holder.grad.to(home) for holder in holders if holder.grad is not None]
            total = sum(parts[1:], start=parts[0]).coalesce()
            for holder in holders:
                holder.grad = total.to(holder.device).clone()
        return found


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients there are, sparse ones as the tensor of their values."""
    return [
        parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
        for parameter in parameters
        if parameter.grad is not None and parameter.numel() > 0
    ]
