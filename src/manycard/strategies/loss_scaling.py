"""fp16 loss scaling over groups and loops: a base that scales nothing, and what unscales once and skips overflows.

Behaviour:
    * A train step's group has one scale from its first micro-batch to its update, whatever other models' updates do
      to the scale meanwhile.
    * In a loop that the script writes out, gradients are unscaled once: before clipping, or before the step.
    * An optimizer step whose gradients hold inf or NaN finds them all None and so leaves parameters and state alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.engine.replicas.buckets import gradients_of
from manycard.precision import LossScale

__all__ = ["Fp16Scaling", "LossScaling", "make_loss_scaling"]


class LossScaling:
    """The base: losses and gradients are what they are."""

    skipped = False
    """Whether the newest optimizer step of an explicit loop was skipped."""

    # ---- the groups of a train step ------------------------------------------------------------------------

    def start_group(self, model: nn.Module) -> None:
        """A group of micro-batches begins: fix its scale."""

    def group_scale(self, model: nn.Module) -> float | None:
        """The scale of the model's group; None where nothing is scaled."""
        return None

    def finite(self, gradients: Sequence[Tensor]) -> bool:
        """Whether an update may use these gradients, unscaled; what was found moves the scale."""
        return True

    def record(self, updated: bool) -> None:
        """Move the scale by what an update found that looked at the gradients itself."""

    def own_update(self) -> AbstractContextManager[object]:
        """Optimizer steps inside have been unscaled and checked by a train step."""
        return nullcontext()

    # ---- the explicit loop ---------------------------------------------------------------------------------

    def guard(self, optimizer: Optimizer) -> None:
        """Unscale before each of this optimizer's own steps, and make an overflowed one do nothing."""

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` times the scale."""
        return loss

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide gradients by the scale, those that have not been already."""


class Fp16Scaling(LossScaling):
    """Follows groups, backward passes, clipping and optimizer steps of one run.

    Args:
        scale: the factor on losses, one for all models.
    """

    def __init__(self, scale: LossScale) -> None:
        self.skipped = False
        self._scale = scale
        self._groups: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
        self._used = scale.value
        self._unscaled: dict[int, nn.Parameter] = {}
        self._own_update = False
        self._stepped = True

    def start_group(self, model: nn.Module) -> None:
        self._groups[model] = self._scale.value

    def group_scale(self, model: nn.Module) -> float | None:
        return self._groups.get(model)

    def finite(self, gradients: Sequence[Tensor]) -> bool:
        norms = torch._foreach_norm(list(gradients), float("inf")) if gradients else ()
        finite = not norms or bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
        self.record(finite)
        return finite

    def record(self, updated: bool) -> None:
        self._scale.record(not updated)

    @contextmanager
    def own_update(self) -> Iterator[None]:
        self._own_update = True
        try:
            yield
        finally:
            self._own_update = False

    def guard(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before_step)

    def scaled(self, loss: Tensor) -> Tensor:
        if self._stepped:
            self._used, self._stepped = self._scale.value, False
        self._unscaled.clear()
        return loss * self._used

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        todo = [p for p in parameters if id(p) not in self._unscaled]
        gradients = gradients_of(todo)
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self._used)
        self._unscaled.update((id(parameter), parameter) for parameter in todo)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._own_update:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.unscale(parameters)
        self.skipped = not self.finite(gradients_of(parameters))
        if self.skipped:
            for parameter in parameters:
                parameter.grad = None
        self._stepped = True


def make_loss_scaling(scale: LossScale | None) -> LossScaling:
    """What a run needs whose precision has this scale, or none."""
    return LossScaling() if scale is None else Fp16Scaling(scale)
