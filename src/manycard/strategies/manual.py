"""Strategy ``manual``: as ``dp``, with shares of each batch that the script decides, or that timing finds.

Behaviour:
    * With `weights`, each card gets whole samples of each batch by weight; with `split`, what that function gives it.
      Gradients are weighted by samples (or counts), so that they are one card's whatever the shares.
    * With ``weights="auto"``, which it is by itself, shares follow the cards' times and memory (`AutoWeights`).
    * What forward writes is the primary's, as in ``dp``. A step in which `split` gives the primary nothing leaves it
      as it is, which is said once where the module has buffers.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.batches.batch import count_samples
from manycard.engine.batches.cutting import Cutter, SplitCutter, WeightedCutter
from manycard.engine.data_parallel import DataParallel
from manycard.engine.driving.threads import card_of
from manycard.engine.engine import Engine
from manycard.engine.graphs import Graphs
from manycard.engine.split_calls import SplitCalls
from manycard.engine.steps.loss_check import check_split_loss
from manycard.errors import BatchError, LossError, SettingError
from manycard.precision import Precision
from manycard.strategies.auto_weights import AutoWeights
from manycard.strategies.dp import DataParallelStrategy
from manycard.strategies.strategy import Count, LossFn, MicroBatch, StrategyOptions, Update

__all__ = ["ManualStrategy"]

_CALLS_BEFORE_SAYING = 8
"""Backward passes of a loop written out before it is said that nothing is timed there."""
_UNCOUNTED = -1


class ManualStrategy(DataParallelStrategy):
    """One process drives all cards; the script decides what each card gets of a batch."""

    name = "manual"

    def __init__(self, cards: Sequence[Card], precision: Precision, feed: Feed, options: StrategyOptions) -> None:
        self._splitting = options.splitting
        self._splitting.check_fits(len(cards))
        if self._splitting.auto and options.sync_batchnorm and len(cards) > 1:
            raise SettingError(
                "sync_batchnorm",
                True,
                'with weights="auto", cards that wait for one another in every layer can\'t be timed apart',
                fix="give the weights as numbers, or leave sync_batchnorm out",
            )
        super().__init__(cards, precision, feed, options)
        self._auto: weakref.WeakKeyDictionary[nn.Module, AutoWeights] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()
        self._own_backwards = 0

    # ---- set-up --------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        model = super().setup_module(module)
        engine, weights = self._engine(model), self._splitting.numbers
        if self._splitting.split is not None:
            engine.cutter = SplitCutter(self._splitting.split, check=self._splitting.check_split)
        elif weights is not None:
            engine.cutter = WeightedCutter(weights)
        elif len(self.cards) > 1:
            self._auto[model] = AutoWeights(engine)
        return model

    def _wrap(self, module: nn.Module) -> DataParallel:
        splitting = self._splitting
        if splitting.split is None or splitting.merge is None:
            return super()._wrap(module)
        return SplitCalls(
            module, self.cards, SplitCutter(splitting.split, check=splitting.check_split), splitting.merge
        )

    def shares(self, model: nn.Module) -> tuple[float, ...] | None:
        cutter = self._engine(model).cutter
        if not isinstance(cutter, WeightedCutter):
            return None
        return tuple(weight / sum(cutter.weights) for weight in cutter.weights)

    # ---- the step ------------------------------------------------------------------------------------------

    def count_samples(self, batch: Any) -> int:
        if self._splitting.split is None:
            return super().count_samples(batch)
        try:
            return count_samples(batch)
        except BatchError:
            return _UNCOUNTED

    def forward_backward(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        unit: Count | None,
        *,
        ends_group: bool,
        graphs: Graphs | None = None,
    ) -> MicroBatch:
        engine = self._engine(model)
        if self._splitting.split is not None:
            loss_fn = partial(_weighable, engine.cutter, loss_fn)
        auto = self._auto.get(model) if unit is None else None
        if auto is not None:
            auto.begin(self, model)
        part = None
        while part is None:
            try:
                part = super().forward_backward(model, loss_fn, batch, unit, ends_group=ends_group, graphs=graphs)
            except torch.OutOfMemoryError as error:
                # Tried again outside this block: until its end the error keeps what the card holds.
                if auto is None or not auto.give_less(card_of(error)):
                    raise
            if part is None and auto is not None:
                self.start_group(model)
                auto.begin_again()
        self._note_sizes(model, engine, graphs)
        return part

    def update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        updated = super().update(model, optimizers, update)
        slow = self._auto[model].balance() if model in self._auto else None
        if slow is not None:
            self._say_once(
                "slow",
                f"{self.cards[slow]} takes longer for a single sample than the other cards for all others; steps would"
                " be shorter without it: leave it out of cards=",
            )
        return updated

    def check_loss(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
        if self._splitting.split is None:
            super().check_loss(model, loss_fn, batch)
        elif len(self.cards) > 1:
            with self.generators.preserved():
                cut = self._engine(model).cutter.cut(batch, self.cards)
                check_split_loss(loss_fn, self.unwrap(model), batch, cut, self.device, self.precision)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self._own_backwards += 1
        untimed = self._auto and not any(each.steps for each in self._auto.values())
        if self._own_backwards == _CALLS_BEFORE_SAYING and untimed:
            warnings.warn(
                'weights="auto" times the cards in train steps; in a loop written out shares stay equal: use'
                " parallel.train_step, or give the weights as numbers",
                stacklevel=3,
            )

    def _note_sizes(self, model: nn.Module, engine: Engine, graphs: Graphs | None) -> None:
        """Take note of what each card got, and say once what follows from a card that got nothing."""
        sizes = engine.cutter.sizes
        if model in self._auto:
            self._auto[model].note_batch(sum(sizes))
        if not sizes[0] and next(self.unwrap(model).buffers(), None) is not None:
            self._say_once(
                "primary",
                "split gave the primary card nothing, so what forward writes into buffers (BatchNorm statistics, say)"
                " was not kept in that step; give the primary a part of every batch to keep it",
            )
        if graphs is not None and not all(sizes):
            idle = self.cards[list(sizes).index(0)]
            self._say_once(
                "eager",
                f"{idle} got none of a batch's {sum(sizes)} samples; steps in which a card gets nothing run without"
                " CUDA graphs",
            )

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(text, stacklevel=2)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        return {"weights": self._auto[model].weights} if model in self._auto else {}

    def load_state_dict(self, model: nn.Module, state: dict[str, Any]) -> None:
        weights = state.get("weights")
        if model in self._auto and weights is not None and len(weights) == len(self.cards):
            self._auto[model].start_from(weights)


def _weighable(cutter: Cutter, loss_fn: LossFn, model: Any, batch: Any) -> Any:
    """The loss of a shard, if there is a right weight for it."""
    loss = loss_fn(model, batch)
    if not cutter.counted and isinstance(loss, Tensor):
        raise LossError(
            "loss_fn returns a mean, and the samples of what split returns can't be counted, so it has no right weight",
            fix="return (sum, count), or shards whose tensors have the samples as their first dimension",
        )
    return loss
