"""How a global batch becomes shards: evenly, by weights, or by a function of the script's.

An engine holds one `Cutter`. The base cuts evenly; the variants override what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manycard.cards.card import Card
from manycard.engine.batches.batch import children, count_samples, cut
from manycard.engine.batches.sizes import shard_sizes, weighted_sizes
from manycard.engine.batches.split_check import Place, SplitCheck, rows_at, sample_places
from manycard.errors import BatchError

__all__ = ["Cut", "Cutter", "Split", "SplitCutter", "WeightedCutter"]

Split = Callable[[Any, Sequence[Card]], Sequence[Any]]
"""``split(batch, cards)`` -> one shard a card; None, or one that is empty, for a card that gets nothing."""


@dataclass(frozen=True)
class Cut:
    """A batch, cut."""

    samples: int
    shards: list[Any]
    """One a card."""
    sizes: list[int]
    """Samples of each shard."""


class Cutter:
    """Cuts evenly, the larger shards first."""

    changes = 0
    """Moves when batches of one size are cut into other sizes than before."""
    sizes: Sequence[int] = ()
    """Samples of each card in the newest batch."""
    counted = True
    """Whether the samples of the newest batch's shards could be counted."""

    def sizes_of(self, samples: int, cards: int) -> list[int]:
        """How many of a batch's samples each card gets."""
        return shard_sizes(samples, cards)

    def cut(self, batch: Any, cards: Sequence[Card]) -> Cut:
        """Cut `batch` for `cards`.

        Raises:
            BatchError: it is empty or can't be cut.
        """
        samples = count_samples(batch)
        if samples == 0:
            raise BatchError("the batch has 0 samples", fix="drop empty batches in the loader")
        sizes = self.sizes_of(samples, len(cards))
        self.sizes = sizes
        return Cut(samples, cut(batch, sizes), sizes)


class WeightedCutter(Cutter):
    """Cuts by weights.

    Args:
        weights: one a card, above 0.
        everyone: whether every card gets a sample of each batch that has enough.
    """

    def __init__(self, weights: Sequence[float], *, everyone: bool = False) -> None:
        self._everyone = everyone
        self.weights = tuple(weights)

    def sizes_of(self, samples: int, cards: int) -> list[int]:
        return weighted_sizes(samples, self.weights, everyone=self._everyone)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Cut by other weights from the next batch on."""
        self.weights = tuple(weights)
        self.changes += 1


class SplitCutter(Cutter):
    """Cuts by a function of the script's.

    Samples are counted where the batch has them: the first dimension of tensors, and lists with an item a sample.
    Where they can't be (an object that holds its tensors itself), each shard counts as one sample and `counted` is
    False: a mean loss has no right weight then.

    Args:
        split: the function.
        check: compare the first batches with their shards.
    """

    def __init__(self, split: Split, *, check: bool) -> None:
        self._split = split
        self._check = SplitCheck() if check else None

    def cut(self, batch: Any, cards: Sequence[Card]) -> Cut:
        """Cut `batch` as the script does.

        Raises:
            BatchError: there is not one shard a card, none holds a sample, or samples are lost or repeated.
        """
        shards = self._shards(batch, cards)
        places = sample_places(batch) or []
        counts = [_count(shard, places) for shard in shards]
        self.counted = all(count is not None for count in counts)
        sizes = [1 if count is None else count for count in counts]
        if not any(sizes):
            raise BatchError(
                f"split gave {len(shards)} shards without a sample in any of them",
                fix="return at least one shard that holds samples, and drop empty batches in the loader",
            )
        if self._check is not None and self.counted:
            self._check.look(batch, shards, sizes)
        self.sizes = sizes
        return Cut(sum(sizes), shards, sizes)

    def _shards(self, batch: Any, cards: Sequence[Card]) -> list[Any]:
        shards = self._split(batch, cards)
        fix = f"return a list of {len(cards)} shards, None for a card that gets nothing"
        if not isinstance(shards, list | tuple):
            raise BatchError(f"split returned a {type(shards).__name__}, not a list of shards", fix=fix)
        if len(shards) != len(cards):
            raise BatchError(f"split returned {len(shards)} shards for {len(cards)} cards", fix=fix)
        return list(shards)


def _count(shard: Any, places: Sequence[Place]) -> int | None:
    """The samples of a shard; None where they can't be counted.

    Args:
        places: where the batch has its samples. Two images of one size would pass for two fields of a batch otherwise.
    """
    if shard is None:
        return 0
    try:
        if children(shard) == []:
            return 0
        rows = next((rows for rows in (rows_at(shard, place) for place in places) if rows is not None), None)
        return count_samples(shard) if rows is None else len(rows)
    except BatchError:
        return None
