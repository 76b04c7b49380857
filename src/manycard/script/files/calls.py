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
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from manycard.script.files.files import Files
from manycard.script.files.replacing import Replaced

__all__ = ["stand_in"]

_XATTR = ("listxattr", "getxattr", "setxattr", "removexattr")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SECONDS_TO_APPEAR = 60.0


def stand_in(files: Files, *, reads: bool) -> Callable[[], None]:
    """Hand operations on paths to `files`; gives the function that ends it.

    Args:
        reads: whether reading is handed over, too.
    """
    places, paths = Replaced(), _Paths(files)
    _put_writing(places, _Writing(files, paths), files, reads=reads)
    if reads:
        _put_reading(places, _Reading(files, paths))
    return places.end


def _put_writing(places: Replaced, writing: _Writing, files: Files, *, reads: bool) -> None:
    original = io.open
    opening = writing.opening(original, reads=reads)
    owners: list[tuple[Any, str]] = [
        (builtins, "open"),
        (io, "open"),
        (tarfile, "bltn_open"),
        (bz2, "_builtin_open"),
    ]
    for owner, name in owners:
        if getattr(owner, name, None) is original or owner in (builtins, io):
            places.attribute(owner, name, opening)
    places.in_pathlib("open", opening)
    places.in_os("open", writing.opening_descriptor(os.open, reads=reads))
    places.in_os("mkdir", writing.making(os.mkdir))
    for name, method in {"remove": files.remove, "unlink": files.remove, "rmdir": files.remove_folder}.items():
        places.in_os(name, writing.removing(getattr(os, name), method))
    for name in ("rename", "replace"):
        places.in_os(name, writing.renaming(getattr(os, name)))
    for name, symbolic in {"link": False, "symlink": True}.items():
        places.in_os(name, writing.linking(getattr(os, name), symbolic=symbolic))
    places.attribute(shutil, "rmtree", writing.removing_tree(shutil.rmtree))
    places.attribute(torch, "save", writing.saving(torch.save))


def _put_reading(places: Replaced, reading: _Reading) -> None:
    for name in filter(functools.partial(hasattr, os), ("stat", "lstat", "access", "readlink", *_XATTR[:2])):
        places.in_os(name, reading.reading(getattr(os, name)))
    places.in_os("listdir", reading.listing(os.listdir))
    places.in_os("scandir", reading.scanning(os.scandir))
    places.in_os("chdir", reading.moving(os.chdir))
    places.attribute(tempfile, "mkdtemp", reading.making_temporary(tempfile.mkdtemp, folder_at=2))
    inner: Any = tempfile._mkstemp_inner  # type: ignore[attr-defined]
    places.attribute(tempfile, "_mkstemp_inner", reading.making_temporary(inner, folder_at=0))
    for name in filter(functools.partial(hasattr, os), ("chmod", "utime", "chown", "lchown", *_XATTR[2:])):
        places.in_os(name, reading.changing(getattr(os, name)))


class _Paths:
    """Which paths `files` have a say in."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._aside = threading.local()

    def of(self, path: Any, settings: dict[str, Any]) -> str | None:
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

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Leave every path that this thread uses inside alone."""
        self._aside.value = True
        try:
            yield
        finally:
            self._aside.value = False


class _Writing:
    """Stand-ins for what writes, makes and removes files; each method makes one from the original."""

    def __init__(self, files: Files, paths: _Paths) -> None:
        self._files = files
        self._path = paths.of

    def opening(self, original: Any, *, reads: bool) -> Any:
        """``open``."""

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

    def opening_descriptor(self, original: Any, *, reads: bool) -> Any:
        """``os.open``."""

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

    def making(self, original: Any) -> Any:
        """``os.mkdir``."""

        @functools.wraps(original)
        def mkdir(path: Any, mode: int = 0o777, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            if absolute is None:
                return original(path, mode, **settings)
            return self._files.make_folder(absolute, mode)

        return mkdir

    def removing(self, original: Any, remove: Callable[[str], None]) -> Any:
        """``os.remove`` and its kind."""

        @functools.wraps(original)
        def removing(path: Any, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            return original(path, **settings) if absolute is None else remove(absolute)

        return removing

    def removing_tree(self, original: Any) -> Any:
        """``shutil.rmtree``."""

        @functools.wraps(original)
        def rmtree(path: Any, ignore_errors: bool = False, *args: Any, **settings: Any) -> Any:
            absolute = self._path(path, settings)
            if absolute is None:
                return original(path, ignore_errors, *args, **settings)
            return self._files.remove_tree(absolute, ignore_errors)

        return rmtree

    def renaming(self, original: Any) -> Any:
        """``os.rename`` and ``os.replace``."""

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

    def linking(self, original: Any, *, symbolic: bool) -> Any:
        """``os.link`` and ``os.symlink``."""

        @functools.wraps(original)
        def link(source: Any, target: Any, *args: Any, **settings: Any) -> Any:
            absolute = self._path(target, settings)
            if absolute is None:
                return original(source, target, *args, **settings)
            return self._files.link(os.fsdecode(source), absolute, symbolic=symbolic)

        return link

    def saving(self, original: Any) -> Any:
        """``torch.save``."""

        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **settings: Any) -> Any:
            path = self._path(f, {}) if isinstance(f, str | os.PathLike) else None
            if path is None:
                return original(obj, f, *args, **settings)
            place = self._files.to_write(path, keep=False, create=True, exclusive=False)
            return original(obj, f if place == path else place, *args, **settings)

        return save


class _Reading:
    """Stand-ins for what reads files and looks at folders; each method makes one from the original."""

    def __init__(self, files: Files, paths: _Paths) -> None:
        self._files = files
        self._path, self._left_alone = paths.of, paths.left_alone

    def reading(self, original: Any) -> Any:
        """What asks a path for something."""
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

    def listing(self, original: Any) -> Any:
        """``os.listdir``."""

        @functools.wraps(original)
        def listdir(path: Any = ".") -> Any:
            absolute = self._path(path, {})
            names = None if absolute is None else self._files.names_in(absolute)
            if names is None:
                return original(path)
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

        return listdir

    def scanning(self, original: Any) -> Any:
        """``os.scandir``."""

        @functools.wraps(original)
        def scandir(path: Any = ".") -> Any:
            absolute = self._path(path, {})
            names = None if absolute is None else self._files.names_in(absolute)
            return original(path) if names is None else _Entries([_Entry(path, name) for name in names])

        return scandir

    def moving(self, original: Any) -> Any:
        """``os.chdir``."""

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

    def making_temporary(self, original: Any, folder_at: int) -> Any:
        """Temporary files have names that no other rank's have, so they can be real ones."""

        @functools.wraps(original)
        def make(*args: Any, **settings: Any) -> Any:
            folder = args[folder_at] if len(args) > folder_at else settings.get("dir")
            if folder is not None and os.path.abspath(os.fsdecode(folder)) != os.path.abspath(tempfile.gettempdir()):
                return original(*args, **settings)
            with self._left_alone():
                made = original(*args, **settings)
            self._files.leave_alone(os.path.abspath(os.fsdecode(made[1] if isinstance(made, tuple) else made)))
            return made

        return make

    def changing(self, original: Any) -> Any:
        """What changes attributes of a file."""

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
