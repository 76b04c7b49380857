"""What belongs to the caller's thread and must hold in the card threads as well.

PyTorch keeps much of its state per thread. A card's thread that ran without it would build no graph, compute
in another precision or on another stream. `ThreadContext.capture` reads the caller's state once a call;
`ThreadContext.entered` puts it in force in a card's thread for as long as its job runs.

Followed: gradient and inference mode, autocast and its cache switch, the default device, function and dispatch
modes, default saved-tensor hooks, autograd's threading switch, the current stream of every card, and context
variables. Process-wide flags (default dtype, TF32, deterministic algorithms, anomaly mode, warning filters)
hold in every thread by themselves.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["ThreadContext"]

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadContext:
    """A caller's per-thread state."""

    grad: bool
    inference: bool
    multithreaded_backward: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    saved_tensor_hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    streams: tuple[torch.cuda.Stream, ...]
    primary: torch.device

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> ThreadContext:
        """Read the calling thread's state; `devices` are the cards', the primary's first."""
        cuda = [device for device in devices if device.type == "cuda"]
        kinds = ("cuda", "cpu") if cuda else ("cpu",)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            multithreaded_backward=torch._C._is_multithreading_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            function_modes=tuple(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
            saved_tensor_hooks=torch._C._autograd._top_saved_tensors_default_hooks(False),
            streams=tuple(_special_streams(cuda)),
            primary=devices[0],
        )

    @property
    def shared_modes(self) -> bool:
        """Whether a mode object is active that can't serve two threads at once."""
        return bool(self.dispatch_modes) or any(not isinstance(mode, DeviceContext) for mode in self.function_modes)

    def entered(self, device: torch.device) -> ExitStack:
        """Put this state in force in the calling thread, for work on `device`; leaving the stack undoes it."""
        stack = ExitStack()
        for stream in self.streams:
            stack.enter_context(torch.cuda.stream(stream))
        if device.type == "cuda":  # after the streams, each of which makes its own device the current one
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.inference_mode() if self.inference else torch.set_grad_enabled(self.grad))
        if self.multithreaded_backward != torch._C._is_multithreading_enabled():
            stack.enter_context(torch.autograd.set_multithreading_enabled(self.multithreaded_backward))
        for mode in self.function_modes:
            stack.enter_context(self._mode_on(mode, device))
        for mode in self.dispatch_modes:
            stack.enter_context(mode)
        if self.saved_tensor_hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
        for kind, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
        return stack

    def _mode_on(self, mode: Any, device: torch.device) -> Any:
        """A default device that names the primary means, on another card, that card."""
        if isinstance(mode, DeviceContext) and torch.device(mode.device) == self.primary:
            return DeviceContext(device)
        return mode


def _special_streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
    """The current streams of `devices` that are not their default ones."""
    current = [torch.cuda.current_stream(device) for device in devices]
    return [stream for stream in current if stream != torch.cuda.default_stream(stream.device)]


def in_copied_variables(function: Callable[[], T]) -> Callable[[], T]:
    """`function`, to be run with a copy of the calling thread's context variables."""
    variables = contextvars.copy_context()
    return lambda: variables.run(function)
