"""Which dimension of each tensor counts samples, for a module nobody described.

`candidate_cuts` lists the ways in which a call might be cut, the likeliest first. Whether one is right is for
`manycard.script.comparison.check` to find out, by comparing values: shapes alone can't tell a batch from a sequence
of the same length. The rules by which outputs join are tried in the same spirit (`manycard.script.comparison.rules`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from manycard.engine.batches.batch import children, map_tensors, rebuild, tensors_in
from manycard.engine.batches.joining import Concatenated, Interleaved, Join, Weighted, plan_join
from manycard.engine.batches.layout import Layout, OnDimension, Piece, TakePiece
from manycard.errors import BatchError
from manycard.script.comparison.plain import alike, whole_values
from manycard.script.comparison.words import listed

__all__ = [
    "ByTensor",
    "JoinRule",
    "Joined",
    "ListsOfSamples",
    "Mean",
    "OtherOutputsError",
    "Rows",
    "Same",
    "Selected",
    "Sum",
    "TimeFirst",
    "candidate_cuts",
]


class OtherOutputsError(BatchError):
    """What the cards gave doesn't go together as it did when it was compared with one card."""


_MOST_CUTS = 24
"""Ways of cutting one call that are tried before it is left on one card."""


@dataclass(frozen=True)
class ByTensor(Layout):
    """Each tensor of the call is cut on a dimension of its own, or handed over whole."""

    dims: tuple[int | None, ...]
    """For each tensor, in order: the dimension that counts samples, or None."""
    numbers: bool = False
    """Whether whole numbers equal to the batch's size stand for it, as in ``model(x, len(x))``."""

    def count(self, batch: Any) -> int:
        tensors = list(tensors_in(batch))
        if len(tensors) != len(self.dims):
            raise BatchError(f"the call holds {len(tensors)} tensors where it held {len(self.dims)} before")
        cut_on = [(tensor, dim) for tensor, dim in zip(tensors, self.dims, strict=True) if dim is not None]
        sizes = {tensor.size(dim) for tensor, dim in cut_on if dim < tensor.dim()}
        if len(sizes) != 1:
            raise BatchError(f"tensors hold {listed(sorted(sizes)) or 'no'} samples in one call")
        return sizes.pop()

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        dims = iter(self.dims)
        start, size, total = sum(sizes[:position]), sizes[position], sum(sizes)

        def walk(value: Any) -> Any:
            if isinstance(value, Tensor):
                dim = next(dims)
                return take(value, None if dim is None else Piece(dim, start, size))
            if self.numbers and type(value) is int and value == total:
                return size
            parts = children(value)
            return value if parts is None else rebuild(value, [walk(part) for _, part in parts])

        return walk(batch)

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        return plan_join(parts, samples, 0, name)

    def lists_samples(self, batch: Any, total: int) -> bool:
        return False


@dataclass(frozen=True)
class ListsOfSamples(Layout):
    """The call's longest lists have one item a sample; tensors with as many rows are cut too."""

    def count(self, batch: Any) -> int:
        lengths = list(_list_lengths(batch))
        if not lengths:
            raise BatchError("the call holds no list")
        return max(lengths)

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        start, size, total = sum(sizes[:position]), sizes[position], sum(sizes)

        def walk(value: Any) -> Any:
            if isinstance(value, Tensor):
                return take(value, Piece(0, start, size) if value.dim() and value.size(0) == total else None)
            if type(value) is list and len(value) == total:
                return [map_tensors(lambda tensor: take(tensor, None), item) for item in value[start : start + size]]
            parts = children(value)
            return value if parts is None else rebuild(value, [walk(part) for _, part in parts])

        return walk(batch)

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        return plan_join(parts, samples, 0, name)

    def lists_samples(self, batch: Any, total: int) -> bool:
        return True


def _list_lengths(value: Any) -> Iterator[int]:
    """Lengths of the outermost lists in a nesting."""
    if type(value) is list:
        yield len(value)
    elif not isinstance(value, Tensor):
        for _, part in children(value) or ():
            yield from _list_lengths(part)


class JoinRule(ABC):
    """How one output tensor becomes one, whatever the batch's size."""

    def bind(self, batch: Any, cut: Layout, sizes: Sequence[int]) -> JoinRule:
        """The rule for one call, where it depends on what the call holds."""
        return self

    @abstractmethod
    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        """The join for these parts; None where their shapes don't follow the rule."""

    def shape_of(self, shape: Sequence[int], samples: int, others: int) -> tuple[int, ...] | None:
        """The shape of the part of `others` samples, given that of `samples`; None where values decide it."""
        return None


