"""One module's calls, spread over the cards: what `DataParallel` and unmodified scripts share.

Behaviour of one call:
    * What the script changed in the module since the last call is brought to the replicas, parameters are sent.
    * The call is cut, run on every card that gets samples, and joined, as one node of the script's graph
      (`SpreadCall`).
    * What forward wrote on the primary stays; several threads of a script are served in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from manycard.cards.card import Card
from manycard.engine.batch import move
from manycard.engine.boundary import SpreadCall
from manycard.engine.engine import Engine
from manycard.engine.graph_check import GraphCheck
from manycard.engine.layout import Layout

__all__ = ["Spreader"]


class Spreader:
    """Spreads calls of one module.

    Args:
        module: the script's module, already on the primary card.
        cards: the cards, the primary first.
    """

    def __init__(self, module: nn.Module, cards: Sequence[Card]) -> None:
        self.engine = Engine(module, cards)
        self._check = GraphCheck()

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout, output: int = 0
    ) -> Any:
        """Call the module with `sizes` samples a card; at least two cards have some.

        Args:
            layout: where the samples are.
            output: position of the card on which outputs are joined.

        Returns:
            The joined output, attached to the script's graph where gradients are enabled.
        """
        engine, replicas = self.engine, self.engine.replicas
        with engine.lock:
            engine.threads.finish()
            engine.initialise_lazy(lambda: replicas.module(*move(args, engine.device), **move(kwargs, engine.device)))
            generation = replicas.generation
            replicas.follow()
            replicas.send_parameters()
            replicas.send_buffers(statistics=False)
            if replicas.generation != generation:
                self._check = GraphCheck()
            value = SpreadCall(engine, args, kwargs, sizes, layout, output, self._check).run()
            replicas.absorb()
            return value

    def close(self) -> None:
        """End the card threads."""
        self.engine.close()
