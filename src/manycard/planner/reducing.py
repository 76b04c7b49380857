"""What it costs to sum gradients over cards, from the links' measured latency and bandwidth.

Between measured sizes the cost is interpolated; beyond the largest it grows by the last two's slope. From the number
of cards that were measured to another one, the part that grows with size is scaled by what a ring sends,
``2 (n - 1) / n`` of the data, and the rest by the depth of a tree, ``log2(n)``: NCCL's two algorithms. Between
machines a ring over machines is added, at the network's speed.
"""

from __future__ import annotations

import math
from itertools import pairwise

from manycard.planner.facts import LinkFacts

__all__ = ["all_reduce_ms", "bus_gb_per_s", "copy_ms"]

_MIB = 2**20
_NETWORK_LATENCY_MS = 0.05
"""One more all-reduce's start over InfiniBand or RoCE."""
_RING_SHARE = 0.7
"""The part of a link's stated speed that NCCL's all-reduce reaches: 308 of 450 GB/s on two H200."""


def all_reduce_ms(links: LinkFacts, mib: float, cards: int, machines: int = 1) -> float | None:
    """The time of one all-reduce of `mib` over `cards` of each of `machines`; None where no link is known."""
    if cards * machines < 2 or mib == 0:
        return 0.0
    inside = 0.0 if cards == 1 else _inside(links, mib, cards)
    if inside is None or machines == 1:
        return inside
    if links.network_gb_per_s is None:
        return None
    sent = _ring(machines) * mib * _MIB
    return inside + _NETWORK_LATENCY_MS * math.log2(machines) + sent / (links.network_gb_per_s * 1e6)


def copy_ms(links: LinkFacts, mib: float) -> float:
    """The time of one large copy from card to card; 0 where no link is known."""
    return mib * _MIB / (links.copy_gb_per_s * 1e6) if links.copy_gb_per_s else 0.0


def bus_gb_per_s(links: LinkFacts) -> float | None:
    """What a ring sends in a second over each link, from the largest all-reduces that were measured."""
    if len(links.all_reduce) < 2:
        return None if links.copy_gb_per_s is None else _RING_SHARE * links.copy_gb_per_s
    (small, short), (large, long) = sorted(links.all_reduce)[-2:]
    return _ring(links.ranks) * (large - small) * _MIB / max(long - short, 1e-9) / 1e6


def _inside(links: LinkFacts, mib: float, cards: int) -> float | None:
    points = sorted(links.all_reduce)
    if not points:
        speed = bus_gb_per_s(links)
        if not speed:
            return None
        latency = 0.03 if links.p2p else 0.06
        return latency * math.log2(cards) + _ring(cards) * mib * _MIB / (speed * 1e6)
    latency = points[0][1]
    grown = max(_interpolated(points, mib) - latency, 0.0)
    measured = max(links.ranks, 2)
    return latency * math.log2(cards) / math.log2(measured) + grown * _ring(cards) / _ring(measured)


def _interpolated(points: list[tuple[float, float]], mib: float) -> float:
    if len(points) == 1 or mib <= points[0][0]:
        return points[0][1] * max(1.0, mib / points[0][0])
    for (low, short), (high, long) in pairwise(points):
        if mib <= high:
            return short + (long - short) * (mib - low) / (high - low)
    (low, short), (high, long) = points[-2:]
    return long + (long - short) * (mib - high) / (high - low)


def _ring(cards: int) -> float:
    return 2 * (cards - 1) / cards
