"""Comparing cards and ranks now and then while training runs, for ``Parallel(check_every=N)``.

Behaviour:
    * After the first update of a model and then after every N-th, it is compared as `check_lockstep` does, gradients
      included. What must be equal and isn't raises LockstepError, with the last step after which all was equal.
    * What may differ, and NaN on all cards, is warned of once.
    * In between, nothing runs: the losses of the steps since the last comparison are kept, 0-dim each, and read only
      when something is found to be NaN, to name the card and the step where that began.
    * Optimizers of a loop that is written out are followed by a hook; the model counts its first one's steps.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.diagnosis.lockstep.check import LockstepReport, compare, raise_errors

__all__ = ["LockstepWatch"]

_LOSSES_KEPT = 1024


@dataclass
class _Followed:
    steps: int = 0
    equal_after: int | None = None
    said: set[str] = field(default_factory=set)
    optimizer: weakref.ref[Optimizer] | None = None


class LockstepWatch:
    """Compares the models of one run.

    Args:
        every: updates between two comparisons.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._models: weakref.WeakKeyDictionary[nn.Module, _Followed] = weakref.WeakKeyDictionary()
        self._losses: deque[Sequence[Tensor]] = deque(maxlen=min(every + 1, _LOSSES_KEPT))
        self._in_train_step = False

    def follow(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Compare `model` after steps of these optimizers that no train step makes."""
        followed = self._models.setdefault(model, _Followed())
        for optimizer in optimizers:
            if followed.optimizer is None:
                followed.optimizer = weakref.ref(optimizer)
                optimizer.register_step_post_hook(_Hook(self, model))

    # ---- what a strategy tells -----------------------------------------------------------------------------

    def note_losses(self, losses: Sequence[Tensor]) -> None:
        """Keep the losses of one micro-batch, one a card."""
        self._losses.append(list(losses))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Optimizer steps inside are part of a train step's update."""
        self._in_train_step = True
        try:
            yield
        finally:
            self._in_train_step = False

    def updated(self, model: nn.Module) -> None:
        """A train step has updated `model`."""
        self._count(model, updated=True)

    def stepped(self, model: nn.Module) -> None:
        """An optimizer has stepped, in a train step or by itself."""
        if not self._in_train_step:
            self._count(model, updated=False)

    # ---- comparing -----------------------------------------------------------------------------------------

    def _count(self, model: nn.Module, *, updated: bool) -> None:
        followed = self._models.setdefault(model, _Followed())
        followed.steps += 1
        if followed.steps == 1 or followed.steps % self._every == 0:
            self._compare(model, followed, updated)

    def _compare(self, model: nn.Module, followed: _Followed, updated: bool) -> None:
        since = f"after step {followed.steps}"
        if followed.equal_after is not None:
            since += f" and not yet after step {followed.equal_after}"
        report = compare(
            model,
            since=since,
            updated=updated,
            buffers=followed.steps == 1,
            losses=_Lazily(self._losses),
        )
        raise_errors(report)
        followed.equal_after = followed.steps
        self._say(report, followed)
        self._losses.clear()

    def _say(self, report: LockstepReport, followed: _Followed) -> None:
        for finding in report.findings:
            if finding.severity == "warning" and finding.cause not in followed.said:
                followed.said.add(finding.cause)
                warnings.warn(f"{finding.cause} ({finding.evidence}). Fix: {finding.fix}.", stacklevel=2)


class _Hook:
    """What an optimizer calls after a step; it keeps neither the watch nor the model."""

    def __init__(self, watch: LockstepWatch, model: nn.Module) -> None:
        self._watch, self._model = weakref.ref(watch), weakref.ref(model)

    def __call__(self, *_: Any) -> None:
        watch, model = self._watch(), self._model()
        if watch is not None and model is not None:
            watch.stepped(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self


class _Lazily(Sequence[Sequence[bool]]):
    """By card, whether each kept loss was finite; read from the cards only when it is asked for."""

    def __init__(self, losses: Sequence[Sequence[Tensor]]) -> None:
        self._losses = losses

    def __len__(self) -> int:
        return max(map(len, self._losses), default=0)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        kept = [losses[place] for losses in self._losses if place < len(losses)]
        return torch.stack([loss.float() for loss in kept]).isfinite().tolist() if kept else []
