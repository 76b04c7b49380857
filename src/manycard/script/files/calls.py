"""Stand-ins for Python's file functions, by which a rank's `Files` see what its script does with paths.

Behaviour:
    * ``open`` (also of ``io``, ``pathlib``, ``tarfile``, ``bz2``), the functions of ``os`` that take a path,
      ``shutil.rmtree`` and ``torch.save`` ask `Files` first; what is built on them (``pathlib``, ``shutil``, ``glob``,
      ``os.path``, ``numpy.save``, ``logging``, PIL) follows.
    * File descriptors, and paths relative to a folder's descriptor, pass untouched; so do the files of ``tempfile``.
    * With ``reads=False`` only what writes is stood in for.
    * What is raised names the path that the script gave.
"""

from __future__ import annotations

import builtins
import bz2
import functools
import io
import os
import pathlib
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from manycard.script.files.files import Files

__all__ = ["stand_in"]

_SETS = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")
_XATTR = ("listxattr", "getxattr", "setxattr", "removexattr")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SECONDS_TO_APPEAR = 60.0


def stand_in(files: Files, *, reads: bool) -> Callable[[], None]:
    """Hand operations on paths to `files`; gives the function that ends it.

    Args:
        reads: whether reading is handed over, too.
    """
    return _StandIns(files).put(reads=reads)


