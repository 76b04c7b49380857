"""Strategy ``torch_dp``: ``torch.nn.DataParallel`` as people write it, the baseline to measure against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.driving.random import CardGenerators
from manycard.errors import StrategyError
from manycard.precision import Precision
from manycard.strategies.process import ProcessStrategy
from manycard.strategies.strategy import StrategyOptions

__all__ = ["TorchDataParallel"]


class TorchDataParallel(ProcessStrategy):
    """``nn.DataParallel``: replicas made anew each step, outputs gathered, the loss on the primary."""

    name = "torch_dp"

    def __init__(self, cards: Sequence[Card], precision: Precision, feed: Feed, options: StrategyOptions) -> None:
        super().__init__(cards, precision, feed, options)
        if any(card.simulated for card in cards):
            raise StrategyError(
                "strategy", self.name, "nn.DataParallel needs real GPUs", fix='use strategy="dp", which runs on both'
            )
        if options.sync_batchnorm:
            raise StrategyError(
                "strategy", self.name, "nn.DataParallel can't synchronise BatchNorm", fix='use strategy="dp"'
            )
        if options.compile is not None:
            raise StrategyError(
                "compile", True, "nn.DataParallel makes its replicas anew in each step", fix='use strategy="dp"'
            )
        self.generators = CardGenerators(self.cards)

    def setup_module(self, module: nn.Module) -> nn.Module:
        return nn.DataParallel(module.to(self.device), device_ids=[card.device for card in self.cards])

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, nn.DataParallel) else model
