"""Sums over intervals of time that may overlap. All take and give sorted, disjoint intervals, except `union`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["clip", "intersection", "length", "minus", "union"]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that any of them covers."""
    joined: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together."""
    return sum(end - start for start, end in intervals)


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """The part of them between `start` and `end`."""
    return [(max(a, start), min(b, end)) for a, b in intervals if b > start and a < end]


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time that both cover."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if end > start:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def minus(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time that `one` covers and `other` doesn't."""
    found = []
    for start, end in one:
        at = start
        for a, b in clip(other, start, end):
            if a > at:
                found.append((at, a))
            at = max(at, b)
        if at < end:
            found.append((at, end))
    return found
