"""How many samples each card gets."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

__all__ = ["shard_sizes", "weighted_sizes"]


def shard_sizes(samples: int, parts: int) -> list[int]:
    """Cut `samples` into `parts` shards as even as can be, the larger ones first.

    A batch smaller than the number of cards leaves the last cards with 0. Every strategy cuts by this rule, so
    that card i of one strategy sees what card i of another sees.

    Example:
        >>> shard_sizes(10, 4), shard_sizes(2, 3)
        ([3, 3, 2, 2], [1, 1, 0])
    """
    base, more = divmod(samples, parts)
    return [base + (part < more) for part in range(parts)]


def weighted_sizes(samples: int, weights: Sequence[float], *, everyone: bool = False) -> list[int]:
    """Cut `samples` into shards by weight, whole samples each, by the method of largest remainders.

    Equal weights give the sizes of `shard_sizes`. The first card gets a sample of every batch, whatever its weight:
    what forward writes (BatchNorm statistics, counters) is kept from there.

    Args:
        weights: one a card, all above 0; only their ratios count.
        everyone: give every card a sample, where there are enough, so that all can be timed.

    Example:
        >>> weighted_sizes(10, [2, 1]), weighted_sizes(4, [5, 2, 1]), weighted_sizes(1, [1, 3])
        ([7, 3], [3, 1, 0], [1, 0])
    """
    return list(_weighted_sizes(samples, tuple(weights), everyone))


@lru_cache(maxsize=256)
def _weighted_sizes(samples: int, weights: tuple[float, ...], everyone: bool) -> tuple[int, ...]:
    exact = [Fraction(weight) for weight in weights]  # in floats, equal remainders would differ in the last digit
    quotas = [samples * weight / sum(exact) for weight in exact]
    sizes = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda card: (sizes[card] - quotas[card], card))
    for card in by_remainder[: samples - sum(sizes)]:
        sizes[card] += 1
    must_have = len(sizes) if everyone and samples >= len(sizes) else min(samples, 1)
    for card in range(must_have):
        if not sizes[card]:
            sizes[max(range(len(sizes)), key=lambda other: sizes[other])] -= 1
            sizes[card] = 1
    return tuple(sizes)
