"""How figures are written, the same in the terminal and in HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "NOTHING",
    "change",
    "count",
    "difference",
    "energy",
    "loss",
    "memory",
    "percent",
    "ratio",
    "setting",
    "shares",
    "speed",
    "times",
    "workloads_of",
]

NOTHING = "–"
"""What stands where there is no figure."""


def speed(value: float | None) -> str:
    """Samples a second or milliseconds, to three digits or more: ``0.52``, ``18.4``, ``943``, ``12,547``."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(value: float | None) -> str:
    """A speed-up: ``1.93x``."""
    return NOTHING if value is None else f"{value:.2f}x"


def percent(value: float | None, digits: int = 0) -> str:
    """A share as percent: ``97 %``."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def ratio(value: float | None) -> str:
    """A ratio of two equal things: ``1.00``."""
    return NOTHING if value is None else f"{value:.2f}"


def loss(value: float | None) -> str:
    """A loss to four digits: ``0.03124``."""
    return NOTHING if value is None else f"{value:.4g}"


def difference(value: float | None) -> str:
    """A relative difference: ``0``, ``3.1e-07``, and from a thousandth on ``12.0 %``."""
    if value is None:
        return NOTHING
    if value >= 1e-3:
        return f"{100 * value:,.1f} %"
    return "0" if value == 0 else f"{value:.1e}"


def change(value: float | None) -> str:
    """A relative change: ``+3.1 %``, ``-12.0 %``."""
    return NOTHING if value is None else f"{100 * value:+.1f} %"


def count(value: float | None) -> str:
    """A whole number: ``2,048``."""
    return NOTHING if value is None else f"{value:,.0f}"


def energy(value: float | None) -> str:
    """Joules, to three digits: ``0.0714``, ``1.46``."""
    return NOTHING if value is None else f"{value:.3g}"


def setting(value: Any) -> str:
    """A setting's value as the command line has it."""
    if value is None:
        return NOTHING
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def memory(peaks: Sequence[float | None]) -> str:
    """Peak memory of every card: one figure where they agree to the MiB, a list for two cards, else a range."""
    known = [round(peak) for peak in peaks if peak is not None]
    if not known:
        return NOTHING
    if len(set(known)) == 1:
        return f"{known[0]:,}"
    if len(known) == 2:
        return f"{known[0]:,} / {known[1]:,}"
    return f"{min(known):,} to {max(known):,}"


def shares(parts: Sequence[float] | None) -> str:
    """Each card's part of a batch: ``75 / 25 %``."""
    return NOTHING if not parts else f"{' / '.join(f'{100 * part:.0f}' for part in parts)} %"


def workloads_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows by workload, in the order in which they came."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row["workload"]), []).append(row)
    return groups
