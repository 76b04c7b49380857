"""What ranks exchange for one call: the outputs of every rank's shard, and sums of gradients.

Every rank makes the same exchanges in the same order.

    Outputs      bytes of all tensors of a rank in one flat buffer, one all-gather a call
    Gradients    one flat buffer a dtype, one all-reduce each; who found none travels in the first of them
    Buffers      bytes of rank 0's in one flat buffer, one broadcast

Before outputs travel each rank must know the shapes of the others'. Where they follow from a rank's own by the rule of
their join, nothing is asked. Else, and where an output holds numbers or lists of samples, ranks first tell one another
what they have (`Described`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manycard.engine.batches.batch import children, rebuild
from manycard.engine.replicas.flat import FlatLayout, copy_all
from manycard.errors import BatchError

__all__ = [
    "Described",
    "GradientExchange",
    "Part",
    "all_shapes",
    "broadcast_first",
    "described",
    "gather",
    "restored",
    "sum_sparse",
]

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""PyTorch 2.14 has given it another name."""
_ALIGNMENT = 16
"""Bytes; views of any dtype may start there."""


@dataclass(frozen=True)
class Part:
    """What is known of one tensor of a rank's output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    varies: bool
    """Whether it depends on a parameter or an input that requires a gradient."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Described:
    """A nesting without its tensors' values, in a form that another process can read."""

    kind: str
    parts: tuple[Described, ...] | None = None
    """Of a nesting."""
    names: tuple[str, ...] = ()
    tensor: Part | None = None
    plain: Any = None
    """A plain value that can travel; None otherwise."""

    def tensors(self) -> Iterator[Part]:
        """Every tensor, in order."""
        if self.tensor is not None:
            yield self.tensor
        for part in self.parts or ():
            yield from part.tensors()

    def follows(self) -> bool:
        """Whether another rank's nesting must be like this one: it holds tensors and None alone."""
        if self.parts is not None:
            return all(part.follows() for part in self.parts)
        return self.tensor is not None or self.kind == "NoneType"

    def like(self, tensors: Iterator[Part]) -> Described:
        """The same nesting of other tensors."""
        if self.tensor is not None:
            return Described(self.kind, tensor=next(tensors))
        if self.parts is None:
            return self
        return Described(self.kind, tuple(part.like(tensors) for part in self.parts), self.names)


def described(value: Any) -> Described:
    """Describe a nesting.

    Raises:
        BatchError: it holds a tensor that isn't strided.
    """
    kind = type(value).__qualname__
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise BatchError(
                f"an output is a {value.layout} tensor, which ranks can't exchange",
                fix="return value.to_dense(), or use strategy dp",
            )
        return Described("Tensor", tensor=Part(tuple(value.shape), value.dtype, value.requires_grad))
    parts = children(value)
    if parts is None:
        return Described(kind, plain=value if isinstance(value, bool | int | float | complex | str) else None)
    return Described(kind, tuple(described(part) for _, part in parts), tuple(name for name, _ in parts))


def restored(found: Described, own: Any, tensors: Iterator[Tensor]) -> Any:
    """Another rank's value.

    Args:
        found: its description.
        own: this rank's value, from which it takes its classes and what couldn't travel.
        tensors: its tensors, in order.
    """
    if found.tensor is not None:
        return next(tensors)
    if found.parts is None:
        return own if found.plain is None else found.plain
    below = children(own) if not isinstance(own, Tensor) else None
    if type(own).__qualname__ != found.kind or below is None:
        raise _different(found.kind, type(own).__qualname__)
    templates = [part for _, part in below]
    if isinstance(own, list) and len(templates) != len(found.parts):
        if not templates:
            raise _different(f"a list of {len(found.parts)}", "an empty list")
        templates = templates[:1] * len(found.parts)
    elif tuple(name for name, _ in below) != found.names:
        raise _different(f"{found.kind} of {', '.join(found.names)}", ", ".join(name for name, _ in below))
    return rebuild(
        own, [restored(part, template, tensors) for part, template in zip(found.parts, templates, strict=True)]
    )


def _different(one: str, other: str) -> BatchError:
    return BatchError(
        f"an output differs in structure between ranks ({one}, {other})",
        fix="return the same structure whatever the shard holds",
    )


def all_shapes(own: Sequence[tuple[int, ...]], world: int, device: torch.device) -> list[list[tuple[int, ...]]]:
    """Every rank's shapes of as many tensors with as many dimensions, by rank."""
    numbers = [number for shape in own for number in shape]
    found = torch.empty(world, len(numbers), dtype=torch.int64, device=device)
    _all_gather(found.view(-1), torch.tensor(numbers, dtype=torch.int64, device=device))
    shapes = []
    for row in found.tolist():
        rest = iter(row)
        shapes.append([tuple(next(rest) for _ in shape) for shape in own])
    return shapes


