"""Plain values in nestings and objects: numbers, strings, arrays, lengths; and whether two such things are alike.

`looks` gives a copy of what can be compared of a value: of nestings and objects as deep as `_DEPTH`, at most `_MOST`
values in all. Tensors, modules, functions and classes are left out. `alike` compares two values as far as can be told.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manycard.engine.batches.batch import children
from manycard.script.comparison.closeness import differ, tolerance_of

__all__ = ["LEFT_OUT", "PLAIN", "alike", "beside_tensors", "looks", "whole_values"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Values that nothing can change in place."""
LEFT_OUT = (Tensor, nn.Module, type, types.ModuleType, torch.Generator)
"""What is not looked into."""
_DEPTH = 4
_MOST = 5000


def looks(value: Any) -> Any:
    """What can be compared of a value."""
    return _Look().at(value, _DEPTH)


class _Look:
    def __init__(self) -> None:
        self._left = _MOST

    def at(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, LEFT_OUT) or callable(value) or self._left < 0:
            return None
        if isinstance(value, np.ndarray | np.generic):
            return np.array(value) if np.size(value) <= _MOST else np.shape(value)
        if not depth:
            return type(value)
        if isinstance(value, Mapping):
            return {str(key): self.at(part, depth - 1) for key, part in list(value.items())[:_MOST]}
        if isinstance(value, list | tuple | deque):
            return [len(value), *(self.at(part, depth - 1) for part in list(value)[:_MOST])]
        if isinstance(value, set | frozenset):
            return [len(value), *sorted(map(str, list(value)[:_MOST]))]
        return self.at(dict(getattr(value, "__dict__", {})), depth - 1)


def beside_tensors(value: Any, path: str = "") -> dict[str, Any]:
    """What can be compared of an output besides its tensors, by its place."""
    if isinstance(value, Tensor):
        return {}
    parts = children(value)
    if parts is None:
        return {path or "itself": looks(value)}
    found = {f"{path}[{name}]": beside_tensors(part, f"{path}[{name}]") for name, part in parts}
    return {place: seen for inside in found.values() for place, seen in inside.items()}


def whole_values(value: Any) -> dict[str, Any]:
    """Of `beside_tensors`, what is no fraction."""
    return {place: seen for place, seen in beside_tensors(value).items() if not isinstance(seen, float | None)}


def alike(one: Any, other: Any, tolerance: float = 1e-4, depth: int = 2 * _DEPTH) -> bool:
    """Whether two values are alike, as far as can be told.

    Args:
        tolerance: by how much of the larger one fractions may differ.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return differ(one, other, tolerance_of(one)) is None
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return bool(one == other or abs(one - other) <= tolerance * max(abs(one), abs(other)) or one != one != other)
    if isinstance(one, PLAIN):
        return bool(one == other)
    if isinstance(one, np.ndarray):
        return _alike_arrays(one, other, tolerance)
    if not depth or isinstance(one, LEFT_OUT) or callable(one):
        return True
    if isinstance(one, Mapping):
        same = list(one) == list(other)
        return same and all(alike(one[key], other[key], tolerance, depth - 1) for key in one)
    if isinstance(one, list | tuple | deque):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(alike(a, b, tolerance, depth - 1) for a, b in pairs)
    return alike(looks(one), looks(other), tolerance, depth - 1)


def _alike_arrays(one: Any, other: Any, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    return bool(np.allclose(one, other, rtol=tolerance, atol=0.0, equal_nan=True))
