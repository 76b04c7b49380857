"""Operations that keep spread tensors spread: each card works on its own part.

They lie below autograd: the script's graph holds the operation as it was called, with PyTorch's own derivatives, which
are operations again and find their parts here. No graph of a card's own is needed, and none spans cards.

Kept apart: what leaves the dimension of the samples whole (views, slices, softmax and sums over other dimensions),
what works number by number, alone or with tensors that are cut alike, and sums and means over everything.
`apply_rule` gives `NOT_SPREAD` for all others, and where a rule has any doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manycard.engine.spread_tensor.held import NOT_SPREAD, Held, Rows, sent
from manycard.engine.spread_tensor.views import VIEWS, split, view

__all__ = ["apply_rule"]

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_AS_IT_IS = torch.preserve_format


def apply_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on parts: `Held`, tensors, or a tuple of those; `NOT_SPREAD` where it needs wholes.

    Args:
        args: its arguments, with a `Held` for each tensor that is spread.
    """
    rule = _RULES.get(func)
    return NOT_SPREAD if rule is None else rule(func, args, kwargs)


# ---- number by number ----------------------------------------------------------------------------------------------


def _by_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every number of the result comes from the numbers at its place."""
    first = _aligned(args, kwargs)
    if first is None:
        return NOT_SPREAD
    dims = max(_dims(value) for value in args)
    rows = first.rows.on(dims - first.shape.dim() + first.rows.dim)
    if not all(_can_be_cut(value, rows, dims, first) for value in args):
        return NOT_SPREAD
    parts = [func(*(_cut(value, rows, dims, index, first) for value in args), **kwargs) for index in _indices(rows)]
    return _result(first, rows, parts)


def _aligned(args: Sequence[Any], kwargs: dict[str, Any]) -> Held | None:
    """The first spread argument, if all others lie as it does."""
    held = [value for value in args if isinstance(value, Held)]
    if any(isinstance(value, Held | Tensor | list | tuple) for value in kwargs.values()):
        return None
    return held[0] if held and all(held[0].matches(other) for other in held) else None


def _dims(value: Any) -> int:
    return value.shape.dim() if isinstance(value, Held) else value.dim() if isinstance(value, Tensor) else 0


def _can_be_cut(value: Any, rows: Rows, dims: int, like: Held) -> bool:
    if not isinstance(value, Tensor):
        return not isinstance(value, list | tuple)
    if value.dim() == 0:
        return value.device in (like.home.device, torch.device("cpu"))
    axis = value.dim() - dims + rows.dim
    fits = axis < 0 or value.size(axis) in (1, rows.total)
    return (
        fits
        and value.device == like.home.device
        and value.layout is torch.strided
        and type(value) in (Tensor, nn.Parameter)
    )


def _cut(value: Any, rows: Rows, dims: int, index: int, like: Held) -> Any:
    """What card number `index` gets of an argument."""
    if isinstance(value, Held):
        return value.parts[index]
    if not isinstance(value, Tensor) or (value.dim() == 0 and value.device.type == "cpu"):
        return value
    axis = value.dim() - dims + rows.dim
    own = rows.on(axis).of(value, index) if axis >= 0 and value.dim() and value.size(axis) == rows.total else value
    return sent(own, like.home.devices[rows.positions[index]])


def _indices(rows: Rows) -> range:
    return range(len(rows.lengths))


def _result(like: Held, rows: Rows, parts: Sequence[Tensor]) -> Any:
    """A new spread tensor, or the whole where it is small."""
    made = Held.of_parts(like.home, rows, parts)
    return made if made.bytes >= like.home.least else made.joined(like.home.device)


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    held, device = args[0], kwargs.get("device")
    if not isinstance(held, Held) or kwargs.get("pin_memory"):
        return NOT_SPREAD
    others = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "layout")}
    if device is None or torch.device(device) == held.home.device:
        return _by_number(func, (held,), others)
    # To the host, or to a card of the script's own choice: there at once, without a stop on the way.
    whole = held.joined(torch.device(device), non_blocking=bool(kwargs.get("non_blocking")))
    as_it_is = others.get("dtype") in (None, whole.dtype) and others.get("memory_format") in (None, _AS_IT_IS)
    return whole if as_it_is else func(whole, **others)


# ---- along other dimensions ----------------------------------------------------------------------------------------


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Softmax and its like: ``(x, dim, ...)``, or ``(gradient, output, dim, ...)``."""
    tensors = [value for value in args if isinstance(value, Held | Tensor)]
    rest = args[len(tensors) :]
    first = _aligned(tensors, kwargs)
    if first is None or not rest or rest[0] % first.shape.dim() == first.rows.dim:
        return NOT_SPREAD
    dims = first.shape.dim()
    if not all(_dims(value) == dims and _can_be_cut(value, first.rows, dims, first) for value in tensors):
        return NOT_SPREAD
    parts = [
        func(*(_cut(value, first.rows, dims, index, first) for value in tensors), *rest, **kwargs)
        for index in _indices(first.rows)
    ]
    return _result(first, first.rows, parts)


