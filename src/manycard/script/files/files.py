"""What becomes of a process's operations on paths, where something stands in for Python's file functions."""

from __future__ import annotations

import os
import shutil
import stat

__all__ = ["Files", "Real", "is_real_folder_at", "mode_of"]


class Real:
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


def mode_of(path: str) -> int | None:
    """What is there; None for nothing."""
    try:
        return Real.lstat(path).st_mode
    except (OSError, ValueError):
        return None


def is_real_folder_at(path: str) -> bool:
    try:
        return stat.S_ISDIR(Real.stat(path).st_mode)
    except (OSError, ValueError):
        return False


class Files:
    """What becomes of a rank's operations on paths: the base does them. Paths are absolute."""

    def covers(self, path: str) -> bool:
        """Whether operations on `path` come here at all."""
        return True

    def leave_alone(self, path: str) -> None:
        """Have `path` and what is below it be the real ones."""

    def is_real_folder(self, path: str) -> bool:
        """Whether there is a folder, made by whomever."""
        return is_real_folder_at(path)

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
        Real.mkdir(path, mode)

    def remove(self, path: str) -> None:
        """Remove a file."""
        Real.remove(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        Real.rmdir(path)

    def remove_tree(self, path: str, ignore_errors: bool) -> None:
        """Remove a folder with what is in it."""
        Real.rmtree(path, ignore_errors)

    def rename(self, source: str, target: str) -> None:
        """Rename, over what is at `target`."""
        Real.replace(source, target)

    def link(self, source: str, target: str, *, symbolic: bool) -> None:
        """Make a link at `target`."""
        (Real.symlink if symbolic else Real.link)(source, target)

    def names_in(self, path: str) -> list[str] | None:
        """What is in a folder; None where the folder itself tells."""
        return None

    def keeps_attributes(self, path: str) -> str | None:
        """Where to change times and permissions of `path`; None to leave them."""
        return path
