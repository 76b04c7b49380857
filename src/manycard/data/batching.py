"""Who decides the batches: a batch size, the user's sampler or the user's batch sampler.

Behaviour:
    * Plain shuffling and plain order become manycard's own, so that a DataLoader and its dataset given directly walk
      the same batches. Any other sampler is kept (`manycard.data.order`).
    * A DistributedSampler is replaced with the order of its dataset, and a warning says so: manycard cuts global
      batches itself. Another sampler that gives each rank a part of its own is refused.
    * Where a sampler or the loader has a `torch.Generator`, orders are drawn from that generator's seed.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from manycard.data.order import SamplerOrder, generators_in
from manycard.data.sampler import GlobalBatchSampler, Order
from manycard.errors import SettingError

__all__ = ["Batching"]


@dataclass(frozen=True)
class Batching:
    """What decides the batches, as PyTorch's DataLoader names it."""

    sampler: Iterable[Any] | None
    """Yields indices; None for all samples."""
    batch_sampler: Iterable[Any] | None
    """Yields lists of indices; None for batches of `batch_size`."""
    batch_size: int | None
    """Samples in a global batch; None with a batch sampler, and where items of the dataset are batches."""
    shuffle: bool
    """Whether each epoch draws an order; only without a sampler."""
    drop_last: bool
    """Whether a last batch that is not full is left out."""
    generator: torch.Generator | None
    """What PyTorch would draw the order from."""

    @property
    def whole_items(self) -> bool:
        """Whether each item that the dataset gives is a global batch already."""
        return self.batch_size is None and self.batch_sampler is None

    def seed(self, default: int) -> int:
        """What orders are drawn from: the seed of the generator that PyTorch would use, else `default`."""
        if isinstance(self.sampler, DistributedSampler):
            return self.sampler.seed
        held = [] if self.generator is None else [self.generator]
        held += generators_in(self.sampler) + generators_in(self.batch_sampler)
        return held[0].initial_seed() if held else operator.index(default)

    def unpacked(self) -> Batching:
        """The same with PyTorch's own BatchSampler taken apart into a sampler and a batch size."""
        outer = self.batch_sampler
        if type(outer) is not BatchSampler:
            return self
        return replace(
            self, batch_sampler=None, sampler=outer.sampler, batch_size=outer.batch_size, drop_last=outer.drop_last
        )

    def order(self, dataset: Any, length: int | None, seed: int, *, warn: bool) -> Order:
        """The order of a map-style dataset's epochs.

        Args:
            dataset: what the order indexes.
            length: its samples; None where it doesn't say.
            seed: what shuffled orders are drawn from.
            warn: whether this process speaks for the run.

        Raises:
            SettingError: the sampler splits the data itself, or nothing says where an epoch ends.
        """
        if self.batch_sampler is not None:
            _refuse_split("batch_sampler", self.batch_sampler)
            return SamplerOrder(self.batch_sampler, None, drop_last=False, seed=seed, length=length)
        sampler, shuffle = self.sampler, self.shuffle
        if isinstance(sampler, DistributedSampler) and type(sampler) is DistributedSampler:
            shuffle, sampler = sampler.shuffle, None
            if warn:
                warnings.warn(_REPLACED.format(batch_size=self.batch_size), stacklevel=2)
        elif sampler is not None:
            _refuse_split("sampler", sampler)
            if self.batch_size is not None and _takes_all(sampler, dataset):
                shuffle, sampler = isinstance(sampler, RandomSampler), None
        if sampler is None and length is None:
            raise SettingError(
                "dataset",
                type(dataset).__name__,
                "it has no length, so an epoch has no end",
                fix="give it a __len__, or give a sampler",
            )
        if self.batch_size is None:
            items = sampler or (RandomSampler(dataset) if shuffle else SequentialSampler(dataset))
            return SamplerOrder(items, 1, drop_last=False, seed=seed, length=length)
        if sampler is None:
            assert length is not None, "a dataset without a length was refused above"
            return GlobalBatchSampler(length, self.batch_size, shuffle=shuffle, seed=seed, drop_last=self.drop_last)
        return SamplerOrder(sampler, self.batch_size, drop_last=self.drop_last, seed=seed, length=length)


_REPLACED = (
    "the DistributedSampler is replaced with the order of its dataset: manycard cuts each batch over the ranks itself, "
    "so batch_size={batch_size} is now that of the global batch"
)


def _takes_all(sampler: Any, dataset: Any) -> bool:
    """Whether `sampler` is PyTorch's for each sample once, in order or shuffled."""
    if type(sampler) is SequentialSampler:
        return sampler.data_source is dataset
    if type(sampler) is not RandomSampler or sampler.data_source is not dataset or sampler.replacement:
        return False
    return bool(sampler.num_samples == len(dataset))


def _refuse_split(setting: str, sampler: Any) -> None:
    """Refuse a sampler that gives each rank a part of the data: manycard would cut that part once more."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(each, DistributedSampler) or (hasattr(each, "num_replicas") and hasattr(each, "rank")):
            raise SettingError(
                setting,
                type(sampler).__name__,
                "it gives each rank a part of its own, and manycard cuts each global batch itself",
                fix="give a sampler over the whole dataset",
            )