def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums, means and extremes over dimensions that don't count samples: ``(x, dims, keepdim, ...)``."""
    held, rest = args[0], args[1:]
    if not isinstance(held, Held) or not rest or rest[0] is None:
        return NOT_SPREAD
    given = [rest[0]] if isinstance(rest[0], int) else list(rest[0])
    dims = {dim % held.shape.dim() for dim in given}
    if func is _aten.sum.dim_IntList and held.rows.dim in dims:
        return _summed_over_samples(held, rest, kwargs)
    if not dims or held.rows.dim in dims:
        return NOT_SPREAD
    keeps = bool(rest[1]) if len(rest) > 1 else bool(kwargs.get("keepdim", False))
    axis = held.rows.dim - (0 if keeps else sum(dim < held.rows.dim for dim in dims))
    return _columns(held, held.rows.on(axis), [func(part, *rest, **kwargs) for part in held.parts])


def _summed_over_samples(held: Held, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum over the samples too, such as the gradient of what was added to each."""
    if not held.shape.dtype.is_floating_point or kwargs.get("dtype") is not None:
        return NOT_SPREAD
    inner = torch.float32 if held.shape.dtype in _HALF else held.shape.dtype
    sums = [_aten.sum.dim_IntList(part, *rest, **{**kwargs, "dtype": inner}) for part in held.parts]
    return _added(held, sums).to(held.shape.dtype)


def _added(held: Held, sums: Sequence[Tensor]) -> Tensor:
    """The cards' sums, added up where the whole would be."""
    total = sums[0].to(held.home.device, non_blocking=True)
    for other in sums[1:]:
        total = total + other.to(held.home.device, non_blocking=True)
    return total


def _topmost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``topk(x, k, dim, ...)`` and ``sort(x, dim, ...)``."""
    held, rest = args[0], args[1:]
    dim = (*rest, -1, -1)[1] if func is _aten.topk.default else (*rest, -1)[0]
    if not isinstance(held, Held) or kwargs or dim % held.shape.dim() == held.rows.dim:
        return NOT_SPREAD
    return _columns(held, held.rows, [func(part, *rest) for part in held.parts])


def _columns(held: Held, rows: Rows, found: Sequence[Any]) -> Any:
    if isinstance(found[0], Tensor):
        return _result(held, rows, found)
    return tuple(_result(held, rows, column) for column in zip(*found, strict=True))


def _concatenated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors laid end to end on another dimension; all of them are cut alike."""
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    first = _aligned(tensors, kwargs)
    if first is None or kwargs or dim % first.shape.dim() == first.rows.dim:
        return NOT_SPREAD
    rows, dims = first.rows, first.shape.dim()
    for tensor in tensors:
        whole = isinstance(tensor, Held) or tensor.dim() != dims or tensor.size(rows.dim) == rows.total
        if _dims(tensor) != dims or not whole or not _can_be_cut(tensor, rows, dims, first):
            return NOT_SPREAD
    parts = [func([_cut(tensor, rows, dims, index, first) for tensor in tensors], dim) for index in _indices(rows)]
    return _result(first, rows, parts)


def _put_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a slice or selection: ``(gradient, size, dim, ...)``."""
    held, size, dim, *rest = args
    if not isinstance(held, Held) or kwargs:
        return NOT_SPREAD
    dim %= len(size)
    selects = func is _aten.select_backward.default
    axis = held.rows.dim + (selects and dim <= held.rows.dim)
    if dim == axis:
        whole = not selects and size[dim] == held.rows.total and (*rest, 1, 1, 1)[2] == 1
        return view(_aten.alias.default, (held,), {}) if whole else NOT_SPREAD
    rows = held.rows.on(axis)
    parts = [
        func(part, [*size[:axis], length, *size[axis + 1 :]], dim, *rest)
        for part, length in zip(held.parts, rows.lengths, strict=True)
    ]
    return _result(held, rows, parts)


# ---- over everything -----------------------------------------------------------------------------------------------


def _total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    held, dtype = args[0], kwargs.get("dtype")
    if not isinstance(held, Held) or len(args) > 1:
        return NOT_SPREAD
    mean = func is _aten.mean.default
    if mean and not (dtype or held.shape.dtype).is_floating_point:
        return NOT_SPREAD
    final = dtype or (held.shape.dtype if held.shape.dtype.is_floating_point or held.shape.is_complex() else None)
    inner = torch.float32 if final in _HALF else dtype  # a card's sum may be more than a short number can hold
    total = _added(held, [part.sum(dtype=inner) for part in held.parts])
    if mean:
        total = total / held.shape.numel()
    return total if final is None else total.to(final)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """New tensors that need nothing but a spread one's shape."""
    if not isinstance(args[0], Held) or any(isinstance(value, Held) for value in args[1:]):
        return NOT_SPREAD
    return func(args[0].shape, *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].home.device})


