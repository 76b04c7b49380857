"""Amounts of memory, between bytes and what people write.

A string is a number and a unit: ``2GiB``, ``512 MiB``, ``1.5GB``; binary and decimal units are told apart.
A negative amount, a bare fraction or an unknown unit raises CardsError with the setting and the value.
"""

from __future__ import annotations

import re

from manycard.errors import CardsError

__all__ = ["GIB", "MIB", "in_words", "parse_size"]

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_WRITTEN = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)")


def parse_size(value: int | str, *, setting: str) -> int:
    """Bytes in an amount of memory.

    Args:
        value: bytes, or a string such as ``2GiB``.
        setting: what the user calls it, for the error.

    Raises:
        CardsError: the value is no amount of memory.

    Example:
        >>> parse_size("1.5GiB", setting="min_free"), parse_size(4096, setting="min_free")
        (1610612736, 4096)
    """
    fix = "write bytes as a whole number, or a string such as '2GiB' or '500MB'"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        written = _WRITTEN.fullmatch(value.strip().lower())
        if written and written[2] in _UNITS:
            amount, unit = written[1], _UNITS[written[2]]
            if "." not in amount:
                return int(amount) * unit
            if unit > 1:
                return round(float(amount) * unit)
    raise CardsError(setting, value, "it is no amount of memory", fix=fix)


def in_words(size: int | None) -> str:
    """An amount of memory as a message shows it.

    Example:
        >>> in_words(151_000_000_000), in_words(5 * 1024**2), in_words(3000), in_words(None)
        ('140.6 GiB', '5 MiB', '3 KiB', 'unknown')
    """
    if size is None:
        return "unknown"
    if 0 < size < MIB:
        return f"{max(size / KIB, 1):.0f} KiB"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
