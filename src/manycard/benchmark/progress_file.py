"""How far a row is, for the process that waits for it.

The newest step stands in the file, in a fixed width, and each step overwrites the one before: that costs about a
microsecond, so every step is there, the last one before a hang too.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["ProgressFile", "last_progress"]


class ProgressFile:
    """Holds ``done total``; a context manager.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_CREAT | os.O_WRONLY)

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def note(self, done: int, total: int) -> None:
        """`done` of about `total` steps were handed to the cards."""
        if self._file is not None:
            os.pwrite(self._file, b"%20d %20d\n" % (done, total), 0)


def last_progress(path: Path) -> tuple[int, int] | None:
    """The newest step; None where there is none yet."""
    words = path.read_text(encoding="utf-8").split() if path.exists() else []
    return (int(words[0]), int(words[1])) if len(words) == 2 else None
