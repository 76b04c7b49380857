"""fp16 loss scaling in loops that the script writes out: unscale once, before clipping; skip what overflowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.engine.buckets import gradients_of
from manycard.precision import LossScale

__all__ = ["ScaledLoop"]


class ScaledLoop:
    """Follows backward passes, clipping and optimizer steps of one run.

    An optimizer step whose gradients hold inf or NaN finds them all None and so leaves parameters and state alone.

    Args:
        scale: the factor on losses.
    """

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale
        self._used = scale.value
        self._unscaled: dict[int, nn.Parameter] = {}
        self._own_update = False
        self._stepped = True
        self.skipped = False
        """Whether the newest optimizer step was skipped."""

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` times the factor."""
        if self._stepped:
            self._used, self._stepped = self._scale.value, False
        self._unscaled.clear()
        return loss * self._used

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide gradients by the factor, those that have not been already."""
        todo = [p for p in parameters if id(p) not in self._unscaled]
        gradients = gradients_of(todo)
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self._used)
        self._unscaled.update((id(parameter), parameter) for parameter in todo)

    def guard(self, optimizer: Optimizer) -> None:
        """Unscale before each of this optimizer's own steps, and make an overflowed one do nothing."""
        optimizer.register_step_pre_hook(self._before_step)

    @contextmanager
    def own_update(self) -> Iterator[None]:
        """Optimizer steps inside have been unscaled and checked by a train step."""
        self._own_update = True
        try:
            yield
        finally:
            self._own_update = False

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._own_update:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.unscale(parameters)
        norms = torch._foreach_norm(found, float("inf")) if (found := gradients_of(parameters)) else ()
        self.skipped = bool(norms) and not bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
        if self.skipped:
            for parameter in parameters:
                parameter.grad = None
        self._scale.record(self.skipped)
        self._stepped = True
