"""Putting functions in the places of others, everywhere where Python keeps them, and back."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

__all__ = ["Replaced"]

_SETS = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")


class Replaced:
    """What has been replaced so far."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, new: Any) -> None:
        """Put `new` in the place of ``owner.name``."""
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def in_os(self, name: str, new: Any) -> None:
        """Put `new` in the place of ``os.name``, also where ``os`` and ``pathlib`` know it otherwise."""
        original = getattr(os, name)
        for group in (getattr(os, group) for group in _SETS):
            if original in group:
                group.add(new)
                self._undo.append(functools.partial(group.discard, new))
        self.attribute(os, name, new)
        self.in_pathlib(name, new)

    def in_pathlib(self, name: str, new: Any) -> None:
        """Put `new` where Python 3.10's pathlib keeps its functions, which is a class."""
        accessor = getattr(pathlib, "_NormalAccessor", None)
        if accessor is not None and name in vars(accessor):
            self._undo.append(functools.partial(setattr, accessor, name, vars(accessor)[name]))
            setattr(accessor, name, staticmethod(new))

    def end(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