class _StandIns:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._aside = threading.local()
        self._undo: list[Callable[[], None]] = []

    def put(self, *, reads: bool) -> Callable[[], None]:
        opening = self._opening(io.open, reads=reads)
        owners: list[tuple[Any, str]] = [
            (builtins, "open"),
            (io, "open"),
            (tarfile, "bltn_open"),
            (bz2, "_builtin_open"),
        ]
        for owner, name in owners:
            if getattr(owner, name, None) is io.open or owner in (builtins, io):
                self._set(owner, name, opening)
        self._in_pathlib("open", opening)
        self._os("open", self._opening_descriptor(os.open, reads=reads))
        self._os("mkdir", self._making(os.mkdir))
        for name, method in {
            "remove": self._files.remove,
            "unlink": self._files.remove,
            "rmdir": self._files.remove_folder,
        }.items():
            self._os(name, self._removing(getattr(os, name), method))
        for name in ("rename", "replace"):
            self._os(name, self._renaming(getattr(os, name)))
        for name, symbolic in {"link": False, "symlink": True}.items():
            self._os(name, self._linking(getattr(os, name), symbolic=symbolic))
        self._set(shutil, "rmtree", self._removing_tree(shutil.rmtree))
        self._set(torch, "save", self._saving(torch.save))
        if reads:
            self._put_reading()
        return self._end

    def _put_reading(self) -> None:
        for name in filter(functools.partial(hasattr, os), ("stat", "lstat", "access", "readlink", *_XATTR[:2])):
            self._os(name, self._reading(getattr(os, name)))
        self._os("listdir", self._listing(os.listdir))
        self._os("scandir", self._scanning(os.scandir))
        self._os("chdir", self._moving(os.chdir))
        self._set(tempfile, "mkdtemp", self._making_temporary(tempfile.mkdtemp, folder_at=2))
        inner: Any = tempfile._mkstemp_inner  # type: ignore[attr-defined]
        self._set(tempfile, "_mkstemp_inner", self._making_temporary(inner, folder_at=0))
        for name in filter(functools.partial(hasattr, os), ("chmod", "utime", "chown", "lchown", *_XATTR[2:])):
            self._os(name, self._changing(getattr(os, name)))

    # ---- putting in place ----------------------------------------------------------------------------------

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _os(self, name: str, new: Any) -> None:
        original = getattr(os, name)
        for group in (getattr(os, group) for group in _SETS):
            if original in group:
                group.add(new)
                self._undo.append(functools.partial(group.discard, new))
        self._set(os, name, new)
        self._in_pathlib(name, new)

    def _in_pathlib(self, name: str, new: Any) -> None:
        """Python 3.10's pathlib keeps the functions in a class."""
        accessor = getattr(pathlib, "_NormalAccessor", None)
        if accessor is not None and name in vars(accessor):
            self._undo.append(functools.partial(setattr, accessor, name, vars(accessor)[name]))
            setattr(accessor, name, staticmethod(new))

    def _path(self, path: Any, settings: dict[str, Any]) -> str | None:
        """The absolute path, where `files` have a say in it."""
        if isinstance(path, int) or any(settings.get(name) is not None for name in ("dir_fd", "src_dir_fd")):
            return None
        if getattr(self._aside, "value", False):
            return None
        try:
            absolute = os.path.abspath(os.fsdecode(path))
        except (TypeError, ValueError, OSError):
            return None
        return absolute if self._files.covers(absolute) else None

    # ---- the stand-ins -------------------------------------------------------------------------------------

    def _opening(self, original: Any, *, reads: bool) -> Any:
        @functools.wraps(original)
        def open(file: Any, mode: str = "r", *args: Any, **settings: Any) -> Any:
            path = None if _has_opener(args, settings) else self._path(file, {})
            if path is None or not isinstance(mode, str):
                return original(file, mode, *args, **settings)
            if not set(mode) & set("wax+"):
                return original(self._files.to_read(path) if reads else file, mode, *args, **settings)
            place = self._files.to_write(
                path, keep="w" not in mode, create=bool(set(mode) & set("wax")), exclusive="x" in mode
            )
            return original(file if place == path else place, mode, *args, **settings)

        return open

    def _opening_descriptor(self, original: Any, *, reads: bool) -> Any:
        @functools.wraps(original)
        def open(path: Any, flags: int, *args: Any, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            if absolute is None:
                return original(path, flags, *args, **settings)
            if not flags & _WRITING:
                return original(self._files.to_read(absolute) if reads else path, flags, *args, **settings)
            place = self._files.to_write(
                absolute,
                keep=not flags & os.O_TRUNC,
                create=bool(flags & os.O_CREAT),
                exclusive=bool(flags & os.O_CREAT and flags & os.O_EXCL),
            )
            return original(path if place == absolute else place, flags, *args, **settings)

        return open

    def _making(self, original: Any) -> Any:
        @functools.wraps(original)
        def mkdir(path: Any, mode: int = 0o777, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            if absolute is None:
                return original(path, mode, **settings)
            return self._files.make_folder(absolute, mode)

        return mkdir

    def _removing(self, original: Any, remove: Callable[[str], None]) -> Any:
        @functools.wraps(original)
        def removing(path: Any, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            return original(path, **settings) if absolute is None else remove(absolute)

        return removing

    def _removing_tree(self, original: Any) -> Any:
        @functools.wraps(original)
        def rmtree(path: Any, ignore_errors: bool = False, *args: Any, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            if absolute is None:
                return original(path, ignore_errors, *args, **settings)
            return self._files.remove_tree(absolute, ignore_errors)

        return rmtree

    def _renaming(self, original: Any) -> Any:
        @functools.wraps(original)
        def rename(source: Any, target: Any, **settings: Any) -> Any:
            paths = self._path(source, settings), self._path(target, settings)
            if paths[0] is None or paths[1] is None:
                return self._rename_across(original, source, target, paths, settings)
            return self._files.rename(paths[0], paths[1])

        return rename

    def _rename_across(self, original: Any, source: Any, target: Any, paths: Any, settings: dict[str, Any]) -> Any:
        """One of both is left alone, such as a temporary file that becomes the real one."""
        if paths[1] is not None:
            place = self._files.to_write(paths[1], keep=False, create=True, exclusive=False)
            return original(source, place, **settings)
        if paths[0] is not None:
            return original(self._files.to_read(paths[0]), target, **settings)
        return original(source, target, **settings)

    def _linking(self, original: Any, *, symbolic: bool) -> Any:
        @functools.wraps(original)
        def link(source: Any, target: Any, *args: Any, **settings: Any) -> Any:
            absolute = self._path(target, settings)
            if absolute is None:
                return original(source, target, *args, **settings)
            return self._files.link(os.fsdecode(source), absolute, symbolic=symbolic)

        return link

    def _saving(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **settings: Any) -> Any:
            path = self._path(f, {}) if isinstance(f, str | os.PathLike) else None
            if path is None:
                return original(obj, f, *args, **settings)
            place = self._files.to_write(path, keep=False, create=True, exclusive=False)
            return original(obj, f if place == path else place, *args, **settings)

        return save

    def _reading(self, original: Any) -> Any:
        missing = functools.partial(bool) if original is os.access else None

        @functools.wraps(original)
        def read(path: Any, *args: Any, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            if absolute is None:
                return original(path, *args, **settings)
            try:
                place = self._files.to_read(absolute)
            except FileNotFoundError:
                if missing is not None:
                    return missing()
                raise
            return original(path if place == absolute else place, *args, **settings)

        return read

    def _listing(self, original: Any) -> Any:
        @functools.wraps(original)
        def listdir(path: Any = ".") -> Any:
            absolute = self._path(path, {})
            names = None if absolute is None else self._files.names_in(absolute)
            if names is None:
                return original(path)
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

        return listdir

    def _scanning(self, original: Any) -> Any:
        @functools.wraps(original)
        def scandir(path: Any = ".") -> Any:
            absolute = self._path(path, {})
            names = None if absolute is None else self._files.names_in(absolute)
            return original(path) if names is None else _Entries([_Entry(path, name) for name in names])

        return scandir

    def _moving(self, original: Any) -> Any:
        @functools.wraps(original)
        def chdir(path: Any) -> Any:
            absolute = self._path(path, {})
            end = time.monotonic() + _SECONDS_TO_APPEAR
            if absolute is not None and self._files.to_read(absolute) != absolute:
                # The working folder must be a real one; rank 0 is about to make it.
                while not self._files.is_real_folder(absolute) and time.monotonic() < end:
                    time.sleep(0.02)
            return original(path)

        return chdir

    def _making_temporary(self, original: Any, folder_at: int) -> Any:
        """Temporary files have names that no other rank's have, so they can be real ones."""

        @functools.wraps(original)
        def make(*args: Any, **settings: Any) -> Any:
            folder = args[folder_at] if len(args) > folder_at else settings.get("dir")
            if folder is not None and os.path.abspath(os.fsdecode(folder)) != os.path.abspath(tempfile.gettempdir()):
                return original(*args, **settings)
            self._aside.value = True
            try:
                made = original(*args, **settings)
            finally:
                self._aside.value = False
            self._files.leave_alone(os.path.abspath(os.fsdecode(made[1] if isinstance(made, tuple) else made)))
            return made

        return make

    def _changing(self, original: Any) -> Any:
        @functools.wraps(original)
        def change(path: Any, *args: Any, **settings: Any) -> None:
            absolute = self._path(path, settings)
            place = path if absolute is None else self._files.keeps_attributes(absolute)
            if place is not None:
                original(place, *args, **settings)

        return change


def _has_opener(args: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    return settings.get("opener") is not None or (len(args) > 5 and args[5] is not None)


class _Entry:
    """An `os.DirEntry` of a folder that is made of two."""

    def __init__(self, folder: Any, name: str) -> None:
        as_bytes = isinstance(folder, bytes)
        self.name: Any = os.fsencode(name) if as_bytes else name
        self.path: Any = os.path.join(os.fspath(folder), self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path) if follow_symlinks else os.lstat(self.path)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False


class _Entries:
    """What `os.scandir` gives: an iterator, and a context."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._rest = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._rest

    def __next__(self) -> _Entry:
        return next(self._rest)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """There is nothing to close."""
