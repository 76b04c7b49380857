"""An error that a trial call has raised, in words that fit a reason: "it can't be cut: ..."."""

from __future__ import annotations

import re

__all__ = ["first_line", "in_words"]

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
