"""Which values a checkpoint may hold: those that ``torch.load(weights_only=True)`` gives back.

Behaviour:
    * Every value is looked at, however deep; the first that could not be read back is named by its keys, such as
      ``extra['history'][3]``, with its type.
    * What is neither plain nor a tensor is tried for real, by writing and reading it alone, so that classes which
      the script has allowed with `torch.serialization.add_safe_globals` pass.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from manycard.errors import CheckpointError

__all__ = ["check_values"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def check_values(state: dict[str, Any]) -> None:
    """Make sure that all of `state` can be read back.

    Raises:
        CheckpointError: a value can't; it is named by its keys.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"a checkpoint is a dict, not a {type(state).__name__}", fix="save a dict")
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{key!r} can't be a key of a checkpoint: it is no string", fix="use a string")
        _check(value, key, set())


def _check(value: Any, name: str, above: set[int]) -> None:
    kind = type(value)
    if kind in _PLAIN or kind is Tensor or kind is nn.Parameter:
        return
    if kind in (dict, OrderedDict, list, tuple, set):
        if id(value) in above:
            raise CheckpointError(f"{name} holds itself and can't be saved", fix=f"leave {name} out")
        above.add(id(value))
        if isinstance(value, dict):
            for key, part in value.items():
                _check(key, f"a key of {name}, {key!r},", above)
                _check(part, f"{name}[{key!r}]", above)
        else:
            for index, part in enumerate(value):
                _check(part, f"{name}[{index}]", above)
        above.discard(id(value))
        if kind is not OrderedDict or not getattr(value, "__dict__", None):
            return
        # A module's state dict carries its layers' versions as an attribute.
        _check(vars(value), f"the attributes of {name}", above)
        return
    if isinstance(value, nn.Module) or not _comes_back(value):
        raise CheckpointError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which can't be read back safely", fix=_fix(value, name)
        )


def _comes_back(value: Any) -> bool:
    """Whether `value` alone survives being written and read."""
    memory = io.BytesIO()
    try:
        torch.save(value, memory)
        memory.seek(0)
        torch.load(memory, map_location="cpu", weights_only=True)
    except Exception:
        # Whatever the class's own pickling raises, it says no.
        return False
    return True


def _fix(value: Any, name: str) -> str:
    if callable(getattr(value, "state_dict", None)):
        return f"save {name}.state_dict()"
    if callable(getattr(value, "tolist", None)):
        return f"save {name}.tolist(), or a tensor"
    return f"leave {name} out, or save it as numbers, strings, lists and dicts"
