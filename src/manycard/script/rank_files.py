"""Files of a script that runs in every rank: rank 0 writes them, the others only seem to.

Every rank runs the same script, and all of them would write the same files. Rank 0's files are the script's. Another
rank's go to a folder of its own (the *overlay*), in which it finds again what it has written.

Behaviour in ranks above 0:
    * A path that this rank has written, made or renamed is in the overlay; one that it has removed is gone. Everything
      else is what is there.
    * A path that rank 0 has made in this run is not there for another rank until it has made it too: ``if not
      os.path.exists(path): make it`` does the same in every rank, however far rank 0 is ahead. Rank 0 notes what it
      makes and removes in a *journal* just before it does.
    * Special files (``/dev``, pipes), caches that are made to be shared (`shared`), and temporary files, for which each
      rank has a folder, are left alone.

Not covered: files that a C library or a subprocess writes by itself (HDF5, SQLite); every rank writes those.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Files", "Journal", "JournaledFiles", "OverlayFiles", "shared"]


class _Real:
    """The functions themselves, whatever stands in for them later."""

    lstat = staticmethod(os.lstat)
    stat = staticmethod(os.stat)
    listdir = staticmethod(os.listdir)
    mkdir = staticmethod(os.mkdir)
    makedirs = staticmethod(os.makedirs)
    remove = staticmethod(os.remove)
    rmdir = staticmethod(os.rmdir)
    rmtree = staticmethod(shutil.rmtree)
    replace = staticmethod(os.replace)
    symlink = staticmethod(os.symlink)
    link = staticmethod(os.link)
    access = staticmethod(os.access)


def _mode(path: str) -> int | None:
    """What is there; None for nothing."""
    try:
        return _Real.lstat(path).st_mode
    except (OSError, ValueError):
        return None


def _is_real_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(_Real.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _exists(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def shared() -> list[str]:
    """Folders that processes share by design, or that aren't the script's."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    named = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME")]
    return [*filter(None, named), cache, "/dev", "/proc", "/sys"]


