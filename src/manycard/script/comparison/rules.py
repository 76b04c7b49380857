"""The rules that are tried on an output, and the one for losses that are a mean over tokens, not over samples.

A language model that computes its loss in ``forward`` averages over the tokens that aren't padding. Each card's loss
then counts by its tokens, which the call's own inputs tell: entries of the labels that aren't -100 or -1 (without the
first of each sequence, where labels are shifted), or entries of a mask that aren't 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import tensors_in
from manycard.engine.batches.joining import Join
from manycard.engine.batches.layout import Layout, Piece
from manycard.script.comparison.layout import Joined, JoinRule, Mean, Rows, Same, Selected, Sum, TimeFirst

__all__ = ["REDUCTIONS", "CountedMean", "rules_for", "tells_means_apart"]

_IGNORED_LABELS = (-100, -1)
"""What PyTorch's cross entropy ignores by default, and what people tell it to ignore."""
_PADDING = 0
"""What masks and many vocabularies use for what doesn't count."""


@dataclass(frozen=True)
class CountedMean(JoinRule):
    """A mean over the entries of one input that aren't ignored."""

    source: int
    """Which tensor of the call is counted."""
    ignored: int
    """The value of entries that don't count."""
    shifted: bool
    """Whether the first entry of each sequence doesn't count."""

    def bind(self, batch: Any, cut: Layout, sizes: Sequence[int]) -> JoinRule:
        counts = self._counts(batch, cut, sizes)
        return self if counts is None else _Bound(tuple(counts))

    def uneven(self, batch: Any, cut: Layout, sizes: Sequence[int]) -> bool:
        """Whether cards with these samples count otherwise than by their samples."""
        found = self._counts(batch, cut, sizes)
        if found is None:
            return False
        counts = torch.stack(found)
        samples = counts.new_tensor([size for size in sizes if size])
        return bool((counts * samples.sum() != samples * counts.sum()).any())

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        return None  # only what `bind` gives knows the counts

    def _counts(self, batch: Any, cut: Layout, sizes: Sequence[int]) -> list[Tensor] | None:
        """What each card that has samples counts; None where its inputs don't hold the same tensors as the whole."""
        shards = [self._tensors(batch, cut, sizes, position) for position, size in enumerate(sizes) if size]
        if any(len(shard) != len(list(tensors_in(batch))) for shard in shards):
            return None
        return [self._count(shard[self.source]) for shard in shards]

    def _tensors(self, batch: Any, cut: Layout, sizes: Sequence[int], position: int) -> list[Tensor]:
        def take(tensor: Tensor, piece: Piece | None) -> Tensor:
            return tensor if piece is None else piece.of(tensor)

        return list(tensors_in(cut.take_shard(batch, sizes, position, take)))

    def _count(self, shard: Tensor) -> Tensor:
        counted = shard[..., 1:] if self.shifted else shard
        return (counted != self.ignored).sum().double()


REDUCTIONS = (Mean, Sum, CountedMean)
"""Rules by which samples are weighted."""


@dataclass(frozen=True)
class _Bound(JoinRule):
    counts: tuple[Tensor, ...]

    def plan(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Join | None:
        if parts[0].dim() or not parts[0].is_floating_point() or len(parts) != len(self.counts):
            return None
        return _ByCount(self.counts)

    def shape_of(self, shape: Sequence[int], samples: int, others: int) -> tuple[int, ...] | None:
        return tuple(shape)


@dataclass(frozen=True)
class _ByCount(Join):
    """Scalars weighted by what each card counted; a card that counted nothing, whose mean is no number, is left out."""

    counts: tuple[Tensor, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        total = torch.zeros_like(parts[0])
        for part, weight in zip(parts, self._weights(parts[0]), strict=True):
            total = total + torch.where(weight > 0, part * weight, torch.zeros_like(part))
        return total

    def gradient(self, whole: Tensor, index: int) -> Tensor:
        return whole * self._weights(whole)[index]

    def _weights(self, like: Tensor) -> list[Tensor]:
        total = torch.stack(self.counts).sum()
        return [(count / total).to(device=like.device, dtype=like.dtype) for count in self.counts]


def rules_for(dims: int, batch: Any) -> Iterator[JoinRule]:
    """The rules that an output of `dims` dimensions may follow, the likeliest first.

    Args:
        batch: the call, whose inputs may say how a mean is weighted.
    """
    for dim in range(dims):
        yield Rows(dim)
        yield TimeFirst(dim)
    if dims:
        yield Selected(0)
    else:
        # Before the mean over samples: they are the same while nothing is ignored.
        for ignored in _IGNORED_LABELS:
            yield from _counted(batch, ignored)
    yield Mean()
    yield Sum()
    yield Same()
    if not dims:
        yield from _counted(batch, _PADDING)


def _counted(batch: Any, ignored: int) -> Iterator[CountedMean]:
    for source, tensor in reversed(list(enumerate(tensors_in(batch)))):  # labels come last
        if tensor.dim() == 0 or tensor.is_floating_point() or tensor.is_complex():
            continue
        if tensor.dim() > 1:
            yield CountedMean(source, ignored, shifted=True)
        yield CountedMean(source, ignored, shifted=False)


def tells_means_apart(layout: Joined, batch: Any, sizes: Sequence[int]) -> bool:
    """Whether this call, of a module that returns a mean, tells a mean over tokens from one over samples."""
    if not any(isinstance(rule, Mean | CountedMean) for rule in layout.rules):
        return False
    rules = itertools.chain.from_iterable(_counted(batch, ignored) for ignored in _IGNORED_LABELS)
    return any(rule.uneven(batch, layout.cut, sizes) for rule in rules)
