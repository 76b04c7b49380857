"""Comparing what two runs of a script printed.

Behaviour:
    * Numbers are compared as numbers: equal when they differ by at most ``tolerance``, or by that share of the
      larger one. Spaces in front of a number are padding and may differ.
    * Two integers are counts (steps, samples, shapes) and must be equal.
    * Everything else is text and must be equal, line by line. ``nan`` and ``inf`` are text.
    * Space at the ends of lines, and empty lines at the end of the log, are ignored.
"""

from __future__ import annotations

import re

__all__ = ["numbers_in", "same_log"]

_NUMBER = re.compile(r"[ \t]*(?<![A-Za-z_\d.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_INTEGER = re.compile(r"[-+]?\d+")
_ROUNDING = 1e-6
"""0.1235 - 0.1234 is a little more than 1e-4 in binary; a last digit that flips is still within 1e-4."""


def numbers_in(log: str) -> list[str]:
    """The numbers printed, in order, as they were printed."""
    return [match.strip() for match in _NUMBER.findall(log)]


def same_log(a: str, b: str, tolerance: float = 1e-4) -> str | None:
    """Compare two logs; gives None when they are the same, else the first difference in words."""
    lines_a, lines_b = _lines(a), _lines(b)
    for number, (line_a, line_b) in enumerate(zip(lines_a, lines_b, strict=False), start=1):
        difference = _compare_lines(line_a, line_b, tolerance)
        if difference is not None:
            return f"line {number}: {difference}\n  a: {line_a}\n  b: {line_b}"
    if len(lines_a) != len(lines_b):
        shorter = min(len(lines_a), len(lines_b))
        longer, name = (lines_a, "a") if len(lines_a) > shorter else (lines_b, "b")
        return f"line {shorter + 1}: only {name} has it\n  {name}: {longer[shorter]}"
    return None


def _lines(log: str) -> list[str]:
    return [line.rstrip() for line in log.rstrip().splitlines()]


def _compare_lines(a: str, b: str, tolerance: float) -> str | None:
    if a == b:
        return None
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return "the text differs"
    for one, other in zip(numbers_in(a), numbers_in(b), strict=True):
        if not _close(one, other, tolerance):
            return f"{one} and {other} differ by {abs(float(one) - float(other)):.3g}"
    return None


def _close(one: str, other: str, tolerance: float) -> bool:
    if _INTEGER.fullmatch(one) and _INTEGER.fullmatch(other):
        return int(one) == int(other)
    a, b = float(one), float(other)
    return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)) * (1 + _ROUNDING)
