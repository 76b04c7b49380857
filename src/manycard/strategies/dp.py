"""Strategy ``dp``: data parallel in one process, on the engine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.batches.batch import move
from manycard.engine.data_parallel import DataParallel
from manycard.engine.driving.random import CardGenerators
from manycard.engine.engine import Engine
from manycard.engine.graphs import Graphs
from manycard.engine.replicas.compiling import compile_calls
from manycard.engine.replicas.sync_batchnorm import convert_batchnorm
from manycard.engine.steps.loss import ShardLoss
from manycard.engine.steps.loss_check import check_mean_loss
from manycard.errors import OptimizerError, SettingError
from manycard.hangs import PULSE
from manycard.precision import Precision
from manycard.strategies.strategy import (
    Count,
    LossFn,
    MetricFn,
    MicroBatch,
    Strategy,
    StrategyOptions,
    Update,
)

__all__ = ["DataParallelStrategy"]


class DataParallelStrategy(Strategy):
    """One process drives all cards; the script runs once and sees whole batches."""

    name = "dp"

    def __init__(self, cards: Sequence[Card], precision: Precision, feed: Feed, options: StrategyOptions) -> None:
        super().__init__(cards, precision, feed, options)
        self.generators = CardGenerators(self.cards)
        self._models: weakref.WeakSet[DataParallel] = weakref.WeakSet()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.options.sync_batchnorm:
            module = convert_batchnorm(module)
        if self.options.compile is not None:
            compile_calls(module, self.options.compile)
        model = self._wrap(module)
        self._prepare_engine(model)
        self._models.add(model)
        return model

    def _wrap(self, module: nn.Module) -> DataParallel:
        return DataParallel(module, self.cards)

    def _prepare_engine(self, model: DataParallel) -> None:
        model.engine.share_generators(self.generators)
        if self.options.reduce_dtype is not None:
            model.engine.reduce_in(self.options.reduce_dtype)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DataParallel) else model

    def narrow(self, model: nn.Module, cards: int) -> None:
        """Run on the first `cards` cards from now on: before the first step, which makes replicas and mirrors."""
        assert isinstance(model, DataParallel), "setup gives a DataParallel"
        self.cards = self.cards[:cards]
        self.generators = CardGenerators(self.cards)
        for each in self._models:
            each.use_cards(self.cards)
            self._prepare_engine(each)

    # ---- the step ------------------------------------------------------------------------------------------

    def start_group(self, model: nn.Module) -> None:
        self.scaling.start_group(model)
        self._engine(model).start_group()

    def make_graphs(self, model: nn.Module, mode: str) -> Graphs | None:
        graphs = None if mode == "off" else self._engine(model).make_graphs(required=mode == "on")
        if mode == "on" and graphs is None:
            raise SettingError("graphs", mode, "simulated cards have no CUDA graphs", fix='take graphs="auto"')
        return graphs

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
        scale = self.scaling.group_scale(model) or 1.0

        def weigh(own: int, samples: int, loss: ShardLoss) -> float:
            first = float(samples if unit is None else unit)
            return scale * (own if loss.count is None else 1) / first

        results, samples = self._engine(model).forward_backward(loss_fn, batch, weigh, self.precision.autocast, graphs)
        if self.watch is not None:
            self.watch.note_losses([value for _, value, _ in results])
        if results[0][2] is None:
            parts = [value * (own / samples) for own, value, _ in results]
            return MicroBatch(_added(parts), samples, samples)
        count = _added([of for _, _, of in results])
        return MicroBatch(_added([value for _, value, _ in results]) / count, samples, count)

    def update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        engine, scale = self._engine(model), self.scaling.group_scale(model)
        for optimizer in optimizers:
            if not engine.mirrors(optimizer):
                engine.add_optimizer(optimizer, shard=self.options.shard_optimizer)
        with self.scaling.own_update():
            updated = engine.update(optimizers, update.factor, update.clip_norm, scale, update.graphs)
        self.scaling.record(updated)
        PULSE.note_cards(self.marks)
        return updated

    def check_loss(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
        if len(self.cards) > 1:
            with self.generators.preserved():
                batch = move(batch, self.device)
                check_mean_loss(loss_fn, self.unwrap(model), batch, self.device, self.precision)

    # ---- evaluation and the rest ---------------------------------------------------------------------------

    def evaluate(self, model: nn.Module, metric_fn: MetricFn, batch: Any) -> list[dict[str, tuple[Any, Any]]]:
        return self._engine(model).evaluate(metric_fn, batch, self.precision.autocast)

    def check_lockstep(self, model: nn.Module) -> None:
        engine = self._engine(model)
        engine.refresh(statistics=False)  # sends parameters that only the script's own steps have moved
        for card in self.cards:
            if not card.simulated:
                torch.cuda.synchronize(card.device)
        engine.replicas.check_lockstep()

    def holdings(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[tuple[Card, list[nn.Module], list[Optimizer], list[Tensor]]]:
        held: list[tuple[Card, list[nn.Module], list[Optimizer], list[Tensor]]] = []
        for card in self.cards:
            parts = [self._engine(model).on_card(card.position, optimizers) for model in models]
            modules = [module for found, _, _ in parts for module in found]
            mirrored = [optimizer for _, found, _ in parts for optimizer in found]
            own = [each for each in optimizers if each not in mirrored] if card is self.cards[0] else []
            held.append((card, modules, [*mirrored, *own], [flat for _, _, flats in parts for flat in flats]))
        return held

    def close(self) -> None:
        for model in self._models:
            model.engine.close()

    def _engine(self, model: nn.Module) -> Engine:
        if isinstance(model, DataParallel):
            return model.engine
        raise OptimizerError(
            f"the model is a {type(model).__name__} that was not set up here",
            fix="pass what parallel.setup(model, optimizer) returned",
        )


def _added(values: list[Any]) -> Any:
    return sum(values[1:], start=values[0])
