"""Names for parts of a step in a profiler's trace, while one is recorded; nothing otherwise.

A span is called ``manycard/WHAT`` or ``manycard/WHAT@CARD``. Outside a recording, `span` is one look at a variable.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

__all__ = ["SPAN", "recording", "span"]

SPAN = "manycard/"
_NOTHING = nullcontext()
_on = False


def recording(on: bool) -> None:
    """Begin or end to name parts of steps."""
    global _on
    _on = on


def span(what: str, card: str = "") -> AbstractContextManager[object]:
    """The context for a part of a step."""
    if not _on:
        return _NOTHING
    return record_function(f"{SPAN}{what}@{card}" if card else f"{SPAN}{what}")