class Files:
    """What becomes of a rank's operations on paths: the base does them. Paths are absolute."""

    def covers(self, path: str) -> bool:
        """Whether operations on `path` come here at all."""
        return True

    def is_real_folder(self, path: str) -> bool:
        """Whether there is a folder, made by whomever."""
        return _is_real_folder(path)

    def to_read(self, path: str) -> str:
        """Where to read what the script calls `path`."""
        return path

    def to_write(self, path: str, *, keep: bool, create: bool, exclusive: bool) -> str:
        """Where to write what the script calls `path`.

        Args:
            keep: whether what is in it stays.
            create: whether it is made where it isn't there.
            exclusive: whether it must not be there.
        """
        return path

    def make_folder(self, path: str, mode: int) -> None:
        """Make a folder."""
        _Real.mkdir(path, mode)

    def remove(self, path: str) -> None:
        """Remove a file."""
        _Real.remove(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        _Real.rmdir(path)

    def remove_tree(self, path: str, ignore_errors: bool) -> None:
        """Remove a folder with what is in it."""
        _Real.rmtree(path, ignore_errors)

    def rename(self, source: str, target: str) -> None:
        """Rename, over what is at `target`."""
        _Real.replace(source, target)

    def link(self, source: str, target: str, *, symbolic: bool) -> None:
        """Make a link at `target`."""
        (_Real.symlink if symbolic else _Real.link)(source, target)

    def names_in(self, path: str) -> list[str] | None:
        """What is in a folder; None where the folder itself tells."""
        return None

    def keeps_attributes(self, path: str) -> str | None:
        """Where to change times and permissions of `path`; None to leave them."""
        return path


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
        self._journal.note(made=[] if _mode(path) is not None else [path], gone=gone)

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


class OverlayFiles(Files):
    """The files of a rank above 0.

    Args:
        folder: where the overlay is made.
        journal: what rank 0 does.
        left_alone: folders whose files are the real ones.
    """

    def __init__(self, folder: Path, journal: Journal, left_alone: Sequence[str] = ()) -> None:
        self._root = str(folder)
        self._journal = journal
        self._left_alone = tuple(f"{os.path.abspath(path)}{os.sep}" for path in [*left_alone, self._root])
        self._own: set[str] = set()
        self._closed: set[str] = set()
        self._shown: set[str] = set()

    def covers(self, path: str) -> bool:
        return not f"{path}{os.sep}".startswith(self._left_alone)

    def _place(self, path: str) -> str:
        return self._root + path

    def _seen(self, path: str) -> str | None:
        """Where what this rank sees at `path` is; None where it sees nothing."""
        if path in self._own:
            return self._place(path)
        if path in self._journal.made and path not in self._shown:
            return None
        above = path
        while self._closed and above != os.path.dirname(above):
            if above in self._closed:
                return None
            above = os.path.dirname(above)
        return path if _mode(path) is not None else None

    def _is_folder(self, path: str) -> bool:
        seen = self._seen(path)
        return seen is not None and _is_real_folder(seen)

    def _take(self, path: str) -> str:
        """A place in the overlay for `path`, whose folder must be there."""
        if not self._is_folder(os.path.dirname(path)):
            raise _missing(path)
        place = self._place(path)
        _Real.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def to_read(self, path: str) -> str:
        seen = self._seen(path)
        if seen is None:
            raise _missing(path)
        return seen

    def to_write(self, path: str, *, keep: bool, create: bool, exclusive: bool) -> str:
        seen = self._seen(path)
        mode = _mode(seen) if seen is not None else None
        if mode is not None and exclusive:
            raise _exists(path)
        if mode is None and not create:
            raise _missing(path)
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return path  # a device or a pipe; or a folder, which open refuses
        if seen is not None and not _Real.access(seen, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        place = self._take(path)
        if seen is not None and seen != place and keep:
            _copy(seen, place)
        self._own.add(path)
        return place

    def make_folder(self, path: str, mode: int) -> None:
        if self._seen(path) is not None:
            raise _exists(path)
        _Real.makedirs(self._take(path), exist_ok=True)
        self._own.add(path)

    def remove(self, path: str) -> None:
        seen = self._seen(path)
        if seen is None:
            self._follow_removal(path)
        elif stat.S_ISDIR(_mode(seen) or 0):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        elif path in self._own:
            _Real.remove(seen)
        self._close(path)

    def _follow_removal(self, path: str) -> None:
        """Let this rank remove what rank 0 has removed before it."""
        if path not in self._journal.gone or path in self._closed:
            raise _missing(path)

    def _close(self, path: str) -> None:
        self._closed.add(path)
        self._shown.discard(path)
        below = f"{path}{os.sep}"
        self._own = {own for own in self._own if own != path and not own.startswith(below)}

    def remove_folder(self, path: str) -> None:
        if self.names_in(path) if self._seen(path) is not None else False:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self.remove_tree(path, ignore_errors=False)

    def remove_tree(self, path: str, ignore_errors: bool) -> None:
        if self._seen(path) is None:
            try:
                self._follow_removal(path)
            except FileNotFoundError:
                if not ignore_errors:
                    raise
                return
        _Real.rmtree(self._place(path), ignore_errors=True)
        self._close(path)

    def rename(self, source: str, target: str) -> None:
        seen = self._seen(source)
        place = self._take(target)
        if seen is None:
            # Rank 0 has renamed it before: what is at the target now is what was meant.
            self._follow_removal(source)
            self._close(source)
            self._own.discard(target)
            self._closed.discard(target)
            self._shown.add(target)
            return
        moved = [(own, target + own[len(source) :]) for own in self._own if own.startswith(f"{source}{os.sep}")]
        if _is_real_folder(place) and not _is_real_folder(seen):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if source in self._own:
            _Real.replace(seen, place)
        elif _is_real_folder(seen):
            moved += self._copy_tree(source, target)
        else:
            _copy(seen, place)
        self._close(source)
        self._own.update(name for _, name in moved)
        self._own.add(target)

    def _copy_tree(self, source: str, target: str) -> list[tuple[str, str]]:
        """Copy what this rank sees of a real folder to the overlay's place for `target`."""
        _Real.makedirs(self._place(target), exist_ok=True)
        copied = []
        for name in self.names_in(source) or ():
            inner, new = os.path.join(source, name), os.path.join(target, name)
            copied.append((inner, new))
            if self._is_folder(inner):
                copied += self._copy_tree(inner, new)
            else:
                _copy(self.to_read(inner), self._place(new))
        return copied

    def link(self, source: str, target: str, *, symbolic: bool) -> None:
        if self._seen(target) is not None:
            raise _exists(target)
        place = self._take(target)
        (_Real.symlink if symbolic else _copy)(source if symbolic else self.to_read(os.path.abspath(source)), place)
        self._own.add(target)

    def names_in(self, path: str) -> list[str]:
        if not self._is_folder(path):
            seen = self.to_read(path)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), seen)
        below = f"{path.rstrip(os.sep)}{os.sep}"
        real = _Real.listdir(path) if _is_real_folder(path) else []
        names = dict.fromkeys(name for name in real if self._seen(below + name) is not None)
        names.update(dict.fromkeys(own[len(below) :] for own in sorted(self._own) if own.startswith(below)))
        return [name for name in names if os.sep not in name]

    def keeps_attributes(self, path: str) -> str | None:
        seen = self.to_read(path)
        return seen if path in self._own else None


def _copy(source: str, target: str) -> None:
    with io.FileIO(source, "rb") as read, io.FileIO(target, "wb") as written:
        shutil.copyfileobj(read, written)
