"""Outputs of several cards, joined as they were cut.

* Tensors are laid end to end on the dimension that counts samples, or added as a mean weighted by samples where
  they have none; integer 0-dim tensors (counts) are added up.
* Nestings must have the same structure on every card. A list with one item a sample is joined as a list.
* Of numbers with a fraction the mean over samples is kept; of anything else the primary's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import children, has_dim, is_list_of_samples, map_tensors, rebuild
from manycard.errors import BatchError

__all__ = ["Concatenated", "Interleaved", "Join", "Weighted", "join_values", "plan_join"]


class Join(ABC):
    """How the cards' parts of one output tensor become one."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, on the device of `parts`."""

    @abstractmethod
    def gradient(self, whole: Tensor, index: int) -> Tensor:
        """The gradient of part `index`, given that of the whole."""


@dataclass(frozen=True)
class Concatenated(Join):
    """Parts laid end to end on `dim`."""

    dim: int
    lengths: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), self.dim)

    def gradient(self, whole: Tensor, index: int) -> Tensor:
        return whole.narrow(self.dim, sum(self.lengths[:index]), self.lengths[index])


@dataclass(frozen=True)
class Weighted(Join):
    """Parts added with weights: means over samples, or counts (weights 1)."""

    weights: tuple[float, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        total = parts[0] if self.weights[0] == 1 else parts[0] * self.weights[0]
        for part, weight in zip(parts[1:], self.weights[1:], strict=True):
            total = total + (part if weight == 1 else part * weight)
        return total if total is not parts[0] else total.clone()

    def gradient(self, whole: Tensor, index: int) -> Tensor:
        return whole * self.weights[index]


@dataclass(frozen=True)
class Interleaved(Join):
    """Parts whose rows are (time, sample) flattened, time first: joined on the samples within each time step."""

    dim: int
    times: int
    samples: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        apart = [_apart(part, self.dim, self.times, size) for part, size in zip(parts, self.samples, strict=True)]
        return torch.cat(apart, self.dim + 1).flatten(self.dim, self.dim + 1)

    def gradient(self, whole: Tensor, index: int) -> Tensor:
        apart = _apart(whole, self.dim, self.times, sum(self.samples))
        own = apart.narrow(self.dim + 1, sum(self.samples[:index]), self.samples[index])
        return own.flatten(self.dim, self.dim + 1)


def _apart(rows: Tensor, dim: int, times: int, samples: int) -> Tensor:
    """Rows of (time, sample) on two dimensions of their own."""
    return rows.reshape(*rows.shape[:dim], times, samples, *rows.shape[dim + 1 :])


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
        if has_dim(first, axis) and all(part.size(axis) == size for part, size in zip(parts, samples, strict=True)):
            return Concatenated(axis, tuple(samples))
    if has_dim(first, dim) and _same_multiple(parts, samples, dim):
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


@dataclass(frozen=True)
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
        return all(is_list_of_samples(value, size, self.dim) for value, size in zip(values, self.samples, strict=True))

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
