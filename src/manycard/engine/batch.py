"""Batches and outputs: any nesting of tensors, counted, cut into shards, moved and joined again.

Behaviour:
    * A nesting is tensors in lists, tuples, named tuples, dicts and their subclasses, and dataclasses. Whatever
      else is in it (None, numbers, strings, callables) is a plain value.
    * The samples of a batch are counted on dimension ``dim`` of its tensors when they agree there. When they
      don't, and the batch is a list of samples (or fields that are equally long lists), its length counts;
      otherwise the first tensor counts, and tensors of another length go to every card whole.
    * A list whose length is the batch's, and whose tensors are not all of that length, is a list of samples
      and cut.
    * An object that is no nesting and holds tensors is refused by name: guessing how to cut it would train wrongly.
    * Outputs join as they were cut: concatenated on ``dim``; 0-dim values as the mean weighted by samples;
      integer 0-dim tensors (counts) as the sum.
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
    sizes = [tensor.size(dim) for tensor in tensors_in(batch) if _has(tensor, dim)]
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


def _has(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _tensor_samples(tensor: Tensor, dim: int) -> int:
    if _has(tensor, dim):
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
    tensors = [field for field in fields if isinstance(field, Tensor) and _has(field, dim)]
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
        return take(value, start if _has(value, dim) and value.size(dim) == total else None, size)
    if isinstance(value, np.ndarray):
        cut_here = value.ndim > dim and value.shape[dim] == total
        return np.take(value, range(start, start + size), axis=dim) if cut_here else value
    parts = children(value)
    if parts is None:
        return value
    if type(value) is tuple and len(value) == total and all(isinstance(item, str | bytes) for item in value):
        # How PyTorch's collate function hands over a column of strings.
        return value[start : start + size]
    if _is_list_of_samples(value, total, dim):
        return [map_tensors(lambda tensor: take(tensor, None, size), item) for item in value[start : start + size]]
    return rebuild(value, [_part(part, total, start, size, dim, take) for _, part in parts])


def _is_list_of_samples(value: Any, total: int, dim: int) -> bool:
    if not isinstance(value, list) or len(value) != total:
        return False
    tensors = list(tensors_in(value))
    return not tensors or not all(_has(tensor, dim) and tensor.size(dim) == total for tensor in tensors)


@dataclasses.dataclass(frozen=True)
class Concatenated:
    """Parts laid end to end on `dim`."""

    dim: int
    lengths: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, on the device of `parts`."""
        return torch.cat(list(parts), self.dim)

    def gradient(self, whole: Tensor, index: int) -> Tensor:
        """The gradient of part `index`, given that of the whole."""
        return whole.narrow(self.dim, sum(self.lengths[:index]), self.lengths[index])


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Parts added with weights: means over samples, or counts (weights 1)."""

    weights: tuple[float, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The weighted sum, on the device of `parts`."""
        total = parts[0] if self.weights[0] == 1 else parts[0] * self.weights[0]
        for part, weight in zip(parts[1:], self.weights[1:], strict=True):
            total = total + (part if weight == 1 else part * weight)
        return total if total is not parts[0] else total.clone()

    def gradient(self, whole: Tensor, index: int) -> Tensor:
        """The gradient of part `index`, given that of the whole."""
        return whole * self.weights[index]


Join = Concatenated | Weighted


def plan_join(parts: Sequence[Tensor], samples: Sequence[int], dim: int, name: str) -> Join:
    """Decide how one output tensor of several cards becomes one.

    Args:
        parts: the output of each card that had samples.
        samples: how many samples each of those cards had.
        dim: the dimension that counts samples.
        name: where in the output it is, for the error.

    Raises:
        BatchError: the shapes follow no rule that keeps the meaning.
    """
    first = parts[0]
    if any(part.dim() != first.dim() for part in parts):
        raise _unjoinable(parts, name)
    if first.dim() == 0:
        total = sum(samples)
        counts = not (first.is_floating_point() or first.is_complex())
        return Weighted(tuple(1.0 if counts else size / total for size in samples))
    for axis in (dim, *(axis for axis in range(first.dim()) if axis != dim)):
        if _has(first, axis) and all(part.size(axis) == size for part, size in zip(parts, samples, strict=True)):
            return Concatenated(axis, tuple(samples))
    if _has(first, dim) and _same_multiple(parts, samples, dim):
        return Concatenated(dim, tuple(part.size(dim) for part in parts))
    if all(part.shape == first.shape for part in parts) and (first.is_floating_point() or first.is_complex()):
        return Weighted(tuple(size / sum(samples) for size in samples))
    raise _unjoinable(parts, name)


