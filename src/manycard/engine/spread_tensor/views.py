"""Views of spread tensors: each card's part is viewed, and all are one family (`manycard.engine.spread_tensor.held`).

A view stays spread where the dimension of the samples stays whole: wherever it goes, merged with what follows it, or
taken apart from that again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manycard.engine.spread_tensor.held import NOT_SPREAD, Held, Rows

__all__ = ["VIEWS", "split", "view"]

_aten = torch.ops.aten

_Plan = tuple[Rows, Callable[[int], tuple[Any, ...]]]
"""Where the parts of a view lie, and the arguments for part number `index`."""


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of one of `VIEWS`, with the parts' views as its parts."""
    held, rest = args[0], args[1:]
    if not isinstance(held, Held) or kwargs:
        return NOT_SPREAD
    shape = func(held.shape, *rest)
    plan: _Plan | None = VIEWS[func](held, shape, *rest)
    if plan is None:
        return NOT_SPREAD
    rows, of_part = plan
    parts = [_viewed(func, part, of_part(index)) for index, part in enumerate(held.parts)]
    return Held(held.home, rows, parts, shape, held, lambda whole: func(whole, *rest))


def _viewed(func: Any, part: Tensor, rest: tuple[Any, ...]) -> Tensor:
    if func in (_aten.view.default, _aten._unsafe_view.default):
        return part.reshape(*rest)  # parts are never written, so that a copy serves where a view can't be
    return func(part, *rest)  # type: ignore[no-any-return]


def _same(held: Held, shape: Tensor, *rest: Any) -> _Plan | None:
    return held.rows, lambda index: rest


def _regrouped(held: Held, shape: Tensor, size: Sequence[int]) -> _Plan | None:
    """A view in which the dimension of the samples is kept, merged with what follows, or divided by that again."""
    before, after, dim = held.shape.shape, shape.shape, held.rows.dim
    outer, axis, passed = _product(before[:dim]), 0, 1
    while axis < len(after) and passed < outer:
        passed *= after[axis]
        axis += 1
    while axis + 1 < len(after) and after[axis] == 1 and before[dim] > 1:
        axis += 1
    if passed != outer or axis >= len(after):
        return None
    lengths = []
    for length in held.rows.lengths:
        if length * after[axis] % before[dim]:
            return None
        lengths.append(length * after[axis] // before[dim])
    if min(lengths) < 1:
        return None
    rows = Rows(axis, tuple(lengths), held.rows.positions)
    return rows, lambda index: ([*after[:axis], lengths[index], *after[axis + 1 :]],)


def _transposed(held: Held, shape: Tensor, first: int, second: int) -> _Plan | None:
    dims = held.shape.dim()
    swap = {first % dims: second % dims, second % dims: first % dims}
    return held.rows.on(swap.get(held.rows.dim, held.rows.dim)), lambda index: (first, second)


def _turned(held: Held, shape: Tensor) -> _Plan | None:
    return held.rows.on(shape.dim() - 1 - held.rows.dim), lambda index: ()


def _permuted(held: Held, shape: Tensor, dims: Sequence[int]) -> _Plan | None:
    return held.rows.on([dim % shape.dim() for dim in dims].index(held.rows.dim)), lambda index: (dims,)


def _unsqueezed(held: Held, shape: Tensor, dim: int) -> _Plan | None:
    return held.rows.on(held.rows.dim + (dim % shape.dim() <= held.rows.dim)), lambda index: (dim,)


def _squeezed(held: Held, shape: Tensor, dim: int) -> _Plan | None:
    dim %= held.shape.dim()
    if dim == held.rows.dim:
        return None
    gone = shape.dim() < held.shape.dim() and dim < held.rows.dim
    return held.rows.on(held.rows.dim - gone), lambda index: (dim,)


def _sliced(held: Held, shape: Tensor, dim: int = 0, *limits: Any) -> _Plan | None:
    if dim % shape.dim() != held.rows.dim:
        return held.rows, lambda index: (dim, *limits)
    whole = shape.size(dim) == held.rows.total and (*limits, 1, 1, 1)[2] == 1
    return (held.rows, lambda index: (dim,)) if whole else None


def _selected(held: Held, shape: Tensor, dim: int, number: int) -> _Plan | None:
    dim %= held.shape.dim()
    if dim == held.rows.dim:
        return None
    return held.rows.on(held.rows.dim - (dim < held.rows.dim)), lambda index: (dim, number)


def _expanded(held: Held, shape: Tensor, size: Sequence[int]) -> _Plan | None:
    dim = held.rows.dim + shape.dim() - held.shape.dim()
    rows = held.rows.on(dim)
    return rows, lambda index: ([*shape.shape[:dim], rows.lengths[index], *shape.shape[dim + 1 :]],)


def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``split`` and ``chunk`` along another dimension: a slice after the other."""
    held, dim = args[0], args[2] if len(args) > 2 else 0
    if not isinstance(held, Held) or kwargs or dim % held.shape.dim() == held.rows.dim:
        return NOT_SPREAD
    found, start = [], 0
    for piece in func(held.shape, *args[1:]):
        end = start + piece.size(dim)
        found.append(view(_aten.slice.Tensor, (held, dim, start, end), {}))
        start = end
    return found


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


VIEWS: dict[Any, Callable[..., _Plan | None]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.view.default: _regrouped,
    _aten._unsafe_view.default: _regrouped,
    _aten.transpose.int: _transposed,
    _aten.t.default: _turned,
    _aten.permute.default: _permuted,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.squeeze.dim: _squeezed,
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _selected,
    _aten.expand.default: _expanded,
}
"""For each operation, what tells how the parts are viewed: given the tensor, the result's shape and the arguments."""
