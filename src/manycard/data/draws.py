"""Random draws of data loading: augmentation, shuffled streams, samplers.

Behaviour:
    * What a sample draws (with ``random``, ``numpy.random`` or ``torch``) is a function of the seed, the epoch and
      the sample's place in the epoch's order. So draws differ between all samples, epochs, workers and ranks;
      they are the same for every number of workers and cards, and the same again after a resume. A
      ``worker_init_fn`` that gives every worker the same seed does no harm.
    * A dataset that fetches a whole batch at once (``__getitems__``) is seeded once for each shard: its draws
      repeat from one seed too, and depend on how the batch is cut.
    * A stream is seeded once an epoch in each worker, alike on all ranks (`manycard.data.streams`).
    * In the script's own process (``num_workers=0``) the process's random state is put back after each batch.
      Loading data never moves the sequence that dropout or initialisation draws from.

A generator that the dataset made for itself (``self.rng = numpy.random.default_rng(0)``) can't be seen from here:
it is copied into every worker with its state, and is the dataset's own to seed.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from manycard.data.parts import Refused
from manycard.errors import ManycardError

__all__ = ["OwnDraws", "SeededSamples", "Shard", "mix", "place_seed", "seed_draws"]

_WORD = (1 << 64) - 1


def mix(*words: int) -> int:
    """One 64-bit number from several, such that any change in one of them changes it all."""
    entropy = [word & _WORD for word in words]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def place_seed(key: int, place: int) -> int:
    """The seed at `place` of the sequence `key` (the finaliser of SplitMix64; `mix` would cost 12 us a sample)."""
    word = (key + (place + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def seed_draws(seed: int) -> None:
    """Seed ``random``, ``numpy.random`` and PyTorch's CPU generator from one 64-bit number."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed, which seeds every GPU as well.
    torch.default_generator.manual_seed(seed >> 1)


class OwnDraws:
    """A sequence of draws apart from the process's: ``with`` it, draws come from here, and after it all is as before.

    Args:
        seed: where the sequence starts.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> OwnDraws:
        self._outside = _states()
        if self._inside is None:
            seed_draws(self._seed)
        else:
            _restore(self._inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = _states()
        _restore(self._outside)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


class Shard(NamedTuple):
    """What a rank loads of one global batch."""

    key: int
    """The seed of the epoch's draws."""
    place: int
    """Where its first sample stands in the epoch's order; places of different samples differ."""
    indices: list[Any]
    """What the dataset is indexed with."""


class SeededSamples(Dataset[Any]):
    """A map-style dataset whose draws depend on nothing but the sample's place.

    It is indexed with a `Shard`, as a batch or, where each item of the dataset is a batch, as an item. A dataset with a
    method ``with_seeds(indices, seeds)`` is given the seeds instead of finding its generators seeded, which takes a
    fifteenth of the time.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.draws = not _never_draws(dataset)
        """Whether getting a sample may draw."""
        self._at_once = _fetches_batches(dataset)
        self._with_seeds = _takes_seeds(dataset)

    def __getitem__(self, shard: Shard) -> Any:
        try:
            seed_draws(place_seed(shard.key, shard.place))
            return self.dataset[shard.indices[0]]
        except ManycardError as error:
            return _sent_whole(error)

    def __getitems__(self, shard: Shard) -> Any:
        try:
            return self._samples(shard)
        except ManycardError as error:
            return _sent_whole(error)

    def _samples(self, shard: Shard) -> Any:
        if not self.draws:
            return [self.dataset[index] for index in shard.indices]
        if self._with_seeds is not None:
            places = range(shard.place, shard.place + len(shard.indices))
            return self._with_seeds(shard.indices, [place_seed(shard.key, place) for place in places])
        if self._at_once:
            seed_draws(place_seed(shard.key, shard.place))
            return self.dataset.__getitems__(shard.indices)
        samples = []
        for place, index in enumerate(shard.indices, shard.place):
            seed_draws(place_seed(shard.key, place))
            samples.append(self.dataset[index])
        return samples


def _sent_whole(error: ManycardError) -> Refused:
    """In a worker, the error as it is; PyTorch would make another one from its text. Elsewhere it is raised."""
    if get_worker_info() is None:
        raise error
    return Refused(error)


def _never_draws(dataset: Any) -> bool:
    """Whether seeding would be in vain: it takes 11 us a sample, more than a TensorDataset takes to give one.

    A dataset says so of itself by a class attribute ``never_draws = True``.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in (TensorDataset, list, tuple, range) or getattr(type(dataset), "never_draws", False) is True


def _takes_seeds(dataset: Any) -> Any:
    """The dataset's method ``with_seeds``, where that gives what its ``__getitem__`` does: no subclass or wrapper has
    another one of either."""
    for kind in type(dataset).__mro__:
        has = ["__getitem__" in vars(kind), "with_seeds" in vars(kind)]
        if any(has):
            return dataset.with_seeds if all(has) else None
    return None


def _fetches_batches(dataset: Any) -> bool:
    """Whether the dataset itself fetches batches; a Subset only hands them on."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
