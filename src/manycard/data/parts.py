"""A rank's part of a global batch, and what travels from a worker to the process that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from manycard.engine.batches.batch import count_samples, cut, map_tensors
from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import ManycardError

__all__ = ["OwnPart", "Refused", "as_it_is", "cut_part", "own_part"]


class OwnPart(NamedTuple):
    """Which samples of a global batch a rank holds."""

    first: int
    """Where its first sample stands in the global batch."""
    held: int
    """Samples it holds, at least 1."""
    samples: int
    """Samples of those that count; 0 for the stand-in of a rank without any."""


def own_part(count: int, rank: int, world_size: int) -> OwnPart:
    """The part of `rank` in a global batch of `count` samples.

    Example:
        >>> own_part(5, 1, 2), own_part(1, 1, 2)
        (OwnPart(first=3, held=2, samples=2), OwnPart(first=0, held=1, samples=0))
    """
    sizes = shard_sizes(count, world_size)
    samples = sizes[rank]
    return OwnPart(sum(sizes[:rank]) if samples else 0, max(samples, 1), samples)


def cut_part(batch: Any, rank: int, world_size: int, *, apart: bool = False) -> tuple[Any, OwnPart]:
    """This rank's part of a whole batch.

    Args:
        apart: copy it, so that the rest of the batch isn't sent along with it to another process.
    """
    count = count_samples(batch)
    if world_size == 1:
        return batch, OwnPart(0, count, count)
    part = own_part(count, rank, world_size)
    sizes: Sequence[int] = [part.first, part.held, count - part.first - part.held]
    own = cut(batch, sizes)[1]
    return (map_tensors(Tensor.clone, own) if apart else own), part


class Refused(NamedTuple):
    """What a worker sends in place of a batch: an error of manycard's, as it is."""

    error: ManycardError


def as_it_is(value: Any) -> Any:
    """The collate function of batches that are made already."""
    return value
