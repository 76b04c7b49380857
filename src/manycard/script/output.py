"""What a script's modules print while they run on several cards: the primary's output, once."""

from __future__ import annotations

from typing import Any, TextIO

from manycard.engine.threads import current_place

__all__ = ["PrimaryOutput"]


class PrimaryOutput:
    """A text stream that drops what is written from the threads of other cards than the primary.

    Everything else is the stream's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        place = current_place()
        return len(text) if place is not None and place.position else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
