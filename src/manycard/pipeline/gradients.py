"""Gradients of a pipeline's replicas: in buckets, one set a stage, summed over the cards that hold that stage.

With one replica there is nothing to sum, and nothing happens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manycard.cards.card import Card
from manycard.engine.replicas.buckets import Buckets
from manycard.engine.replicas.collective import make_collective
from manycard.pipeline.stages import Stages

__all__ = ["ReplicaGradients"]


class ReplicaGradients:
    """The buckets of all stages."""

    def __init__(self) -> None:
        self._buckets: list[Buckets] = []
        self._made_for: Any = None

    def forget(self) -> None:
        """A new group of micro-batches begins."""
        for buckets in self._buckets:
            buckets.forget()

    def collect(self, chains: Sequence[Stages], generation: int) -> None:
        """Put every replica's gradients into its buckets.

        Args:
            chains: the replicas' stages.
            generation: moves when replicas are made anew.
        """
        if len(chains) == 1:
            return
        trained = [parameter.requires_grad for parameter in chains[0].module.parameters()]
        if (generation, trained) != self._made_for:
            self._buckets = [_make_buckets(chains, stage) for stage in range(len(chains[0].cards))]
            self._made_for = generation, trained
        for buckets in self._buckets:
            for replica in range(len(chains)):
                buckets.collect(replica)

    def reduce(self) -> None:
        """Add up the replicas' gradients."""
        for buckets in self._buckets:
            buckets.reduce()


def _make_buckets(chains: Sequence[Stages], stage: int) -> Buckets:
    parameters = [[each for each in chain.parameters_of(stage) if each.requires_grad] for chain in chains]
    cards: list[Card] = [chain.cards[stage] for chain in chains]
    return Buckets(parameters, cards, make_collective(cards))
