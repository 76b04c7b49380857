"""Does a split of the script's use every sample of a batch exactly once?

Behaviour:
    * Of every batch, the samples of the shards together are counted and compared with the batch's.
    * Of the first `LOOKED_AT` batches the samples themselves are compared, by content, as far as they can be: the
      tensors and lists that stand at the same place in the batch and in its shards and have a row a sample in both.
      A row may lose or gain padding at its end. Samples with equal content can't be told apart, nor need they be.
    * A part of which less than half the shards' rows are rows of the batch was changed by the split (tokenised,
      scaled) and is left out. Where that leaves nothing, the counts are all there is to go by, and that is said once.

What this can't see: samples lost or repeated only in later batches while the counts agree, and rows that are combined
wrongly into shards that have every row once (a label beside another sample's input) where the batch has its parts in
the same order.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import children, count_samples, is_list_of_samples, tensors_in
from manycard.errors import BatchError

__all__ = ["LOOKED_AT", "SplitCheck", "rows_at", "sample_places"]

LOOKED_AT = 3
"""Batches whose samples are compared by content; that copies them to the host."""
_PADDINGS = 4
"""Values that are tried as a tensor's padding, the most frequent ones at the ends of its rows."""
_FIX = (
    "give each sample to one card; where it repeats or drops samples on purpose, take check_split=False and return"
    " (sum, count) losses"
)

Place = tuple[str, ...]
"""The names that lead to a part of a batch."""
Rows = Any
"""A tensor whose first dimension counts samples, or a list with an item a sample."""


class SplitCheck:
    """Looks at the batches of one split."""

    def __init__(self) -> None:
        self._left = LOOKED_AT
        self._said = False

    def look(self, batch: Any, shards: Sequence[Any], sizes: Sequence[int]) -> None:
        """Compare a batch with its shards.

        Raises:
            BatchError: samples are lost or repeated.
        """
        places = sample_places(batch)
        if places is None:
            return
        samples, total = count_samples(batch), sum(sizes)
        if total != samples:
            what = "loses" if total < samples else "repeats"
            listed = ", ".join(map(str, sizes))
            raise BatchError(
                f"split {what} samples: the batch has {samples}, its shards have {total} ({listed})", fix=_FIX
            )
        if self._left:
            self._left -= 1
            self._compare(batch, [(shard, size) for shard, size in zip(shards, sizes, strict=True) if size], places)

    def _compare(self, batch: Any, shards: Sequence[tuple[Any, int]], places: Sequence[Place]) -> None:
        compared = []
        for place in places:
            parts = [rows_at(shard, place) for shard, _ in shards]
            if all(part is not None and len(part) == size for part, (_, size) in zip(parts, shards, strict=True)):
                found = _keys(rows_at(batch, place), parts)
                compared += [] if found is None else [found]
        if not compared:
            self._say_uncomparable()
            return
        of_batch = list(zip(*(keys for keys, _ in compared), strict=True))
        given, used = Counter(of_batch), Counter(zip(*(keys for _, keys in compared), strict=True))
        lost, repeated = given - used, used - given
        if lost or repeated:
            first = next(index for index, key in enumerate(of_batch) if key in lost)
            raise BatchError(
                f"split loses and repeats samples: of {len(of_batch)} samples, {lost.total()} are in no shard, sample"
                f" {first} among them, and {repeated.total()} in the shards are repeated or made of parts of several"
                " samples",
                fix=_FIX,
            )

    def _say_uncomparable(self) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                "what split returns can't be compared with the batch sample by sample, since nothing in the shards has"
                " rows of the batch; only the number of samples is checked",
                stacklevel=2,
            )


def sample_places(batch: Any) -> list[Place] | None:
    """Where a batch has a row a sample: in tensors, and in lists with an item a sample; None if it can't be counted."""
    try:
        return list(_places(batch, count_samples(batch), ()))
    except BatchError:
        return None


def _places(value: Any, samples: int, place: Place) -> Iterator[Place]:
    if isinstance(value, Tensor):
        if value.dim() and value.size(0) == samples and value.layout is torch.strided:
            yield place
    elif is_list_of_samples(value, samples, 0):
        yield place
    else:
        for name, part in children(value) or []:
            yield from _places(part, samples, (*place, name))


def rows_at(value: Any, place: Place) -> Rows | None:
    """What stands at a place of a batch or a shard; None where that has no such place."""
    for name in place:
        value = dict(children(value) or []).get(name)
    return value if isinstance(value, list) or (isinstance(value, Tensor) and value.dim()) else None


def _keys(whole: Rows, parts: Sequence[Rows]) -> tuple[list[Any], list[Any]] | None:
    """What tells the rows of the whole and of the parts apart; None where the split has changed the rows."""
    if any(isinstance(part, Tensor) != isinstance(whole, Tensor) for part in parts):
        return None
    best, most = None, 0
    for padding in _paddings(whole, parts):
        own = _row_keys(whole, padding)
        theirs = [key for part in parts for key in _row_keys(part, padding)]
        there = set(own)
        found = sum(key in there for key in theirs)
        if found > most:
            best, most = (own, theirs), found
    return best if best is not None and 2 * most >= len(best[1]) else None


def _paddings(whole: Rows, parts: Sequence[Rows]) -> list[float | None]:
    """The values that may pad rows: none where rows are as long everywhere."""
    same = not isinstance(whole, Tensor) or all(part.shape[1:] == whole.shape[1:] for part in parts)
    if same:
        return [None]
    if whole.dim() < 2 or any(part.dim() != whole.dim() for part in parts):
        return []
    ends = [part[:, -1].detach().flatten().cpu() for part in (whole, *parts) if part.size(1)]
    return [value for value, _ in Counter(torch.cat(ends).tolist()).most_common(_PADDINGS)]


def _row_keys(rows: Rows, padding: float | None) -> list[Any]:
    """A key for each row; what `padding` fills at a row's end doesn't count."""
    if not isinstance(rows, Tensor):
        return [_item_key(item) for item in rows]
    rows = rows.detach().cpu()
    if padding is None:
        return [_digest(row) for row in rows]
    filled = (rows != padding).flatten(2).any(2) if rows.dim() > 2 else rows != padding
    places = torch.arange(1, rows.size(1) + 1)
    lengths = (filled * places).amax(1).tolist() if rows.size(1) else [0] * len(rows)
    return [_digest(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def _item_key(item: Any) -> Any:
    """The content of an item's tensors, with what else is plain in it; the object itself where it has neither."""
    try:
        tensors = list(tensors_in(item))
    except BatchError:
        return id(item)
    if tensors:
        return tuple(_digest(tensor.detach().cpu()) for tensor in tensors)
    return item if isinstance(item, str | bytes | int | float) else id(item)


def _digest(row: Tensor) -> bytes:
    held = row.contiguous().reshape(-1)
    content = held.view(torch.uint8) if held.numel() else held
    return hashlib.blake2b(content.numpy().tobytes() if held.numel() else b"", digest_size=16).digest()
