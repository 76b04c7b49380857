"""A copy of a module on another card.

Behaviour:
    * Parameters and buffers are copied to the card; ties between them are kept. Submodules keep their classes,
      so parametrizations, lazy modules and custom ``__getattr__`` work as in the original.
    * Other attributes are copied too, with every tensor in them moved to the card and every reference to a module
      or parameter of the original (in containers, hooks, bound methods, closures and weak references) pointing
      at its copy.
    * Locks and random generators, which can't be copied, are made anew. A compiled module is copied uncompiled
      and compiled anew by its own first call.
    * Anything else that can't be copied is refused, naming the attribute.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import types
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from manycard.engine.replicas.compiling import compile_calls, settings_of
from manycard.errors import ModelError

__all__ = ["ModuleCopier"]

_LOCKS: dict[type, Any] = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class ModuleCopier:
    """Copies one module to one card, and later single attributes of it.

    Args:
        module: the original.
        device: where the copy lives.
        share_parameters: keep the original's parameters in the copy, for a scratch copy on the same card.

    Attributes:
        replica: the copy.

    Raises:
        ModelError: an attribute can't be copied.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, share_parameters: bool = False) -> None:
        self._device = device
        self._memo: dict[int, Any] = {}
        # What the memo maps from must stay alive: an id may be used again otherwise.
        self._originals: list[Any] = []
        for parameter in module.parameters():
            self._remember(parameter, parameter if share_parameters else self._parameter(parameter))
        for buffer in module.buffers():
            self._remember(buffer, self._tensor(buffer))
        for original in module.modules():
            self._remember(original, original.__class__.__new__(original.__class__))
        anchors = dict(self._memo)
        # Compiled wrappers last, the innermost first: making one anew reads the module it wraps.
        innermost_first = list(module.named_modules())[::-1]
        for name, original in sorted(innermost_first, key=lambda part: _is_compiled(part[1])):
            self._fill(original, name)
        self.replica: nn.Module = self._memo[id(module)]
        # Attributes may change in place later, so only modules, parameters and buffers stay known.
        self._anchors, self._memo = anchors, {}

    def copy_of(self, value: Any, path: str) -> Any:
        """A copy of an attribute's value as it is now.

        Raises:
            ModelError: it can't be copied.
        """
        self._memo, kept = dict(self._anchors), len(self._originals)
        try:
            return self.attribute(value, path)
        finally:
            self._memo = {}
            del self._originals[kept:]

    def attribute(self, value: Any, path: str) -> Any:
        """A copy of an attribute's value; `path` names it in errors."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf:
                raise ModelError(
                    f"attribute {path} is a tensor that requires gradients and is no registered parameter, so its"
                    " gradient from other cards would be lost",
                    fix="register it: an nn.Parameter as an attribute of its module, or an nn.ParameterList",
                )
            return self._remember(value, self._tensor(value))
        if type(value) in _LOCKS:
            return self._remember(value, _LOCKS[type(value)]())
        if isinstance(value, torch.Generator):
            return self._remember(value, self._generator(value))
        if type(value) in (dict, OrderedDict):
            made = self._remember(value, type(value)())
            made.update((key, self.attribute(part, f"{path}[{key!r}]")) for key, part in value.items())
            return made
        if type(value) is list:
            made = self._remember(value, [])
            made.extend(self.attribute(part, f"{path}[{index}]") for index, part in enumerate(value))
            return made
        if type(value) in (tuple, set):
            return self._remember(value, type(value)(self.attribute(part, f"{path}[...]") for part in value))
        if callable(value) or isinstance(value, weakref.ref):
            return self._callable(value, path)
        return self._opaque(value, path)

    def _remember(self, original: Any, made: Any) -> Any:
        self._originals.append(original)
        self._memo[id(original)] = made
        return made

    def _fill(self, original: nn.Module, name: str) -> None:
        replica = self._memo[id(original)]
        if _is_compiled(original):
            # Its only own state is the module it wraps; making it anew makes its compiled entry anew.
            type(original).__init__(replica, self._memo[id(original._orig_mod)], original.dynamo_ctx)
            return
        prefix = f"{name}." if name else ""
        state = {key: self.attribute(value, f"{prefix}{key}") for key, value in original.__dict__.items()}
        compiled = state.pop("_compiled_call_impl", None)
        replica.__dict__.update(state)
        if compiled is not None:
            compile_calls(replica, settings_of(compiled))

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if is_lazy(parameter):
            raise ModelError("the module has lazy parameters that no forward pass has initialised")
        data = torch.empty_like(parameter.detach(), device=self._device).copy_(parameter.detach())
        made = nn.Parameter(data, requires_grad=parameter.requires_grad)
        made.__dict__.update({key: value for key, value in parameter.__dict__.items() if not key.startswith("_")})
        return made

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and self._device.type != "cpu":
            return tensor.detach().clone()
        return torch.empty_like(tensor.detach(), device=self._device).copy_(tensor.detach())

    def _generator(self, generator: torch.Generator) -> torch.Generator:
        on_card = generator.device.type == self._device.type and self._device.type != "cpu"
        made = torch.Generator(self._device if on_card else generator.device)
        made.set_state(generator.get_state())
        return made

    def _callable(self, value: Any, path: str) -> Any:
        if isinstance(value, weakref.ref):
            target = value()
            return weakref.ref(self._memo[id(target)]) if id(target) in self._memo else value
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.attribute(value.__self__, path))
        if isinstance(value, functools.partial):
            parts = [self.attribute(part, path) for part in value.args]
            keywords = {key: self.attribute(part, path) for key, part in value.keywords.items()}
            return functools.partial(self.attribute(value.func, path), *parts, **keywords)
        if isinstance(value, types.FunctionType):
            return self._function(value, path)
        if isinstance(value, type | types.BuiltinFunctionType):
            return value
        return self._opaque(value, path)

    def _function(self, function: types.FunctionType, path: str) -> types.FunctionType:
        """`function` itself, or one whose closure holds copies where it holds parts of the original module."""
        cells = function.__closure__ or ()
        held = [cell.cell_contents for cell in cells if _filled(cell)]
        if not any(self._concerns(value) for value in held):
            return function
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(self._cell(cell, path) for cell in cells),
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        return made

    def _concerns(self, value: Any, depth: int = 4) -> bool:
        """Whether `value` leads to a part of the original, through at most `depth` closures."""
        if isinstance(value, types.MethodType):
            return id(value.__self__) in self._memo
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
            return depth > 0 and any(self._concerns(inner, depth - 1) for inner in held)
        return isinstance(value, nn.Module | nn.Parameter) and id(value) in self._memo

    def _cell(self, cell: types.CellType, path: str) -> types.CellType:
        if _filled(cell) and self._concerns(cell.cell_contents):
            return types.CellType(self.attribute(cell.cell_contents, path))
        return cell

    def _opaque(self, value: Any, path: str) -> Any:
        try:
            made = copy.deepcopy(value, self._memo)
        except Exception as error:
            raise ModelError(
                f"attribute {path} ({type(value).__qualname__}) can't be copied to {self._device}: {error}",
                fix="make it outside the module, or give its class a __deepcopy__",
            ) from error
        state = getattr(made, "__dict__", None)
        if isinstance(state, dict) and not isinstance(made, nn.Module | type | types.ModuleType) and made is not value:
            for key, part in state.items():
                if isinstance(part, Tensor) and part.device.type == self._device.type and not part.requires_grad:
                    state[key] = part.to(self._device)
        return made


def _is_compiled(module: nn.Module) -> bool:
    """Whether `module` came from ``torch.compile``; asked without importing its machinery, which takes seconds."""
    machinery = sys.modules.get("torch._dynamo.eval_frame")
    return machinery is not None and isinstance(module, machinery.OptimizedModule)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (the only way to ask)
    except ValueError:
        return False
    return True
