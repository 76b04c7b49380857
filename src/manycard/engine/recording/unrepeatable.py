"""Finding what a CUDA graph can't repeat, in the words of the script.

A graph repeats the card's work and nothing that Python does. So these keep a pass eager: waiting for a value of the
card (``.item()``, ``if tensor``, a copy to the host), hooks, draws from ``random``, NumPy or PyTorch's CPU generator,
attributes and buffers that forward replaces, gradients that are sparse, cards that talk to each other in forward.
"""

from __future__ import annotations

import linecache
import random
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from manycard.engine.replicas.sync_batchnorm import SyncedBatchNorm

__all__ = ["Looking", "describe_error", "sparse_gradient", "unrepeatable_part"]

_WAITS = "called a synchronizing CUDA operation"
_NOT_IN_CAPTURE = "operation not permitted when stream is capturing"
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def unrepeatable_part(module: nn.Module) -> str:
    """The first part of a module that a graph can't repeat, as a reason; empty where there is none."""
    for name, part in module.named_modules():
        if isinstance(part, SyncedBatchNorm) and part.training:
            return "synchronised BatchNorm lets cards wait for each other in forward"
        for table in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            for hook in table.values():
                # Those of torch.nn.utils compute a weight, on the card.
                if not getattr(hook, "__module__", type(hook).__module__).startswith("torch.nn.utils"):
                    return f"a hook of {name or type(part).__name__} would not run"
    return ""


def sparse_gradient(module: nn.Module) -> str:
    """The first parameter with a sparse gradient, as a reason; empty where there is none."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            return f"the gradient of {name} is sparse"
    return ""


class Looking:
    """Watches one eager pass on all cards; `reason` says afterwards what in it can't be repeated, if anything.

    Args:
        module: the primary's module.
        device: the primary.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.reason = ""
        self._module = module
        self._cuda = device.type == "cuda"
        self._catching = warnings.catch_warnings(record=True)
        self._caught: list[warnings.WarningMessage] = []

    def __enter__(self) -> None:
        self._draws = _host_draws()
        self._buffers = self._held_buffers()
        self._caught = self._catching.__enter__() or []
        warnings.simplefilter("always")
        if self._cuda:
            self._mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self._cuda:
            torch.cuda.set_sync_debug_mode(self._mode)
        self._catching.__exit__(kind, error, trace)
        waits = [warning for warning in self._caught if _WAITS in str(warning.message)]
        for other in self._caught:
            if other not in waits:
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        if error is None:
            self.reason = self._find(waits)

    def _find(self, waits: Iterable[warnings.WarningMessage]) -> str:
        for wait in waits:
            return f"{_line(wait.filename, wait.lineno)} waits for the card"
        if _host_draws() != self._draws:
            return "forward or the loss draws at random on the host"
        replaced = [name for name, held in self._held_buffers().items() if held is not self._buffers.get(name)]
        return f"forward replaces buffer {replaced[0]}" if replaced else ""

    def _held_buffers(self) -> dict[str, Any]:
        return dict(self._module.named_buffers())


def describe_error(error: BaseException) -> str:
    """An error that a recording raised, as a reason that names the script's line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    where = _line(frames[-1].filename, frames[-1].lineno or 0) if frames else ""
    if where and _NOT_IN_CAPTURE in lines[0]:
        return f"{where} waits for the card"
    return f"{where + ': ' if where else ''}{type(error).__name__}: {lines[0]}"


def _line(filename: str, number: int) -> str:
    text = linecache.getline(filename, number).strip()
    return f"{Path(filename).name}:{number}" + (f" ({text})" if text else "")


def _host_draws() -> Any:
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy["pos"], numpy["key"].tobytes(), torch.get_rng_state().numpy().tobytes()
