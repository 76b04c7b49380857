"""`TrainStep`: forward, backward, reduce and update on global batches, the same for every strategy.

One call takes one micro-batch; every `accumulate` calls update once. The last batch of an epoch ends its group even
if that is incomplete, and the update has the group's true weight (see `manycard.strategies.strategy`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.errors import OptimizerError
from manycard.hangs import PULSE
from manycard.strategies.card_memory import make_card_memory
from manycard.strategies.in_parts import InParts
from manycard.strategies.strategy import Count, LossFn, MicroBatch, Strategy, Update

__all__ = ["TrainStep", "TrainStepSettings"]


@dataclass(frozen=True)
class TrainStepSettings:
    """How a train step updates."""

    accumulate: int = 1
    """Micro-batches for one update: calls of the step, each of which may be computed in parts."""
    clip_norm: float | None = None
    """Largest 2-norm of all gradients together; None leaves them as they are."""
    check_loss: bool = True
    """Check on the first batch that the loss is a mean over samples; costs a few forward passes, once."""
    per_card_batch: int | str | None = None
    """The most samples that a card computes at once, ``"auto"`` for as many as fit, None for a whole batch."""
    graphs: str = "auto"
    """``"auto"``: CUDA graphs where they can be made; ``"on"``: an error where they can't; ``"off"``: none."""


class TrainStep:
    """Call it with each global batch; it returns the loss.

    Args:
        strategy: how the work is spread.
        loss_fn: ``loss_fn(model, batch)`` -> mean loss, or ``(sum, count)``.
        model: what `Parallel.setup` returned.
        optimizers: all of them are updated.
        scheduler: its ``step`` is called after every update that was not skipped.
        settings: how it updates.

    Example:
        ``loss = step(batch)``
    """

    def __init__(
        self,
        strategy: Strategy,
        loss_fn: LossFn,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scheduler: Any,
        settings: TrainStepSettings,
    ) -> None:
        self._strategy = strategy
        self._given_loss = self._loss_fn = loss_fn
        self._model = model
        self._optimizers = list(optimizers)
        self._scheduler = scheduler
        self._settings = settings
        self._graphs = strategy.make_graphs(model, settings.graphs)
        self._checked = not settings.check_loss
        self._calls = 0
        """Batches in the open group."""
        self._group: list[MicroBatch] = []
        """Its parts: a batch that isn't cut is one."""
        self._unit: Count | None = None
        self._in_parts = self._make_parts()
        self.updated = False
        """Whether the newest call updated the parameters; False inside a group, and when fp16 overflowed."""

    def _make_parts(self) -> InParts | None:
        wanted, strategy = self._settings.per_card_batch, self._strategy
        if wanted is None:
            return None
        own = [card for card in strategy.cards if card.device == strategy.device or not strategy.ranks]
        memory = make_card_memory(own)
        if wanted == "auto":
            # Trials and steps are counted alike.
            self._loss_fn = memory.watched(self._given_loss)
        return InParts(strategy, self._model, None if wanted == "auto" else int(wanted), memory)

    @property
    def per_card_batch(self) -> int | None:
        """The most samples that a card computes at once; None where that is not limited, or not yet known."""
        return None if self._in_parts is None else self._in_parts.per_card

    @property
    def parts(self) -> int:
        """Into how many parts the newest batch was cut."""
        return 1 if self._in_parts is None else self._in_parts.parts

    @property
    def pending(self) -> int:
        """Micro-batches that wait for their update."""
        return self._calls

    def __call__(self, batch: Any) -> Tensor:
        """Run one micro-batch.

        Args:
            batch: a global batch, on the host or on the primary card.

        Returns:
            The mean loss over the global batch: a fresh 0-dim tensor on the primary card. Reading its value is what
            waits for the card, not this call.

        Raises:
            LossError: the loss is no mean over samples, or no loss at all.
            BatchError: the batch can't be cut.
        """
        with self._strategy.lock, PULSE.busy("step"):
            loss = self._run(batch)
        PULSE.stepped(self)
        return loss

    def _run(self, batch: Any) -> Tensor:
        self.updated = False
        last = self._strategy.feed.ends_epoch(self._strategy.count_samples(batch))
        ends_group = self._calls + 1 >= self._settings.accumulate or last
        try:
            if not self._checked:
                self._strategy.check_loss(self._model, self._loss_fn, batch)
                self._checked = True
            loss = self._forward_backward(batch, ends_group=ends_group)
            if ends_group:
                self._calls = 0
                self._update(reduced=self._in_parts is None or not self._in_parts.reduces_after)
        except BaseException:
            self._calls = 0
            self._drop_group()
            raise
        return loss

    def _forward_backward(self, batch: Any, *, ends_group: bool) -> Tensor:
        """Add one batch to the group, in parts where it must be; its mean loss."""
        first, self._calls = not self._calls, self._calls + 1
        if self._in_parts is None:
            return self._run_part(batch, ends_group).loss
        if first:
            graphs, self._graphs = self._graphs, None  # trials leave no recording behind
            try:
                self._in_parts.find(batch, self._run_part, self._drop_group, self._optimizers)
            finally:
                self._graphs = graphs
        whole = self._in_parts.run(batch, self._run_part, self._drop_group, first=first, ends_group=ends_group)
        return whole.loss

    def _run_part(self, batch: Any, ends_group: bool) -> MicroBatch:
        if not self._group:
            self._open_group()
        part = self._strategy.forward_backward(
            self._model, self._loss_fn, batch, self._unit, ends_group=ends_group, graphs=self._graphs
        )
        self._group.append(part)
        self._unit = self._group[0].samples
        return part

    def _open_group(self) -> None:
        other = self._strategy.open_steps.get(self._model)
        pending = 0 if other is None or other() is None or other() is self else other().pending
        if pending:
            raise OptimizerError(
                f"another train step of this model has {pending} micro-batches that wait for their update",
                fix="finish its group first, or give the model one train step",
            )
        self._strategy.open_steps[self._model] = weakref.ref(self)
        self._strategy.start_group(self._model)

    def flush(self) -> bool:
        """Update with what an incomplete group holds, for loops whose loader doesn't tell the epoch's end.

        Returns:
            Whether there was anything to update with.
        """
        if not self._group:
            return False
        self._calls = 0
        self._update(reduced=False)
        return True

    def _update(self, *, reduced: bool) -> None:
        group = self._group
        factor: Count = 1.0
        if len(group) > 1 or group[0].count is not group[0].samples:
            total = sum((part.count for part in group[1:]), group[0].count)
            factor = group[0].samples / total
        self._group, self._unit = [], None
        update = Update(factor, self._settings.clip_norm, reduced, self._graphs)
        watch = self._strategy.watch
        with nullcontext() if watch is None else watch.updating():
            self.updated = self._strategy.update(self._model, self._optimizers, update)
        if self.updated and self._scheduler is not None:
            self._scheduler.step()
        if self.updated and watch is not None:
            watch.updated(self._model)

    def _drop_group(self) -> None:
        self._group, self._unit = [], None
