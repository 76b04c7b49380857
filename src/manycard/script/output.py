"""What a script's modules print while they run on several cards: the primary's output, once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from manycard.engine.driving.threads import current_place

__all__ = ["PrimaryOutput", "printing_once"]


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


@contextlib.contextmanager
def printing_once() -> Iterator[None]:
    """In this context only the primary's modules print; streams that the script puts in place meanwhile stay."""
    standing_in = {name: PrimaryOutput(getattr(sys, name)) for name in ("stdout", "stderr")}
    originals = {name: getattr(sys, name) for name in standing_in}
    for name, stream in standing_in.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in standing_in.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, originals[name])
