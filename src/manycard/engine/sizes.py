"""How many samples each card gets."""

from __future__ import annotations

__all__ = ["shard_sizes"]


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