def _same_multiple(parts: Sequence[Tensor], samples: Sequence[int], dim: int) -> bool:
    """Whether each part has the same whole number of rows a sample (a batch flattened with time, say)."""
    rows = parts[0].size(dim)
    each = rows // samples[0]
    return rows == each * samples[0] and all(
        part.size(dim) == each * size for part, size in zip(parts, samples, strict=True)
    )


def _unjoinable(parts: Sequence[Tensor], name: str) -> BatchError:
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    return BatchError(
        f"output {name} has shapes {shapes} on the cards, which don't follow their numbers of samples",
        fix="return it with the batch as its first dimension, or compute the loss inside forward and return that",
    )


LeafJoin = Callable[[str, list[tuple[int, Tensor]]], Any]
"""Joins one leaf: its name, and the ``(index of the card, tensor)`` pairs it is made of."""


def holds_list_of_samples(value: Any, total: int, dim: int) -> bool:
    """Whether a batch of `total` samples is, or has in it, a list with one item a sample."""
    if isinstance(value, Tensor):
        return False
    if _is_list_of_samples(value, total, dim):
        return True
    return any(holds_list_of_samples(part, total, dim) for _, part in children(value) or ())


def join_values(
    values: Sequence[Any], samples: Sequence[int], dim: int, join_leaf: LeafJoin, *, listed: bool = False
) -> Any:
    """Join nestings of equal shape leaf by leaf.

    Args:
        values: one nesting from each card that had samples, the primary's first.
        samples: how many samples each of those cards had.
        dim: the dimension that counts samples.
        join_leaf: called for every tensor leaf, in order.
        listed: whether the batch came as lists of samples, so that lists as long as the shards are such lists.

    Raises:
        BatchError: the nestings differ in structure.
    """
    return _Joiner(tuple(samples), dim, join_leaf, listed).join(list(values), "")


@dataclasses.dataclass(frozen=True)
class _Joiner:
    samples: tuple[int, ...]
    dim: int
    join_leaf: LeafJoin
    listed: bool

    def join(self, values: list[Any], path: str) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            if all(isinstance(value, Tensor) for value in values):
                return self.join_leaf(path or "0", list(enumerate(values)))
            raise _different(values, path)
        parts = children(first)
        if parts is None:
            return self._join_plain(values)
        if any(type(value) is not type(first) for value in values):
            raise _different(values, path)
        if self._are_lists_of_samples(values):
            return [self._take(item, card, path) for card, value in enumerate(values) for item in value]
        columns = [children(value) or [] for value in values]
        names = [name for name, _ in parts]
        if any([name for name, _ in column] != names for column in columns):
            raise _different(values, path)
        joined = [
            self.join([column[index][1] for column in columns], f"{path}[{name}]") for index, name in enumerate(names)
        ]
        return rebuild(first, joined)

    def _are_lists_of_samples(self, values: Sequence[Any]) -> bool:
        """Whether these are plain lists with one item a sample, not fields with one row a sample."""
        if not all(isinstance(value, list) for value in values):
            return False
        lengths = tuple(len(value) for value in values)
        if lengths == self.samples and (self.listed or len(set(lengths)) > 1):
            return True
        return all(_is_list_of_samples(value, size, self.dim) for value, size in zip(values, self.samples, strict=True))

    def _take(self, item: Any, card: int, path: str) -> Any:
        """One sample's output, from the only card that has it."""
        return map_tensors(lambda tensor: self.join_leaf(path, [(card, tensor)]), item)

    def _join_plain(self, values: Sequence[Any]) -> Any:
        """Numbers with a fraction become their mean over samples; of anything else the primary's is kept."""
        if all(type(value) is float for value in values) and any(value != values[0] for value in values):
            total = sum(self.samples)
            return sum(value * size / total for value, size in zip(values, self.samples, strict=True))
        return values[0]


def _different(values: Sequence[Any], path: str) -> BatchError:
    kinds = ", ".join(type(value).__name__ for value in values)
    return BatchError(
        f"output {path or '0'} differs in structure between the cards ({kinds})",
        fix="return the same structure whatever the shard holds",
    )
