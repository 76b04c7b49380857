"""Seeing every outermost call of a module that a script trains.

`Interception` stands in for ``nn.Module.__call__`` while a script runs. A call reaches its `Handler` when

    * it is outermost: not made inside another module's call, in a card's thread, or in a backward pass (where
      checkpoints run forward again);
    * nothing transforms or records it (``torch.func``, tracing, compilation);
    * gradients are enabled and the module has a parameter that requires one, or the handler has seen the module
      trained before: then evaluation reaches it too.

Everything else runs exactly as without.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from manycard.engine.driving.threads import current_place

__all__ = ["Handler", "Interception"]

_depth = threading.local()


class Handler(Protocol):
    """What becomes of an outermost call."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any]
    ) -> Any:
        """Give the call's result; ``plain(*args, **kwargs)`` is the call as it was made."""


class Interception:
    """Hands outermost calls of trained modules to `handler`, while it is entered.

    Args:
        handler: decides what becomes of each call.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._trained: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._restore: list[Callable[[], None]] = []
        self._compiled_kinds: set[type[nn.Module]] = set()
        self.active = True
        """False while calls go their own way."""

    def __enter__(self) -> Interception:
        self._stand_in(nn.Module)
        self._follow_compile()
        return self

    def __exit__(self, *raised: object) -> None:
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()

    def stop(self) -> None:
        """Let every call go its own way from now on."""
        self.active = False

    def _stand_in(self, kind: type[nn.Module]) -> None:
        original = kind.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            if not self.active or getattr(_depth, "value", False):
                return original(module, *args, **kwargs)
            _depth.value = True
            try:
                if self._reaches(module):
                    return self._handler(module, args, kwargs, functools.partial(original, module))
                return original(module, *args, **kwargs)
            finally:
                _depth.value = False

        kind.__call__ = call  # type: ignore[method-assign]
        self._restore.append(functools.partial(setattr, kind, "__call__", original))

    def _follow_compile(self) -> None:
        """Compiled modules have a way of being called of their own; stand in for it once there is one."""
        original = torch.compile

        @functools.wraps(original)
        def compile_and_follow(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            kind: Any = type(made)
            if issubclass(kind, nn.Module) and "__call__" in vars(kind) and kind not in self._compiled_kinds:
                self._compiled_kinds.add(kind)
                self._stand_in(kind)
            return made

        torch.compile = compile_and_follow
        self._restore.append(functools.partial(setattr, torch, "compile", original))

    def _reaches(self, module: nn.Module) -> bool:
        if current_place() is not None or torch._C._current_graph_task_id() != -1:
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
            return False
        if not torch.is_grad_enabled():
            return module in self._trained
        trainable = False
        tensors: Iterator[Tensor] = module.parameters()
        for parameter in tensors:
            if not isinstance(parameter, nn.Parameter):  # functional_call swaps in plain tensors
                return False
            trainable = trainable or parameter.requires_grad
        if trainable:
            self._trained[module] = True
        return trainable
