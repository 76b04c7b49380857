"""How far a row is, for the process that waits for it."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["ProgressFile", "last_progress"]


class ProgressFile:
    """Lines of ``done total``, at most ten a second and the last in any case; a context manager.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path is not None else None
        self._next = 0.0
        self._unwritten: tuple[int, int] | None = None

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            if self._unwritten is not None:
                self._write(*self._unwritten)
            self._file.close()
            self._file = None

    def note(self, done: int, total: int) -> None:
        """`done` of about `total` steps were handed to the cards."""
        now = time.perf_counter()
        self._unwritten = (done, total)
        if self._file is not None and now >= self._next:
            self._write(done, total)
            self._next = now + 0.1

    def _write(self, done: int, total: int) -> None:
        print(done, total, file=self._file, flush=True)
        self._unwritten = None


def last_progress(path: Path) -> tuple[int, int] | None:
    """The newest line of the file; None where there is none yet."""
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is unfinished
    if not lines:
        return None
    done, total = lines[-1].split()
    return int(done), int(total)
