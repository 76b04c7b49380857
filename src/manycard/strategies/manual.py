"""Strategy ``manual``: as ``dp``, with shares of each batch that the script decides, or that timing finds.

Behaviour:
    * With `weights`, each card gets whole samples of each batch by weight; with `split`, what that function gives it.
      Gradients are weighted by samples (or counts), so that they are one card's whatever the shares.
    * With ``weights="auto"``, shares start equal. The cards' times in train steps decide on others, within each
      card's free memory, and go on being looked at; each change is said in one line.
    * What forward writes is the primary's, as in ``dp``. A step in which `split` gives the primary nothing leaves it
      as it is, which is said once where the module has buffers.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.balance import Balancer, Change, Patience
from manycard.engine.batch import count_samples
from manycard.engine.card_times import MeasuredTimes
from manycard.engine.cutting import Cutter, SplitCutter, WeightedCutter
from manycard.engine.data_parallel import DataParallel
from manycard.engine.engine import Engine
from manycard.engine.graphs import Graphs
from manycard.engine.loss_check import check_split_loss
from manycard.engine.split_calls import SplitCalls
from manycard.engine.threads import card_of
from manycard.errors import BatchError, LossError, SettingError
from manycard.precision import Precision
from manycard.strategies.before import Before
from manycard.strategies.dp import DataParallelStrategy
from manycard.strategies.splitting import AUTO
from manycard.strategies.strategy import Count, LossFn, MicroBatch, StrategyOptions, Update

__all__ = ["ManualStrategy"]

_CALLS_BEFORE_SAYING = 8
"""Backward passes of a loop written out before it is said that nothing is timed there."""
_UNCOUNTED = -1
_ON_GPUS = Patience(warm_up=8, after_change=4)
"""Steps that record CUDA graphs, or are compared with a replay, take longer."""


@dataclass
class _Balancing:
    """What ``weights="auto"`` holds for one model."""

    cutter: WeightedCutter
    times: MeasuredTimes
    balancer: Balancer
    steps: int = 0
    largest: int = 1
    """Samples of the largest micro-batch so far."""
    before: Before | None = None
    """What a step began with, for one that runs out of memory."""
    before_of: int = 0
    """The generation of replicas that `before` was made for."""

    def most_shares(self) -> list[float]:
        """The largest share of a batch that each card has memory for."""
        return [most / self.largest for most in self.times.most_samples()]


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
        self._balancings: weakref.WeakKeyDictionary[nn.Module, _Balancing] = weakref.WeakKeyDictionary()
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
            balancer = Balancer(len(self.cards), None if self.cards[0].simulated else _ON_GPUS)
            times, cutter = MeasuredTimes(self.cards), WeightedCutter(balancer.weights, everyone=True)
            engine.cutter, engine.times = cutter, times
            self._balancings[model] = _Balancing(cutter, times, balancer)
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
        if unit is None:
            self._note_before(model, engine)
        part = None
        while part is None:
            try:
                part = super().forward_backward(model, loss_fn, batch, unit, ends_group=ends_group, graphs=graphs)
            except torch.OutOfMemoryError as error:
                # Tried again outside this block: until its end the error keeps what the card holds.
                if unit is not None or not self._give_less(model, engine, card_of(error)):
                    raise
            if part is None:
                self._begin_again(model)
        self._note_sizes(model, engine, graphs)
        return part

    def update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        updated = super().update(model, optimizers, update)
        if model in self._balancings:
            self._balance(self._balancings[model])
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
        untimed = self._balancings and not any(each.steps for each in self._balancings.values())
        if self._own_backwards == _CALLS_BEFORE_SAYING and untimed:
            warnings.warn(
                'weights="auto" times the cards in train steps; in a loop written out shares stay equal: use'
                " parallel.train_step, or give the weights as numbers",
                stacklevel=3,
            )

    def _note_sizes(self, model: nn.Module, engine: Engine, graphs: Graphs | None) -> None:
        """Take note of what each card got, and say once what follows from a card that got nothing."""
        sizes = engine.cutter.sizes
        if model in self._balancings:
            balancing = self._balancings[model]
            balancing.largest = max(balancing.largest, sum(sizes))
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

    # ---- weights="auto" ------------------------------------------------------------------------------------

    def _balance(self, balancing: _Balancing) -> None:
        balancing.steps += 1
        for step in balancing.times.finished():
            change = balancing.balancer.note(step, balancing.most_shares)
            if change is not None:
                balancing.cutter.set_weights(change.weights)
                balancing.times.forget()
                print(_describe_change(change, self.cards), file=sys.stderr)
                break
        slow = balancing.balancer.held_up_by
        if slow is not None:
            self._say_once(
                "slow",
                f"{self.cards[slow]} takes longer for a single sample than the other cards for all others; steps would"
                " be shorter without it: leave it out of cards=",
            )
        balancing.times.on = balancing.steps % balancing.balancer.every == 0

    def _give_less(self, model: nn.Module, engine: Engine, card: int | None) -> bool:
        """After a card has run out of memory in the first micro-batch of a group: give it less; whether that can be."""
        balancing, sizes = self._balancings.get(model), engine.cutter.sizes
        if balancing is None or card is None or sizes[card] <= 1 or not balancing.balancer.shrink(card):
            return False
        balancing.cutter.set_weights(balancing.balancer.weights)
        balancing.times.forget()
        why = f"{self.cards[card]} ran out of memory with {sizes[card]} of {sum(sizes)} samples"
        print(f"{_describe(why, balancing.balancer.weights, self.cards)}; the step is taken again", file=sys.stderr)
        return True

    def _note_before(self, model: nn.Module, engine: Engine) -> None:
        balancing = self._balancings.get(model)
        if balancing is None:
            return
        if balancing.before is None or balancing.before_of != engine.replicas.generation:
            balancing.before, balancing.before_of = Before(self, model), engine.replicas.generation
        else:
            balancing.before.note()

    def _begin_again(self, model: nn.Module) -> None:
        """Leave nothing of the failed attempt: gradients, memory, buffers that forward wrote, random draws."""
        self.start_group(model)
        gc.collect()  # the failure's traceback holds what the card had made, and is held by its own frames
        for card in self.cards:
            if not card.simulated:
                with torch.cuda.device(card.device):
                    torch.cuda.empty_cache()
        before = self._balancings[model].before
        assert before is not None, "a step notes what it begins with"
        before.restore()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        balancing = self._balancings.get(model)
        return {} if balancing is None else {"weights": list(balancing.balancer.weights)}

    def load_state_dict(self, model: nn.Module, state: dict[str, Any]) -> None:
        balancing, weights = self._balancings.get(model), state.get("weights")
        if balancing is not None and weights is not None and len(weights) == len(self.cards):
            balancing.balancer.start_from(weights)
            balancing.cutter.set_weights(balancing.balancer.weights)


def _weighable(cutter: Cutter, loss_fn: LossFn, model: Any, batch: Any) -> Any:
    """The loss of a shard, if there is a right weight for it."""
    loss = loss_fn(model, batch)
    if not cutter.counted and isinstance(loss, Tensor):
        raise LossError(
            "loss_fn returns a mean, and the samples of what split returns can't be counted, so it has no right weight",
            fix="return (sum, count), or shards whose tensors have the samples as their first dimension",
        )
    return loss


def _describe_change(change: Change, cards: Sequence[Card]) -> str:
    took = ", ".join(f"{1e3 * seconds:.3g}" for seconds in change.seconds)
    why = "the last shares made steps longer" if change.taken_back else f"a step took {took} ms"
    return f"{_describe(why, change.weights, cards)}, and a step is expected to take {1e3 * change.expected:.3g} ms"


def _describe(why: str, weights: Sequence[float], cards: Sequence[Card]) -> str:
    shares = ", ".join(f"{card} {weight / sum(weights):.1%}" for card, weight in zip(cards, weights, strict=True))
    return f'manycard: weights="{AUTO}": {why}; from now on each batch is cut {shares}'
