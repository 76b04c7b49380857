"""Words for what is told of calls: errors of trials as parts of a reason ("it can't be cut: ..."), numbers, lists."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["counted", "first_line", "in_words", "listed", "ordinal"]

_LONGEST = 160
"""Characters of an error's first line that are quoted."""
_WORDS = (
    (r"index .*out of (bounds|range)|indices.*out of range", "forward uses indices that reach beyond its part"),
    (
        r"shape '\[.*\]' is invalid for input|expanded size of the tensor|split_sizes to sum",
        "forward gives a tensor a fixed size, which a part of the batch doesn't have",
    ),
    (
        r"must match|to match target|to match weight|cannot be multiplied|does not match the shape|does not broadcast"
        r"|to be equal|equal size|Expected (hidden|size for first|input batch_size)|same batch|shape mismatch",
        "a part of the batch doesn't fit what it meets in forward, which has the size of the whole batch",
    ),
)
"""What PyTorch's messages say of a batch that was cut."""


def in_words(error: Exception) -> str:
    """Why a part of a batch can't be computed, from what computing it raised."""
    line = first_line(error)
    return next((words for pattern, words in _WORDS if re.search(pattern, line)), line)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class where it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][:_LONGEST]}..."


def counted(number: int, what: str = "call") -> str:
    """`number` of something, such as ``1 call`` and ``2 calls``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, and so on."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def listed(words: Iterable[object]) -> str:
    """Words as a sentence has them: ``a``, ``a and b``, ``a, b and c``; nothing where there are none."""
    found = list(map(str, words))
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
