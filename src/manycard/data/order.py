"""The order that a user's own sampler or batch sampler gives, made equal on all ranks.

Behaviour:
    * An epoch's order is drawn whole when the epoch begins, with ``random``, ``numpy.random``, PyTorch's generator
      and any `torch.Generator` that the sampler holds seeded from ``(seed, epoch)``, and all of them put back after.
      So every rank draws the same order, each epoch another one, and a resumed epoch the same one again.
    * A sampler with ``set_epoch`` is told the epoch.
    * What it yields is respected: repeats, subsets, batches of any size. An index outside the dataset, an empty
      batch and a sampler without an end are refused.
    * A DistributedSampler would split the data a second time; `manycard.data.source` puts its dataset's order in
      its place.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from manycard.data.draws import OwnDraws, mix
from manycard.data.sampler import EpochOrder
from manycard.errors import BatchError, SettingError

__all__ = ["SamplerOrder", "fingerprint", "generators_in"]

_ENDLESS = 10
"""A sampler without a length is taken for endless at this many times the dataset's samples ..."""
_ENDLESS_AT_LEAST = 1_000_000
"""... and not before this many."""


def fingerprint(order: EpochOrder) -> int:
    """A number that differs when an epoch's batches do, in content, order or size; 60 ms for a million indices."""
    return zlib.crc32(repr([list(batch) for batch in order]).encode())


class SamplerOrder:
    """Global batches from a sampler of indices, or from a batch sampler.

    Args:
        sampler: yields indices, or batches of them where `batch_size` is None.
        batch_size: samples in a global batch; None when `sampler` yields whole batches.
        drop_last: leave out a last batch that is not full.
        seed: what random samplers draw from, with the number of the epoch.
        length: samples in the dataset; None where it has no length.
    """

    def __init__(
        self, sampler: Iterable[Any], batch_size: int | None, *, drop_last: bool, seed: int, length: int | None
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.length = length

    @property
    def _setting(self) -> str:
        return "batch_sampler" if self.batch_size is None else "sampler"

    def of_epoch(self, epoch: int) -> EpochOrder:
        """The global batches of `epoch`.

        Raises:
            SettingError: the sampler gives an index that the dataset does not have, or does not end.
            BatchError: a batch sampler gives an empty batch.
        """
        key = mix(self.seed, epoch)
        for sampler in _nested(self.sampler):
            follow = getattr(sampler, "set_epoch", None)
            if callable(follow):
                follow(epoch)
        with OwnDraws(key), _seeded_generators(self.sampler, key):
            drawn = list(itertools.islice(self.sampler, self._limit() + 1))
        if len(drawn) > self._limit():
            raise SettingError(
                self._setting,
                type(self.sampler).__name__,
                f"it gave more than {self._limit()} entries without an end, so an epoch would never end",
                fix="let it stop after one epoch",
            )
        batches = self._cut(drawn)
        self._check(batches)
        return batches

    def _limit(self) -> int:
        return max(_ENDLESS_AT_LEAST, _ENDLESS * (self.length or 0))

    def _cut(self, drawn: list[Any]) -> list[list[Any]]:
        if self.batch_size is None:
            return [list(batch) for batch in drawn]
        size = self.batch_size
        end = len(drawn) // size * size if self.drop_last else len(drawn)
        return [drawn[start : min(start + size, end)] for start in range(0, end, size)]

    def _check(self, batches: list[list[Any]]) -> None:
        for number, batch in enumerate(batches):
            if not batch:
                raise BatchError(
                    f"the batch sampler {type(self.sampler).__name__} gave an empty batch (number {number})",
                    fix="leave empty batches out",
                )
            if self.length is None:
                continue
            for index in batch:
                if isinstance(index, int) and not -self.length <= index < self.length:
                    raise SettingError(
                        self._setting,
                        type(self.sampler).__name__,
                        f"it gave index {index}, and the dataset has {self.length} samples",
                        fix="draw indices from range(len(dataset))",
                    )

    def __len__(self) -> int:
        entries = len(self.sampler)  # type: ignore[arg-type]
        if self.batch_size is None:
            return entries
        full, rest = divmod(entries, self.batch_size)
        return full + (rest > 0 and not self.drop_last)


def _nested(sampler: Any) -> Iterator[Any]:
    """A sampler and those it wraps, by the names that PyTorch and its users give them."""
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [getattr(current, name, None) for name in ("sampler", "batch_sampler", "base_sampler")]


def generators_in(sampler: Any) -> list[torch.Generator]:
    """The generators that a sampler, or one that it wraps, holds."""
    values = [value for each in _nested(sampler) for value in getattr(each, "__dict__", {}).values()]
    return list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())


@contextmanager
def _seeded_generators(sampler: Any, key: int) -> Iterator[None]:
    """Seed every `torch.Generator` that a sampler or one that it wraps holds; put their states back at the end."""
    held = generators_in(sampler)
    states = [generator.get_state() for generator in held]
    for number, generator in enumerate(held):
        generator.manual_seed(mix(key, number) >> 1)
    try:
        yield
    finally:
        for generator, state in zip(held, states, strict=True):
            generator.set_state(state)