_NUMBER_BY_NUMBER = (
    "abs acos add.Tensor add.Scalar bitwise_and.Tensor bitwise_not bitwise_or.Tensor clamp clamp_max clamp_min "
    "clone div.Tensor div.Scalar eq.Scalar eq.Tensor elu erf exp expm1 floor ge.Scalar ge.Tensor gelu "
    "gelu_backward gt.Scalar gt.Tensor isfinite isinf isnan le.Scalar le.Tensor leaky_relu leaky_relu_backward "
    "log log10 log1p log2 logical_and logical_not logical_or lt.Scalar lt.Tensor masked_fill.Scalar maximum "
    "minimum mul.Tensor mul.Scalar ne.Scalar ne.Tensor neg pow.Tensor_Scalar reciprocal relu round rsqrt "
    "rsub.Scalar sgn sigmoid sigmoid_backward sign silu silu_backward softplus softplus_backward sqrt sub.Tensor "
    "sub.Scalar tanh tanh_backward threshold_backward where.self xlogy.Tensor"
)


def _ops(names: str) -> list[Any]:
    found = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(_aten, packet), overload or "default"))
    return found


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(_ops(_NUMBER_BY_NUMBER), _by_number),
    _aten._to_copy.default: _converted,
    **dict.fromkeys(_ops("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"), _along),
    **dict.fromkeys(
        _ops("argmax argmin sum.dim_IntList mean.dim amax amin max.dim min.dim logsumexp any.dim all.dim"), _reduced
    ),
    **dict.fromkeys(_ops("topk sort"), _topmost),
    **dict.fromkeys(_ops("split.Tensor split_with_sizes"), split),
    _aten.cat.default: _concatenated,
    **dict.fromkeys(_ops("slice_backward select_backward"), _put_back),
    **dict.fromkeys(_ops("sum mean"), _total),
    **dict.fromkeys(_ops("zeros_like ones_like empty_like full_like rand_like randn_like"), _like),
    **dict.fromkeys(_ops("new_zeros new_ones new_empty new_full"), _like),
}