@dataclass(frozen=True)
class Rows(JoinRule):
    """The same whole number of rows a sample, sample by sample."""

    dim: int

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        rows = [part.size(self.dim) for part in parts]
        each = rows[0] // samples[0]
        follows = each > 0 and all(count == each * size for count, size in zip(rows, samples, strict=True))
        return Concatenated(self.dim, tuple(rows)) if follows else None

    def shape_of(self, shape: Sequence[int], samples: int, others: int) -> tuple[int, ...] | None:
        return (*shape[: self.dim], shape[self.dim] // samples * others, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class TimeFirst(JoinRule):
    """Rows of (time, sample) flattened, time first."""

    dim: int

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        if Rows(self.dim).plan(parts, samples) is None:
            return None
        return Interleaved(self.dim, parts[0].size(self.dim) // samples[0], tuple(samples))

    def shape_of(self, shape: Sequence[int], samples: int, others: int) -> tuple[int, ...] | None:
        return Rows(self.dim).shape_of(shape, samples, others)


@dataclass(frozen=True)
class Selected(JoinRule):
    """Rows that forward has selected from the samples, as many as there happen to be."""

    dim: int

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        shapes = {(*part.shape[: self.dim], *part.shape[self.dim + 1 :]) for part in parts}
        return Concatenated(self.dim, tuple(part.size(self.dim) for part in parts)) if len(shapes) == 1 else None


@dataclass(frozen=True)
class Mean(JoinRule):
    """A mean over samples, or what is the same on every card."""

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        return _weighted(parts, [size / sum(samples) for size in samples])

    def shape_of(self, shape: Sequence[int], samples: int, others: int) -> tuple[int, ...] | None:
        return tuple(shape)


@dataclass(frozen=True)
class Sum(JoinRule):
    """A sum over samples."""

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        return _weighted(parts, [1.0] * len(parts))

    def shape_of(self, shape: Sequence[int], samples: int, others: int) -> tuple[int, ...] | None:
        return tuple(shape)


@dataclass(frozen=True)
class Same(JoinRule):
    """Whole numbers that are equal on every card: the primary's are kept."""

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        weights = [1.0] + [0.0] * (len(parts) - 1)
        if parts[0].is_floating_point() or any(part.shape != parts[0].shape for part in parts):
            return None
        return _First(tuple(weights))

    def shape_of(self, shape: Sequence[int], samples: int, others: int) -> tuple[int, ...] | None:
        return tuple(shape)


class _First(Weighted):
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].clone()


def _weighted(parts: Sequence[Tensor], weights: Sequence[float]) -> Join | None:
    if any(part.shape != parts[0].shape for part in parts):
        return None
    if set(weights) != {1.0} and not (parts[0].is_floating_point() or parts[0].is_complex()):
        return None
    return Weighted(tuple(weights))


@dataclass(frozen=True)
class Joined(Layout):
    """A way to cut, and the rules by which each output tensor joins."""

    cut: Layout
    rules: tuple[JoinRule, ...]
    counts: bool = False
    """Whether outputs hold whole numbers or words, the same on every card: what is counted by card must not pass."""
    _given: list[dict[str, Any]] = field(default_factory=list, compare=False, repr=False)

    def bound(self, batch: Any, sizes: Sequence[int]) -> Joined:
        """The layout for one call."""
        return Joined(self.cut, tuple(rule.bind(batch, self.cut, sizes) for rule in self.rules), self.counts)

    def to_join(self, output: Any) -> Any:
        if self.counts:
            self._given.append(whole_values(output))
            place = next((at for at, value in self._given[0].items() if not alike(value, self._given[-1].get(at))), "")
            if place:
                raise OtherOutputsError(f"cards give different values besides tensors ({place})")
        return output

    def count(self, batch: Any) -> int:
        return self.cut.count(batch)

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        return self.cut.take_shard(batch, sizes, position, take)

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        plan = self.rules[leaf].plan(parts, samples) if leaf < len(self.rules) else None
        if plan is None:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise OtherOutputsError(f"output {name} has shapes {shapes} on the cards, which is not how it came before")
        return plan

    def lists_samples(self, batch: Any, total: int) -> bool:
        return self.cut.lists_samples(batch, total)


def candidate_cuts(batch: Any) -> list[Layout]:
    """The ways in which a call might be cut, the likeliest first.

    Args:
        batch: the call's ``(args, kwargs)``.
    """
    tensors = list(tensors_in(batch))
    found: list[Layout] = []
    if max(_list_lengths(batch), default=0) > 1:
        found += [ListsOfSamples(), OnDimension(0)]
    deepest = max((tensor.dim() for tensor in tensors), default=0)
    for dim in range(min(deepest, 3)):
        for samples in dict.fromkeys(tensor.size(dim) for tensor in tensors if tensor.dim() > dim):
            assigned = [dims for dims in _assignments(tensors, samples, dim) if set(dims) != {None}]
            found.extend(map(ByTensor, assigned))
    found = list(dict.fromkeys(found))[:_MOST_CUTS]
    with_numbers = [
        ByTensor(cut.dims, numbers=True) for cut in found if isinstance(cut, ByTensor) and _holds_number(batch, cut)
    ]
    return [*found, *with_numbers]


def _assignments(tensors: Sequence[Tensor], samples: int, dim: int) -> list[tuple[int | None, ...]]:
    """For each tensor a dimension with `samples` rows, or none; those that follow `dim` most closely first."""
    choices = [_choices(tensor, samples, dim) for tensor in tensors]
    ranked = itertools.islice(itertools.product(*(enumerate(choice) for choice in choices)), 4096)
    by_departure = sorted(ranked, key=lambda chosen: sum(rank for rank, _ in chosen))
    return [tuple(choice for _, choice in chosen) for chosen in by_departure[:_MOST_CUTS]]


def _choices(tensor: Tensor, samples: int, dim: int) -> list[int | None]:
    fitting = [axis for axis in range(tensor.dim()) if tensor.size(axis) == samples]
    return [*sorted(fitting, key=lambda axis: (axis != dim, axis)), None]


def _holds_number(batch: Any, cut: Layout) -> bool:
    try:
        samples = cut.count(batch)
    except BatchError:
        return False
    return _has_number(batch, samples)


def _has_number(value: Any, number: int) -> bool:
    if type(value) is int:
        return value == number
    return not isinstance(value, Tensor) and any(_has_number(part, number) for _, part in children(value) or ())
