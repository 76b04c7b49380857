"""Calls of a module, cut by a function of the script's and joined by another.

Behaviour of ``model(*args)``:
    * `split` is given what the module is called with: the argument, or the tuple of them where there are several. It
      returns one shard a card of the same kind. Keyword arguments without tensors go to every card.
    * Each card's replica is called with its shard, and `merge` gets a list with one output a card, None where a card
      had no shard, all on the primary. What it returns is the call's output.
    * Both functions run in the script's own autograd graph; between them the call is one node, as every spread call is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.engine.batches.batch import map_tensors, move, tensors_in
from manycard.engine.batches.cutting import SplitCutter
from manycard.engine.batches.joining import Join
from manycard.engine.batches.layout import Layout, TakePiece
from manycard.engine.data_parallel import DataParallel
from manycard.engine.driving.threads import current_place
from manycard.errors import BatchError

__all__ = ["Merge", "SplitCalls"]

Merge = Callable[[list[Any]], Any]
"""``merge(outputs)``, one a card and None where a card had no shard -> the output of the call."""


class SplitCalls(DataParallel):
    """A module whose calls are split and merged by the script.

    Args:
        module: the module; it is moved to the first card.
        cards: the cards, the primary first.
        cutter: cuts what the module is called with.
        merge: makes one output of the cards'.
    """

    def __init__(self, module: nn.Module, cards: Sequence[Card], cutter: SplitCutter, merge: Merge) -> None:
        super().__init__(module, cards)
        self._by_hand = (cutter, merge)

    def _spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._spreader is None or current_place() is not None:
            return self.module(*args, **kwargs)
        if next(tensors_in(kwargs), None) is not None:
            raise BatchError(
                f"the model is called with tensors by keyword ({', '.join(kwargs)}), which split isn't given",
                fix="pass them by position: split gets the tuple of positional arguments",
            )
        cutter, merge = self._by_hand
        with self._spreader.engine.lock:
            cut = cutter.cut(args[0] if len(args) == 1 else args, self.cards)
            active = [card for card, size in enumerate(cut.sizes) if size]
            calls = [(shard,) if len(args) == 1 else tuple(shard or ()) for shard in cut.shards]
            if len(active) > 1:
                taken = [1 if size else 0 for size in cut.sizes]
                found = self._spreader.call((calls,), kwargs, taken, _ByHand())
            else:
                found = [self.module(*move(calls[active[0]], self.cards[0].device), **kwargs)]
            outputs: list[Any] = [None] * len(self.cards)
            for card, output in zip(active, found, strict=True):
                outputs[card] = output
            return merge(outputs)


class _ByHand(Layout):
    """Every card's shard is one sample, whatever it holds, and so is its output."""

    def count(self, batch: Any) -> int:
        return len(batch[0][0])

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        (calls,), kwargs = batch
        return map_tensors(lambda tensor: take(tensor, None), (calls[position], kwargs))

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        raise AssertionError("outputs that are listed by card are not joined")

    def to_join(self, output: Any) -> Any:
        return [output]

    def lists_samples(self, batch: Any, total: int) -> bool:
        return True
