"""Strategy ``pipeline``: a model in stages over cards, on `manycard.pipeline`. Made by `Pipeline`, not by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.batches.batch import cut, move
from manycard.engine.replicas.buckets import gradients_of
from manycard.engine.replicas.settling import settle
from manycard.engine.steps.loss import ShardLoss, read_loss
from manycard.engine.steps.loss_check import compare_losses
from manycard.errors import OptimizerError
from manycard.hangs import PULSE
from manycard.pipeline import PipelineEngine, PipelineSettings, Timeline
from manycard.pipeline.engine import MicroBatches
from manycard.precision import Precision
from manycard.strategies.strategy import (
    Count,
    LossFn,
    MetricFn,
    MicroBatch,
    Strategy,
    StrategyOptions,
    Update,
    move_state,
)

__all__ = ["PipelineStrategy"]


class PipelineStrategy(Strategy):
    """One process drives all cards; each holds a part of the model.

    Args:
        module: the script's model.
        cards: the stages' cards of the first replica, then of the others.
        settings: how the pipeline is built.
    """

    name = "pipeline"

    def __init__(
        self, module: nn.Module, cards: Sequence[Card], precision: Precision, settings: PipelineSettings
    ) -> None:
        super().__init__(cards, precision, Feed(), StrategyOptions())
        self.engine = PipelineEngine(module, cards, settings)
        self.generators = self.engine.generators
        self.recording = False
        """Whether the next batch is to be recorded."""
        self.timeline: Timeline | None = None
        """Of the newest batch that was recorded."""
        self._optimizers: list[Optimizer] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.engine.module

    def setup_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        if _needs_closure(optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__} calls the loss from inside its step, which a train step can't let it do",
                fix="take an optimizer whose step needs no closure",
            )
        super().setup_optimizer(model, optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def prepare(self, work: Any, batch: Any) -> None:
        """Find the stages and put the model on its cards, the first time."""
        if self.engine.plan is not None:
            return
        copies = max((_state_copies(optimizer) for optimizer in self._optimizers), default=2)
        self.engine.make_plan(self._in_precision(work), batch, 1 + copies)
        self.engine.refresh()
        for optimizer in self._optimizers:
            move_state(optimizer)

    def _in_precision(self, work: Any) -> Any:
        def run(module: nn.Module, part: Any) -> Any:
            with self.precision.autocast(self.device):
                return work(module, part)

        return run

    # ---- the step ------------------------------------------------------------------------------------------

    def start_group(self, model: nn.Module) -> None:
        self.scaling.start_group(model)
        self.engine.start_group()

    def forward_backward(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        unit: Count | None,
        *,
        ends_group: bool,
        graphs: object = None,
    ) -> MicroBatch:
        self.prepare(loss_fn, batch)
        scale = self.scaling.group_scale(model) or 1.0

        def weigh(own: int, samples: int, loss: ShardLoss) -> Any:
            first = samples if unit is None else unit
            return scale * (own if loss.count is None else 1) / first

        work = self._in_precision(loss_fn)
        (sizes, losses), timeline = self.engine.forward_backward(work, batch, weigh, self.recording)
        self.timeline = timeline or self.timeline
        samples = sum(sizes)
        if losses[0].count is None:
            parts = [loss.value * (own / samples) for own, loss in zip(sizes, losses, strict=True)]
            return MicroBatch(_added(parts), samples, samples)
        count = _added([loss.count for loss in losses])
        return MicroBatch(_added([loss.value for loss in losses]) / count, samples, count)

    def update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        self.engine.reduce()
        scale = self.scaling.group_scale(model)
        multiplier = update.factor if scale is None else update.factor / scale
        stages = [gradients_of(parameters) for parameters in self.engine.parameters_by_stage()]
        for gradients in stages:
            if gradients and (isinstance(multiplier, Tensor) or multiplier != 1.0):
                torch._foreach_mul_(gradients, move(multiplier, gradients[0].device))
        if scale is not None:
            finite = all(_all_finite(gradients) for gradients in stages)
            self.scaling.record(finite)
            if not finite:
                return False
        if update.clip_norm is not None:
            _clip(stages, update.clip_norm)
        with self.scaling.own_update():
            for optimizer in optimizers:
                optimizer.step()
        PULSE.note_cards(self.marks)
        return True

    def check_loss(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
        self.prepare(loss_fn, batch)
        if self.engine.settings.micro_batches == self.engine.settings.replicas == 1:
            return  # the loss sees whole batches
        pieces = self.engine.cut(batch)
        samples = min(pieces.samples, 2 * max(max(sizes) for sizes in pieces.sizes))
        if samples < 2:
            return
        smaller = max(1, samples // 3)
        whole = cut(batch, [samples, pieces.samples - samples])[0]
        sizes = [samples, samples, samples - smaller, smaller]
        parts = [whole, whole, *cut(whole, sizes[2:])]

        def loss_of(module: nn.Module, part: Any) -> Any:
            loss = read_loss(loss_fn(module, part))
            return loss.value.detach().double(), loss.count

        with _settled(self.engine.module), self.generators.preserved():
            found = self.engine.run(self._in_precision(loss_of), MicroBatches(samples, [parts], [sizes]))
        pieces_of = [(*loss, size) for loss, size in zip(found[2:], sizes[2:], strict=True)]
        named = f"{sizes[2]} and {sizes[3]}"
        otherwise = "take micro_batches=1 and one replica, which gives the loss whole batches"
        compare_losses(found[0], found[1], pieces_of, named, self.precision, otherwise)

    # ---- evaluation and the rest ---------------------------------------------------------------------------

    def evaluate(self, model: nn.Module, metric_fn: MetricFn, batch: Any) -> list[dict[str, tuple[Any, Any]]]:
        self.prepare(metric_fn, batch)
        return self.engine.run(self._in_precision(metric_fn), self.engine.cut(batch))

    def check_lockstep(self, model: nn.Module) -> None:
        self.engine.check_lockstep()

    def close(self) -> None:
        self.engine.close()


@contextmanager
def _settled(module: nn.Module) -> Iterator[None]:
    """What `settle` does to a scratch copy, done to the module itself and undone at the end."""
    before = [(part, part.training, getattr(part, "dropout", None), dict(part._buffers)) for part in module.modules()]
    try:
        settle(module)
        yield
    finally:
        for part, training, dropout, buffers in before:
            part.training = training
            if isinstance(dropout, float):
                setattr(part, "dropout", dropout)  # noqa: B010 (a Module declares no such attribute)
            part._buffers.update(buffers)


def _added(values: list[Any]) -> Any:
    return sum(values[1:], start=values[0])


def _all_finite(gradients: Sequence[Tensor]) -> bool:
    if not gradients:
        return True
    norms = torch._foreach_norm(list(gradients), float("inf"))
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def _clip(stages: Sequence[Sequence[Tensor]], clip_norm: float) -> None:
    """What ``torch.nn.utils.clip_grad_norm_`` does, with one number a card that travels in place of one a parameter."""
    stages = [gradients for gradients in stages if gradients]
    if not stages:
        return
    own = []
    for gradients in stages:
        norms = torch._foreach_norm(list(gradients))
        own.append(torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms])))
    total = torch.linalg.vector_norm(torch.stack([move(norm, own[0].device) for norm in own]))
    factor = (clip_norm / (total + 1e-6)).clamp(max=1.0)
    for gradients in stages:
        torch._foreach_mul_(list(gradients), move(factor, gradients[0].device))


def _state_copies(optimizer: Optimizer) -> int:
    """About how many copies of a parameter an optimizer's state takes."""
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
