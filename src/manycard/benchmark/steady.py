"""Where warm-up ends: found from the times themselves.

The first steps of a training are slower than the rest, for reasons that differ in kind and length: allocators that
grow, cuDNN's choice among algorithms, compilation, recording of graphs, loaders that start. `find_steady` cuts off what
makes the mean of the rest least certain (the marginal standard error rule, MSER): the cut at which variance / number
of what remains is smallest. Source: K. P. White, An effective truncation heuristic for bias reduction in simulation
output, Simulation 69(6), 1997.

Behaviour:
    * A series that only noise moves is kept from (nearly) its beginning.
    * A clearly better cut in the second half means that the series still changes: there is no steady state yet.
    * One stray time (another process, a graph compared with an eager step) is no change of state: a time that is
      longer than both its neighbours by `_STRAY` counts as the longer of them, and none as more than `_MOST` medians.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

__all__ = ["find_steady", "quartiles"]

_FEWEST = 4
"""Times below which nothing can be told."""
_MOST = 3.0
_STRAY = 1.2
_CHANCE = 2.0


def find_steady(times: Sequence[float]) -> int | None:
    """The first of `times` that belongs to the steady state; None where there is none yet.

    Args:
        times: of equal work, in order.

    Example:
        >>> find_steady([90.0, 31.0, 10.1, 10.0, 10.2, 9.9, 10.0, 10.1])
        2
        >>> find_steady([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) is None
        True
    """
    if len(times) < _FEWEST:
        return None
    most = _MOST * median(times[len(times) // 2 :])
    values = [min(time, most) for time in _calmed(times)]
    fewest = max(_FEWEST // 2, len(values) // 4)
    errors = {}
    total = squares = 0.0
    for place in range(len(values) - 1, -1, -1):
        total += values[place]
        squares += values[place] ** 2
        number = len(values) - place
        if number >= fewest:
            errors[place] = max(squares / number - (total / number) ** 2, 0.0) / number
    # Rounding makes the variance of equal times a tiny number; the earliest of equally good cuts is meant.
    scale = 1e-12 * most**2
    early = [place for place in errors if place <= len(values) // 2]
    best = min(early, key=lambda place: (round(errors[place] / scale), place))
    # Of few times, chance alone makes some late cut look a little better.
    return best if errors[best] <= _CHANCE * min(errors.values()) + scale else None


def _calmed(times: Sequence[float]) -> list[float]:
    """`times` without stray ones; the first is never one, since it may be all of the warm-up."""
    calm = list(times)
    for place in range(1, len(calm)):
        beside = max([calm[place - 1], *times[place + 1 : place + 2]])
        if calm[place] > _STRAY * beside:
            calm[place] = beside
    return calm


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; the smallest and the largest of fewer than four values.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (2.0, 4.0)
    """
    if len(values) < 4:
        return min(values), max(values)
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third
