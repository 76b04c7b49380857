"""How the work of a global batch is spread: one contract, one file a strategy."""

from __future__ import annotations

from collections.abc import Sequence

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.errors import StrategyError
from manycard.precision import Precision
from manycard.strategies.ddp import DistributedStrategy
from manycard.strategies.dp import DataParallelStrategy
from manycard.strategies.manual import ManualStrategy
from manycard.strategies.single import Single
from manycard.strategies.splitting import Splitting
from manycard.strategies.strategy import Strategy, StrategyOptions
from manycard.strategies.torch_dp import TorchDataParallel

__all__ = ["STRATEGIES", "Splitting", "Strategy", "StrategyOptions", "find_strategy", "make_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Single, DataParallelStrategy, TorchDataParallel, DistributedStrategy, ManualStrategy)
}


def find_strategy(name: str) -> type[Strategy]:
    """The strategy called `name`.

    Raises:
        StrategyError: there is none.
    """
    if name not in STRATEGIES:
        raise StrategyError("strategy", name, "there is no such strategy", fix=f"choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def make_strategy(
    name: str, cards: Sequence[Card], precision: Precision, feed: Feed, options: StrategyOptions
) -> Strategy:
    """Make the strategy called `name`.

    Raises:
        StrategyError: there is none, or the cards can't be used this way.
    """
    return find_strategy(name)(cards, precision, feed, options)
