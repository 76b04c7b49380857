"""What strategies share in which a process runs one forward and backward pass over all it is given.

`single`, `torch_dp` and `ddp` derive from this. Between processes only sums travel, through `Peers`, so that with
one process everything here is what plain PyTorch would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.engine.batches.batch import count_samples, move
from manycard.engine.driving.spans import span
from manycard.engine.graphs import Graphs
from manycard.engine.replicas.buckets import gradients_of
from manycard.engine.steps.loss import ShardLoss, read_loss
from manycard.errors import BatchError, LossError
from manycard.strategies.strategy import (
    Count,
    LossFn,
    MetricFn,
    MicroBatch,
    Strategy,
    Update,
)

__all__ = ["ProcessStrategy"]


class ProcessStrategy(Strategy):
    """One forward and backward pass a process."""

    def start_group(self, model: nn.Module) -> None:
        self.scaling.start_group(model)
        for parameter in self.unwrap(model).parameters():
            parameter.grad = None

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
        with span("copy", self._name):
            batch = move(batch, self.device)
        held = count_samples(batch)
        if held == 0:
            raise BatchError("the batch has 0 samples", fix="drop empty batches in the loader")
        samples = self.feed.samples(held)
        if unit is None:
            unit = self.peers.total(samples)
        with self._reducing(model, ends_group):
            with span("forward", self._name), self.precision.autocast(self.device):
                loss = read_loss(self._loss(model, loss_fn, batch, samples))
            if not loss.value.requires_grad:
                raise LossError("the loss depends on no parameter", fix="compute it from the model's output")
            scale = self.scaling.group_scale(model) or 1.0
            with span("backward", self._name):
                (self._weighted(loss, samples, unit) * scale).backward()  # type: ignore[no-untyped-call]
        if self.watch is not None:
            self.watch.note_losses([loss.value.detach()])
        return self._whole(loss, samples)

    def _weighted(self, loss: ShardLoss, samples: int, unit: Count) -> Tensor:
        share = samples / unit if loss.count is None else 1.0 / unit
        return loss.value * (share * self.peers.world_size)

    def _whole(self, loss: ShardLoss, samples: int) -> MicroBatch:
        """This micro-batch over all processes."""
        if loss.count is None:
            return MicroBatch(loss.value.detach().clone(), samples, samples)
        return MicroBatch(loss.value.detach() / loss.count, samples, loss.count)

    def update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        with span("update", self._name):
            return self._update(model, optimizers, update)

    @property
    def _name(self) -> str:
        """The card of this process, for a trace."""
        return next((card.name for card in self.cards if card.device == self.device), str(self.device))

    def _update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        parameters = list(self.unwrap(model).parameters())
        if not update.reduced:
            self.peers.average_gradients(parameters)
        gradients = gradients_of(parameters)
        multiplier = update.factor / (self.scaling.group_scale(model) or 1.0)
        if gradients and (isinstance(multiplier, Tensor) or multiplier != 1.0):
            torch._foreach_mul_(gradients, multiplier)
        if not self.scaling.finite(gradients):
            return False
        if update.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, update.clip_norm)
        with self.scaling.own_update():
            for optimizer in optimizers:
                optimizer.step()
        return True

    def evaluate(self, model: nn.Module, metric_fn: MetricFn, batch: Any) -> list[dict[str, tuple[Any, Any]]]:
        batch = move(batch, self.device)
        if self.feed.samples(count_samples(batch)) == 0:
            return []
        with self.precision.autocast(self.device):
            return [metric_fn(self.unwrap(model), batch)]

    # ---- what processes differ in --------------------------------------------------------------------------

    def _loss(self, model: nn.Module, loss_fn: LossFn, batch: Any, samples: int) -> Any:
        return loss_fn(model, batch)

    def _reducing(self, model: nn.Module, ends_group: bool) -> AbstractContextManager[object]:
        """Whether backward inside reduces gradients between processes."""
        return nullcontext()
