"""One module's calls, spread over the cards: what `DataParallel` and unmodified scripts share.

Behaviour of one call:
    * What the script changed in the module since the last call is brought to the replicas, parameters are sent.
    * The call is cut, run on every card that gets samples, and joined, as one node of the script's graph
      (`SpreadCall`).
    * What forward wrote on the primary stays; several threads of a script are served in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from manycard.cards.card import Card
from manycard.engine.batches.batch import move
from manycard.engine.batches.layout import Layout
from manycard.engine.calls.belonging import GraphCheck
from manycard.engine.calls.boundary import SpreadCall
from manycard.engine.engine import Engine
from manycard.engine.graphs import make_call_graphs
from manycard.engine.spread_tensor import least_bytes

__all__ = ["Spreader"]


class Spreader:
    """Spreads calls of one module.

    Args:
        module: the script's module, already on the primary card.
        cards: the cards, the primary first.
        graphs: ``"auto"`` runs calls as CUDA graphs where it can; ``"on"`` raises where it can't.
        outputs: which outputs stay on the cards that made them: ``"gathered"`` none, ``"auto"`` large ones,
            ``"spread"`` all.
    """

    def __init__(
        self, module: nn.Module, cards: Sequence[Card], graphs: str = "off", outputs: str = "gathered"
    ) -> None:
        self._least = least_bytes(outputs)
        self.graphs = make_call_graphs(cards, graphs)
        self.engine = Engine(module, cards)
        self._check = GraphCheck()

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held around `prepare` and `run`."""
        return self.engine.lock

    @property
    def parts(self) -> int:
        """Into how many shards a call is cut."""
        return len(self.engine.cards)

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout, output: int = 0
    ) -> Any:
        """Call the module with `sizes` samples a card; at least two cards have some.

        Args:
            layout: where the samples are.
            output: position of the card on which outputs are joined.

        Returns:
            The output, joined or left spread, attached to the script's graph where gradients are enabled.
        """
        with self.engine.lock:
            self.prepare(args, kwargs)
            return self.run(args, kwargs, sizes, layout, output)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """Bring the replicas to the module as the script has left it, before `run`.

        Returns:
            The names of the attributes that the script changed since the last call; ``"structure"`` where replicas
            were made, or made anew.
        """
        engine, replicas = self.engine, self.engine.replicas
        engine.threads.finish()
        engine.initialise_lazy(lambda: replicas.module(*move(args, engine.device), **move(kwargs, engine.device)))
        generation = replicas.generation
        changed = replicas.follow()
        replicas.send_parameters()
        replicas.send_buffers(statistics=False)
        if replicas.generation != generation:
            self._check = GraphCheck()
        return changed

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout, output: int = 0
    ) -> Any:
        """As `call`, right after `prepare`; the caller holds the engine's lock around both."""
        value = SpreadCall(
            self.engine, args, kwargs, sizes, layout, output, self._check, self.graphs, self._least
        ).run()
        self.engine.replicas.absorb()
        return value

    def close(self) -> None:
        """End the card threads."""
        self.engine.close()