def gather(
    own: Sequence[Tensor], parts: Sequence[Sequence[Part]], rank: int, device: torch.device
) -> list[list[Tensor]]:
    """Every rank's tensors, by rank; this rank's are `own` themselves.

    Args:
        own: this rank's tensors.
        parts: what tensors each rank has.
    """
    offsets = [_offsets([part.bytes for part in of_rank]) for of_rank in parts]
    length = max(end for _, end in offsets)
    if not length:
        return [_views(torch.empty(0, dtype=torch.uint8, device=device), of_rank, offsets[0][0]) for of_rank in parts]
    whole = torch.empty(len(parts), length, dtype=torch.uint8, device=device)
    _all_gather(whole.view(-1), _packed(own, offsets[rank][0], length, device))
    found = [_views(row, of_rank, starts) for row, of_rank, (starts, _) in zip(whole, parts, offsets, strict=True)]
    found[rank] = list(own)
    return found


def broadcast_first(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Write rank 0's values into every rank's `tensors`."""
    starts, length = _offsets([tensor.numel() * tensor.element_size() for tensor in tensors])
    if not length:
        return
    flat = _packed(tensors, starts, length, device)
    dist.broadcast(flat, 0)
    parts = [Part(tuple(tensor.shape), tensor.dtype, varies=False) for tensor in tensors]
    for tensor, received in zip(tensors, _views(flat, parts, starts), strict=True):
        tensor.data.copy_(received)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of `sizes` bytes start, and where the last ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _packed(tensors: Sequence[Tensor], starts: Sequence[int], length: int, device: torch.device) -> Tensor:
    if len(tensors) == 1 and tensors[0].numel() * tensors[0].element_size() == length and tensors[0].device == device:
        return _bytes(tensors[0])
    flat = torch.empty(length, dtype=torch.uint8, device=device)
    for tensor, start in zip(tensors, starts, strict=True):
        flat[start : start + tensor.numel() * tensor.element_size()].copy_(_bytes(tensor))
    return flat


def _views(flat: Tensor, parts: Sequence[Part], starts: Sequence[int]) -> list[Tensor]:
    return [
        flat[start : start + part.bytes].view(part.dtype).view(part.shape)
        for part, start in zip(parts, starts, strict=True)
    ]


class GradientExchange:
    """Sums over ranks of gradients of some tensors.

    Args:
        tensors: those that the gradients are of; they give shapes and strides, and are not kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        # Who has found a gradient travels as numbers of a gradient's own dtype, in its buffer.
        self._layout = FlatLayout([*tensors, torch.empty(len(tensors), dtype=tensors[0].dtype, device="meta")])

    def sum(self, pieces: Sequence[Sequence[tuple[Any, Tensor]]], device: torch.device) -> list[Tensor | None]:
        """The sums, in new buffers; None where no rank found a gradient.

        Args:
            pieces: what this rank found for each tensor: ``(place, gradient)`` pairs, where ``place(tensor)`` is the
                part that the gradient is of, or None where it is of all of it.
        """
        buffers = self._layout.allocate(device)
        *views, used = self._layout.views(buffers)
        with torch.no_grad():
            self._fill(views, pieces)
            mine = [float(bool(found)) for found in pieces]
            used.copy_(torch.tensor(mine, dtype=used.dtype)) if 0.0 in mine else used.fill_(1)
        for buffer in buffers.values():
            dist.all_reduce(buffer)
        if 0.0 not in mine:
            return list(views)
        return [view if users else None for view, users in zip(views, used.real.tolist(), strict=True)]

    def _fill(self, views: Sequence[Tensor], pieces: Sequence[Sequence[tuple[Any, Tensor]]]) -> None:
        whole = {index: found[0][1] for index, found in enumerate(pieces) if len(found) == 1 and found[0][0] is None}
        groups = {dtype: [i for i in indices if i in whole] for dtype, indices in self._layout.groups.items()}
        copy_all(views, [whole.get(index, view) for index, view in enumerate(views)], groups)
        for index, found in enumerate(pieces):
            if index not in whole:
                views[index].zero_()
                for place, gradient in found:
                    (views[index] if place is None else place(views[index])).add_(gradient)


def sum_sparse(found: Tensor | None, like: Tensor, rank: int, world: int) -> Tensor | None:
    """The sum over ranks of gradients that are sparse, or dense where one of them is; None where none has one.

    Args:
        found: this rank's.
        like: what it is the gradient of.
    """
    rows = found.coalesce() if found is not None and found.is_sparse else found
    mine = -1 if rows is None else rows.indices().size(1) if rows.is_sparse else -2
    counts = [shapes[0][0] for shapes in all_shapes([(mine,)], world, like.device)]
    if max(counts) == min(counts) == -1:
        return None
    if -2 in counts:
        total = torch.zeros_like(like) if rows is None else rows.to_dense() if rows.is_sparse else rows.contiguous()
        dist.all_reduce(total)
        return total
    width = tuple(like.shape[1:])
    none = [torch.empty(1, 0, dtype=torch.int64, device=like.device), like.new_empty(0, *width)]
    own = none if rows is None else [rows.indices(), rows.values()]
    parts = [
        [Part((1, max(count, 0)), torch.int64, varies=False), Part((max(count, 0), *width), like.dtype, varies=False)]
        for count in counts
    ]
    indices, values = zip(*gather(own, parts, rank, like.device), strict=True)
    return torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), like.shape).coalesce()
