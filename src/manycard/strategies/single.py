"""Strategy ``single``: one card, the yardstick for every other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.driving.random import CardGenerators
from manycard.engine.replicas.compiling import compile_calls
from manycard.precision import Precision
from manycard.strategies.process import ProcessStrategy
from manycard.strategies.strategy import StrategyOptions

__all__ = ["Single"]


class Single(ProcessStrategy):
    """Everything on the primary card, as plain PyTorch does it."""

    name = "single"

    def __init__(self, cards: Sequence[Card], precision: Precision, feed: Feed, options: StrategyOptions) -> None:
        super().__init__(cards[:1], precision, feed, options)
        self.generators = CardGenerators(self.cards)

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.options.compile is not None:
            compile_calls(module, self.options.compile)
        return module.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model
