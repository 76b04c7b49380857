"""What rank 0 does to files, told to the other ranks just before it does it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from manycard.script.files.files import Files, mode_of

__all__ = ["Journal", "JournaledFiles"]


class Journal:
    """What rank 0 has made and removed in this run, in a file that the other ranks follow.

    Args:
        path: the file; made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
        self._read = 0
        self._made: set[str] = set()
        self._gone: set[str] = set()

    def note(self, *, made: Sequence[str] = (), gone: Sequence[str] = ()) -> None:
        """Write down what is about to be made and removed."""
        if made or gone:
            os.write(self._file, (json.dumps([list(made), list(gone)]) + "\n").encode())

    @property
    def made(self) -> set[str]:
        """Paths that rank 0 has made."""
        self._follow()
        return self._made

    @property
    def gone(self) -> set[str]:
        """Paths that rank 0 has removed."""
        self._follow()
        return self._gone

    def _follow(self) -> None:
        size = os.fstat(self._file).st_size
        if size == self._read:
            return
        whole, end, _ = os.pread(self._file, size - self._read, self._read).rpartition(b"\n")
        self._read += len(whole) + len(end)
        for line in whole.splitlines():
            made, gone = json.loads(line)
            self._made.update(made)
            self._gone.update(gone)


class JournaledFiles(Files):
    """Rank 0's files: the real ones, with a journal of what it makes and removes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def _note_made(self, path: str, gone: Sequence[str] = ()) -> None:
        self._journal.note(made=[] if mode_of(path) is not None else [path], gone=gone)

    def to_write(self, path: str, *, keep: bool, create: bool, exclusive: bool) -> str:
        if create:
            self._note_made(path)
        return path

    def make_folder(self, path: str, mode: int) -> None:
        self._note_made(path)
        super().make_folder(path, mode)

    def remove(self, path: str) -> None:
        self._journal.note(gone=[path])
        super().remove(path)

    def remove_folder(self, path: str) -> None:
        self._journal.note(gone=[path])
        super().remove_folder(path)

    def remove_tree(self, path: str, ignore_errors: bool) -> None:
        self._journal.note(gone=[path])
        super().remove_tree(path, ignore_errors)

    def rename(self, source: str, target: str) -> None:
        self._note_made(target, gone=[source])
        super().rename(source, target)

    def link(self, source: str, target: str, *, symbolic: bool) -> None:
        self._note_made(target)
        super().link(source, target, symbolic=symbolic)
