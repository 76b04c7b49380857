"""Batches and outputs: any nesting of tensors, counted, cut into shards and moved.

Behaviour:
    * A nesting is tensors in lists, tuples, named tuples, dicts and their subclasses, and dataclasses. Whatever
      else is in it (None, numbers, strings, callables) is a plain value.
    * The samples of a batch are counted on dimension ``dim`` of its tensors when they agree there. When they
      don't, and the batch is a list of samples (or fields that are equally long lists), its length counts;
      otherwise the first tensor counts, and tensors of another length go to every card whole.
    * A list whose length is the batch's, and whose tensors are not all of that length, is a list of samples
      and cut.
    * An object that is no nesting and holds tensors is refused by name: guessing how to cut it would train wrongly.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from manycard.errors import BatchError

__all__ = ["count_samples", "cut", "map_tensors", "move", "tensors_in"]

_CUT_FIX = "pass its tensors as a tuple or dict, or make it a dataclass"


def children(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a nesting; None for a tensor or a plain value.

    Raises:
        BatchError: `value` holds tensors and is no nesting.
    """
    if isinstance(value, PackedSequence):
        raise BatchError(
            "a PackedSequence can't be cut into shards",
            fix="pass the padded tensor and the lengths, and pack in forward",
        )
    if isinstance(value, Mapping):
        return [(repr(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(str(index), part) for index, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if not isinstance(value, Tensor | type):
        _refuse_hidden_tensors(value)
    return None


def _refuse_hidden_tensors(value: Any) -> None:
    """Refuse an object whose tensors would stay on one card unseen."""
    if isinstance(value, set | frozenset):
        held: Sequence[Any] = list(value)
    elif isinstance(value, torch.nn.Module) or callable(value):
        return
    else:
        held = list(getattr(value, "__dict__", {}).values())
    if any(isinstance(part, Tensor) for part in held):
        raise BatchError(f"the batch holds a {type(value).__qualname__}, whose tensors can't be cut", fix=_CUT_FIX)


def rebuild(value: Any, parts: Sequence[Any]) -> Any:
    """A nesting like `value` with other parts, in the order of `children`."""
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, part in zip(list(value), parts, strict=True):
            made[key] = part
        return made
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if isinstance(value, list | tuple):
        return type(value)(parts)
    made = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        object.__setattr__(made, field.name, part)
    return made


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A nesting like `value` with `function` applied to every tensor, in order."""
    if isinstance(value, Tensor):
        return function(value)
    parts = children(value)
    if parts is None:
        return value
    return rebuild(value, [map_tensors(function, part) for _, part in parts])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a nesting, in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        yield value
        return
    for _, part in children(value) or ():
        yield from tensors_in(part)


def move(value: Any, device: torch.device) -> Any:
    """Put every tensor of a nesting on `device`, without waiting for the copies.

    An object that is no nesting is moved by its own ``to`` method where it has one.
    """
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if not isinstance(value, Mapping | list | tuple) and not dataclasses.is_dataclass(value):
        own = getattr(value, "to", None)
        return own(device) if callable(own) and not isinstance(value, torch.nn.Module) else value
    parts = children(value)
    return value if parts is None else rebuild(value, [move(part, device) for _, part in parts])


def count_samples(batch: Any, dim: int = 0) -> int:
    """How many samples `batch` holds.

    Raises:
        BatchError: there is nothing to count by.

    Example:
        >>> count_samples({"x": torch.zeros(6, 3), "y": torch.zeros(6)})
        6
    """
    if isinstance(batch, Tensor):
        return _tensor_samples(batch, dim)
    sizes = [tensor.size(dim) for tensor in tensors_in(batch) if has_dim(tensor, dim)]
    if sizes and all(size == sizes[0] for size in sizes):
        return sizes[0]
    length = _length_of_lists(batch, dim)
    if length is not None:
        return length
    if sizes:
        return sizes[0]
    raise BatchError(
        f"the batch holds no tensor with a dimension {dim}, so its samples can't be counted ({_describe(batch)})",
        fix="put the samples into tensors whose first dimension is the batch",
    )


def has_dim(tensor: Tensor, dim: int) -> bool:
    """Whether `tensor` has a dimension `dim`."""
    return -tensor.dim() <= dim < tensor.dim()


def _tensor_samples(tensor: Tensor, dim: int) -> int:
    if has_dim(tensor, dim):
        return tensor.size(dim)
    raise BatchError(
        f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim} to cut", fix="give the batch that dimension"
    )


def _length_of_lists(batch: Any, dim: int) -> int | None:
    """The length of a list of samples, or of fields that are equally long lists of samples."""
    if isinstance(batch, list) and batch and all(isinstance(part, Tensor) for part in batch):
        return len(batch)
    fields = list(_fields(batch))
    lists = [field for field in fields if isinstance(field, list) and field]
    tensors = [field for field in fields if isinstance(field, Tensor) and has_dim(field, dim)]
    lengths = {len(field) for field in lists} | {tensor.size(dim) for tensor in tensors}
    return lengths.pop() if lists and len(lengths) == 1 else None


def _fields(batch: Any) -> Iterator[Any]:
    """The lists and tensors of a batch, without what is inside the lists."""
    if isinstance(batch, Tensor | list):
        yield batch
        return
    for _, part in children(batch) or ():
        yield from _fields(part)


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    parts = children(batch)
    if parts is None:
        return type(batch).__name__
    return f"a {type(batch).__name__} of {', '.join(_describe(part) for _, part in parts[:4]) or 'nothing'}"


Take = Callable[[Tensor, "int | None", int], Tensor]
"""Takes a tensor of the batch and gives the shard's: rows ``start .. start + size``, or all of it (start None)."""


def cut(batch: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Cut `batch` into one shard for each of `sizes`, in order; tensors become views.

    Args:
        batch: a nesting whose samples number ``sum(sizes)``.
        sizes: samples of each shard; may hold zeros.
        dim: the dimension that counts samples.

    Returns:
        As many nestings as there are sizes. What is not cut is the same object in each.
    """

    def take(tensor: Tensor, start: int | None, size: int) -> Tensor:
        return tensor if start is None else tensor.narrow(dim, start, size)

    return [take_shard(batch, sizes, position, dim, take) for position in range(len(sizes))]


def take_shard(batch: Any, sizes: Sequence[int], position: int, dim: int, take: Take) -> Any:
    """The shard at `position`, with `take` choosing how each tensor is taken."""
    return _part(batch, sum(sizes), sum(sizes[:position]), sizes[position], dim, take)


def _part(value: Any, total: int, start: int, size: int, dim: int, take: Take) -> Any:
    if isinstance(value, Tensor):
        return take(value, start if has_dim(value, dim) and value.size(dim) == total else None, size)
    if isinstance(value, np.ndarray):
        cut_here = value.ndim > dim and value.shape[dim] == total
        return np.take(value, range(start, start + size), axis=dim) if cut_here else value
    parts = children(value)
    if parts is None:
        return value
    if type(value) is tuple and len(value) == total and all(isinstance(item, str | bytes) for item in value):
        # How PyTorch's collate function hands over a column of strings.
        return value[start : start + size]
    if is_list_of_samples(value, total, dim):
        return [map_tensors(lambda tensor: take(tensor, None, size), item) for item in value[start : start + size]]
    return rebuild(value, [_part(part, total, start, size, dim, take) for _, part in parts])


def is_list_of_samples(value: Any, total: int, dim: int) -> bool:
    """Whether `value` is a list with one item for each of `total` samples, not a list of fields."""
    if not isinstance(value, list) or len(value) != total:
        return False
    tensors = list(tensors_in(value))
    return not tensors or not all(has_dim(tensor, dim) and tensor.size(dim) == total for tensor in tensors)


def holds_list_of_samples(value: Any, total: int, dim: int) -> bool:
    """Whether a batch of `total` samples is, or has in it, a list with one item a sample."""
    if isinstance(value, Tensor):
        return False
    if is_list_of_samples(value, total, dim):
        return True
    return any(holds_list_of_samples(part, total, dim) for _, part in children(value) or ())
