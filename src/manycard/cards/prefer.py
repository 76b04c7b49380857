"""Which of several cards go best together.

Preferred, in this order: cards nobody else uses; equal models, since the slowest card sets the pace of all;
faster cards; faster links, the slowest pair first, since an all-reduce runs at the pace of its slowest link;
more free memory; lower numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

from manycard.cards.inventory import CardInfo
from manycard.cards.links import Links
from manycard.cards.memory_size import GIB

__all__ = ["best_equal_group", "best_of", "model_of"]

_MOST_TRIED = 16
"""With more cards than this not every subset is tried, but those grown from each card by its fastest links."""


def model_of(info: CardInfo) -> tuple[str, int]:
    """What makes cards equal: the product name and the memory, in whole GiB."""
    return info.name, round((info.memory_total or 0) / GIB)


def best_equal_group(infos: Sequence[CardInfo], among: Collection[int], count: int | None) -> list[int]:
    """Places of the equal cards that together compute most.

    Args:
        infos: cards in torch's order.
        among: the places in it that may be used; at least one.
        count: how many cards will be used at most; None for all.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for place in sorted(among):
        groups.setdefault(model_of(infos[place]), []).append(place)
    speed = _speeds(infos)

    def throughput(group: list[int]) -> float:
        used = len(group) if count is None else min(count, len(group))
        return used * speed[group[0]]

    return max(groups.values(), key=throughput)  # the first of equals: the one with the lowest number


def best_of(
    infos: Sequence[CardInfo], among: Collection[int], count: int, links: Links, troubled: Collection[int] = ()
) -> list[int]:
    """Places of the `count` cards that go best together, in ascending order.

    Args:
        infos: cards in torch's order.
        among: the places that may be used; at least `count`.
        count: how many to choose.
        links: how the cards are joined.
        troubled: places of cards that are busy or short of memory; used last.
    """
    speed = _speeds(infos)
    ranks = [[link.rank for link in row] for row in links.matrix(infos)]

    def badness(chosen: tuple[int, ...]) -> tuple[int, int, float, int, int, int, tuple[int, ...]]:
        joins = [ranks[one][other] for one, other in combinations(chosen, 2)]
        return (
            sum(place in troubled for place in chosen),
            len({model_of(infos[place]) for place in chosen}),
            -min(speed[place] for place in chosen),
            max(joins, default=0),
            sum(joins),
            -sum(infos[place].memory_free or 0 for place in chosen),
            chosen,
        )

    places = sorted(among)
    if len(places) <= _MOST_TRIED:
        best: tuple[int, ...] = min(combinations(places, count), key=badness)
        return list(best)
    grown: list[tuple[int, ...]] = []
    for seed in places:
        chosen: tuple[int, ...] = (seed,)
        while len(chosen) < count:
            larger = [tuple(sorted((*chosen, place))) for place in places if place not in chosen]
            chosen = min(larger, key=badness)
        grown.append(chosen)
    best = min(grown, key=badness)
    return list(best)


def _speeds(infos: Sequence[CardInfo]) -> list[float]:
    """How fast each card is beside the others: cores x clock, or the memory where those aren't known of all."""
    if all(info.cores and info.clock for info in infos):
        return [float((info.cores or 0) * (info.clock or 0)) for info in infos]
    if all(info.memory_total for info in infos):
        return [float(info.memory_total or 0) for info in infos]
    return [1.0] * len(infos)
