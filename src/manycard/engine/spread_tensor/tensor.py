"""A tensor whose parts are on the cards that made them, until something needs it whole.

Behaviour:
    * It is a tensor of the script's graph as any other: hooks, ``retain_grad``, ``autograd.grad`` and operations in
      place act on it. Shape, dtype and device need no numbers; the device is where the whole would be.
    * Operations in `manycard.engine.spread_tensor.operations`, and losses in `manycard.engine.spread_tensor.losses`,
      run on the parts. Everything else gathers the whole, once, and goes on with that.
    * What PyTorch doesn't let a tensor do that has no memory (``numpy``, ``tolist``, printing, pickling, copying) is
      done with the whole.
    * Code that takes a pointer to its memory behind Python's back (an extension in C++) gets PyTorch's error "Cannot
      access data pointer". An operation in place that would change its shape is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from manycard.engine.driving.threads import current_place
from manycard.engine.spread_tensor.held import NOT_SPREAD, Held
from manycard.engine.spread_tensor.operations import apply_rule
from manycard.errors import BatchError

__all__ = ["FUNCTIONS", "SpreadTensor", "plain"]


def _unseen_by_the_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, into which a compiled script doesn't look: it spans cards."""
    apart: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")  # importing it takes seconds
        if compiler is None:
            return function(*args)
        if not apart:
            apart.append(compiler.disable(function))
        return apart[0](*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


FUNCTIONS: dict[Callable[..., Any], Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {}
"""Functions of PyTorch with a way of their own for spread tensors, which gives `NOT_SPREAD` where it needs wholes."""


class SpreadTensor(Tensor):
    """See the module. `held` is what it holds."""

    held: Held

    @staticmethod
    def __new__(cls, held: Held) -> SpreadTensor:
        like = held.shape
        made: SpreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=held.home.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.held = held
        return made

    def __init__(self, held: Held) -> None:
        """All is done by `__new__`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _as_a_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _as_an_operation(func, args, kwargs or {})


@_unseen_by_the_compiler
def _as_a_function(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of PyTorch's, as the script calls it."""
    if not all(issubclass(SpreadTensor, kind) for kind in types):  # another subclass decides, and sees plain tensors
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        own = FUNCTIONS.get(func)
        if own is not None and current_place() is None:
            value = own(args, kwargs)
            if value is not NOT_SPREAD:
                return value
        if func in _NEEDS_MEMORY:
            args, kwargs = tree_map(plain, (args, kwargs))
        return func(*args, **kwargs)


@_unseen_by_the_compiler
def _as_an_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation, below autograd."""
    if current_place() is None:
        found = apply_rule(func, *tree_map(_opened, (args, kwargs)))
        if found is not NOT_SPREAD:
            return tree_map(_closed, found)
    return _on_wholes(func, args, kwargs)


def _opened(value: Any) -> Any:
    if not isinstance(value, SpreadTensor):
        return value
    return value.held if value.held.spread else value.held.gather()


def _closed(value: Any) -> Any:
    return SpreadTensor(value) if isinstance(value, Held) else value


def _on_wholes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of PyTorch's on whole tensors."""
    writes = func._schema.is_mutable
    shared = writes or any(returned.alias_info is not None for returned in func._schema.returns)
    wholes: list[tuple[SpreadTensor, Tensor]] = []

    def open_whole(value: Any) -> Any:
        if not isinstance(value, SpreadTensor):
            return value
        wholes.append((value, value.held.gather() if shared else value.held.read()))
        return wholes[-1][1]

    args, kwargs = tree_map(open_whole, args), tree_map(open_whole, kwargs)
    if writes and func.overloadpacket.__name__.rstrip("_") in _RESHAPES:
        name = func.overloadpacket.__name__
        raise BatchError(
            f"{name} would change in place the shape of an output that is spread over the cards",
            fix=f'write x = x.{name.rstrip("_")}(...), or take outputs="gathered"',
        )
    result = func(*args, **kwargs)
    if not writes:
        return result
    return next((tensor for tensor, whole in wholes if result is whole), result)


def plain(value: Any) -> Any:
    """`value`, or the whole of a spread tensor: an ordinary tensor, attached to the script's graph."""
    if not isinstance(value, SpreadTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        if not value.requires_grad:
            return value.held.gather()
        value.held.gather()
        return torch.ops.aten.alias.default(value)


def _data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor.data``: the same numbers, apart from the graph and from its count of writes."""
    if not isinstance(args[0], SpreadTensor):
        return NOT_SPREAD
    held = args[0].held
    if not held.spread:
        return held.gather().data
    return SpreadTensor(apply_rule(torch.ops.aten.detach.default, (held,), {}))


def _set_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, value = args[0], plain(args[1])
    if not isinstance(tensor, SpreadTensor):
        tensor.data = value
        return None
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise BatchError(
            f"an output that is spread over the cards can't get data of another kind ({tuple(value.shape)},"
            f" {value.dtype})",
            fix='make a new tensor, or take outputs="gathered"',
        )
    tensor.held.gather().data = value.to(tensor.device)
    return None


FUNCTIONS[Tensor.data.__get__] = _data  # type: ignore[attr-defined]
FUNCTIONS[Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]

_RESHAPES = {
    *("as_strided", "resize", "resize_as", "set", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"),
    *("resize_as_sparse", "resize_output", "swap"),
}
_NEEDS_MEMORY = {
    *(
        Tensor.__array__,
        Tensor.__deepcopy__,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        Tensor.__repr__,
        Tensor.__format__,
    ),
    *(Tensor.data_ptr, Tensor.is_shared, Tensor.numpy, Tensor.pin_memory, Tensor.share_memory_, Tensor.storage),
    *(Tensor.tolist, Tensor.untyped_storage, Tensor._typed_storage, Tensor.storage_type, Tensor.__dlpack_device__),
    Tensor.__cuda_array_interface__.__get__,
}
