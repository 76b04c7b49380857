"""Files of a script that runs in every rank: rank 0 writes them, the others only seem to.

Every rank runs the same script, and all of them would write the same files. Rank 0's files are the script's. Another
rank's go to a folder of its own (the *overlay*), in which it finds again what it has written.

Behaviour in ranks above 0:
    * A path that this rank has written, made or renamed is in the overlay; one that it has removed is gone. Everything
      else is what is there.
    * A path that rank 0 has made in this run is not there for another rank until it has made it too: ``if not
      os.path.exists(path): make it`` does the same in every rank, however far rank 0 is ahead. Rank 0 notes what it
      makes and removes in a *journal* just before it does.
    * Special files (``/dev``, pipes), caches that are made to be shared (`shared`), and temporary files, whose names
      differ from rank to rank, are left alone.

What rank 0 overwrites or removes of what was there before the run, the others can see to be changed, since they read
the same files.

Not covered: files that a C library or a subprocess writes by itself (HDF5, SQLite); every rank writes those.
"""

from __future__ import annotations

import errno
import getpass
import io
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from manycard.script.files.files import Files, Real, is_real_folder_at, mode_of
from manycard.script.files.journal import Journal

__all__ = ["OverlayFiles", "shared"]


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _exists(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def shared() -> list[str]:
    """Folders that processes share by design, or that aren't the script's."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    named = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME")]
    home = os.path.expanduser("~")
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return [*filter(None, named), cache, compiled, os.path.join(home, ".triton"), "/dev", "/proc", "/sys"]


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

    def leave_alone(self, path: str) -> None:
        self._left_alone += (f"{path}{os.sep}",)

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
        return path if mode_of(path) is not None else None

    def _is_folder(self, path: str) -> bool:
        seen = self._seen(path)
        return seen is not None and is_real_folder_at(seen)

    def _take(self, path: str) -> str:
        """A place in the overlay for `path`, whose folder must be there."""
        if not self._is_folder(os.path.dirname(path)):
            raise _missing(path)
        place = self._place(path)
        Real.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def to_read(self, path: str) -> str:
        seen = self._seen(path)
        if seen is None:
            raise _missing(path)
        return seen

    def to_write(self, path: str, *, keep: bool, create: bool, exclusive: bool) -> str:
        seen = self._seen(path)
        mode = mode_of(seen) if seen is not None else None
        if mode is not None and exclusive:
            raise _exists(path)
        if mode is None and not create:
            raise _missing(path)
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return path  # a device or a pipe; or a folder, which open refuses
        if seen is not None and not Real.access(seen, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        place = self._take(path)
        if seen is not None and seen != place and keep:
            _copy(seen, place)
        self._own.add(path)
        return place

    def make_folder(self, path: str, mode: int) -> None:
        if self._seen(path) is not None:
            raise _exists(path)
        Real.makedirs(self._take(path), exist_ok=True)
        self._own.add(path)

    def remove(self, path: str) -> None:
        seen = self._seen(path)
        if seen is None:
            self._follow_removal(path)
        elif stat.S_ISDIR(mode_of(seen) or 0):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        elif path in self._own:
            Real.remove(seen)
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
        Real.rmtree(self._place(path), ignore_errors=True)
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
        if is_real_folder_at(place) and not is_real_folder_at(seen):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if source in self._own:
            Real.replace(seen, place)
        elif is_real_folder_at(seen):
            moved += self._copy_tree(source, target)
        else:
            _copy(seen, place)
        self._close(source)
        self._own.update(name for _, name in moved)
        self._own.add(target)

    def _copy_tree(self, source: str, target: str) -> list[tuple[str, str]]:
        """Copy what this rank sees of a real folder to the overlay's place for `target`."""
        Real.makedirs(self._place(target), exist_ok=True)
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
        (Real.symlink if symbolic else _copy)(source if symbolic else self.to_read(os.path.abspath(source)), place)
        self._own.add(target)

    def names_in(self, path: str) -> list[str]:
        if not self._is_folder(path):
            seen = self.to_read(path)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), seen)
        below = f"{path.rstrip(os.sep)}{os.sep}"
        real = Real.listdir(path) if is_real_folder_at(path) else []
        names = dict.fromkeys(name for name in real if self._seen(below + name) is not None)
        names.update(dict.fromkeys(own[len(below) :] for own in sorted(self._own) if own.startswith(below)))
        return [name for name in names if os.sep not in name]

    def keeps_attributes(self, path: str) -> str | None:
        seen = self.to_read(path)
        return seen if path in self._own else None


def _copy(source: str, target: str) -> None:
    with io.FileIO(source, "rb") as read, io.FileIO(target, "wb") as written:
        shutil.copyfileobj(read, written)
