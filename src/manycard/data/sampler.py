"""The order of one epoch, cut into global batches.

Behaviour:
    * An epoch's order is a function of ``(seed, epoch)`` alone: no strategy, card count, worker count or earlier
      draw changes it, and it is drawn without touching the process's random state.
    * Every sample is used exactly once an epoch. Nothing is repeated to fill the last batch; it is shorter, or
      left out with ``drop_last=True``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import torch

from manycard.data.draws import mix
from manycard.errors import SettingError

__all__ = ["EpochOrder", "GlobalBatchSampler", "Order", "whole_number"]

EpochOrder = Sequence[Sequence[Any]]
"""The global batches of one epoch, in order; each holds what the dataset is indexed with."""


class Order(Protocol):
    """Where the global batches of each epoch come from."""

    seed: int

    def of_epoch(self, epoch: int) -> EpochOrder:
        """The global batches of `epoch`."""

    def __len__(self) -> int:
        """Global batches an epoch."""


def whole_number(setting: str, value: Any, smallest: int, fix: str) -> int:
    """`value` as an int of at least `smallest`.

    Raises:
        SettingError: it is no whole number, or a smaller one.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = smallest - 1
    if isinstance(value, bool) or number < smallest:
        raise SettingError(setting, value, f"it must be a whole number of at least {smallest}", fix=fix)
    return number


class GlobalBatchSampler:
    """Cut ``range(length)``, shuffled anew each epoch or in order, into global batches.

    Args:
        length: samples in the dataset.
        batch_size: samples in a global batch; the last one of an epoch may have fewer.
        shuffle: whether each epoch draws a new order.
        seed: what the orders are drawn from, with the number of the epoch.
        drop_last: leave out a last batch that is not full.

    Raises:
        SettingError: `length` or `batch_size` is below 1.

    Example:
        >>> list(GlobalBatchSampler(7, 3, shuffle=False, seed=0, drop_last=False))
        [[0, 1, 2], [3, 4, 5], [6]]
    """

    def __init__(self, length: int, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.length = whole_number("length", length, 1, "give the sampler a dataset that holds samples")
        self.batch_size = whole_number("batch_size", batch_size, 1, "give the size of the global batch")
        self.shuffle = bool(shuffle)
        self.seed = operator.index(seed)
        self.drop_last = bool(drop_last)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that iterating over this sampler gives."""
        self.epoch = whole_number("epoch", epoch, 0, "count epochs from 0")

    def of_epoch(self, epoch: int) -> EpochOrder:
        """The global batches of `epoch`: lists of indices, made as they are asked for."""
        return _CutOrder(self._permutation(epoch), self.length, self.batch_size, len(self))

    def _permutation(self, epoch: int) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        # Hashed together, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        generator = torch.Generator().manual_seed(mix(self.seed, epoch) >> 1)
        return torch.randperm(self.length, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.of_epoch(self.epoch))  # type: ignore[arg-type]

    def __len__(self) -> int:
        full, rest = divmod(self.length, self.batch_size)
        return full + (rest > 0 and not self.drop_last)


class _CutOrder(Sequence[list[int]]):
    """One epoch's batches, cut from its permutation as they are read: a million indices stay 8 MB."""

    def __init__(self, permutation: torch.Tensor | None, length: int, batch_size: int, batches: int) -> None:
        self._permutation = permutation
        self._length = length
        self._batch_size = batch_size
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    @overload
    def __getitem__(self, number: int) -> list[int]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[int]]: ...
    def __getitem__(self, number: int | slice) -> list[int] | list[list[int]]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._batches))]
        if number < 0:
            number += self._batches
        if not 0 <= number < self._batches:
            raise IndexError(number)
        start = number * self._batch_size
        end = min(start + self._batch_size, self._length)
        if self._permutation is None:
            return list(range(start, end))
        indices: list[int] = self._permutation[start:end].tolist()
        return indices
