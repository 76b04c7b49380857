"""Compiling the calls of a module with ``torch.compile``, one replica apart from the others.

PyTorch keeps compiled code by Python code object, at most 8 versions of each. Replicas share their class's code, so
on 8 cards, in training and evaluation, with two shapes, most would run uncompiled. Here every module's calls begin in
a code object of their own. Compilation happens in the first call, in the card's thread; PyTorch lets one thread
compile at a time, and later cards find the kernels of the first in its cache on disk.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["compile_calls", "settings_of"]


def compile_calls(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compile what calling `module` runs, in place.

    Args:
        settings: arguments of ``torch.compile``.
    """
    plain: Any = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{id(module):x}")
    own: Any = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    own.settings = dict(settings)
    compiled: Any = torch.compile(own, **settings)
    compiled.settings = own.settings
    module._compiled_call_impl = compiled


def settings_of(compiled: Any) -> Mapping[str, Any]:
    """The settings that a module's compiled calls were made with; PyTorch's own for those not made here."""
    found: Mapping[str, Any] = getattr(compiled, "settings", {})
    return found
