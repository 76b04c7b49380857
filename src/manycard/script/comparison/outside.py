"""What a forward pass changes outside of its module: globals of the script, attributes of classes, objects in them.

A counter that forward keeps in a global or a class would count each card's part as a call, and a trial's calls too.
`Outside` remembers such values before a trial, puts them back, and says how they look, so that runs can be compared.

Looked at are the classes of the module's parts and the globals of their forward functions, where the script or one of
its own files defines them; libraries' are left alone.
"""

from __future__ import annotations

import copy
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manycard.script.comparison.plain import LEFT_OUT, PLAIN, alike, looks

__all__ = ["Outside"]

_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in (
        Path(torch.__file__).parents[1],
        Path(__file__).parents[2],
        sysconfig.get_path("purelib"),
        sysconfig.get_path("stdlib"),
    )
)
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 3
_LONGEST = 100_000
"""Items of a container that are kept."""


class Outside:
    """Values outside of a module, as they are when this is made.

    Args:
        module: whose forward may change them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._classes = {kind for part in module.modules() for kind in type(part).__mro__ if _is_scripts(kind)}
        spaces = {id(names): names for names in map(_globals_of, self._classes) if names is not None}
        self._globals = list(spaces.values())
        self._own = {kind.__module__ for kind in self._classes}
        self._names = [(space, self._stateful(space)) for space in self._spaces()]
        self._contents: dict[int, tuple[Any, Any]] = {}
        for _, names in self._names:
            for value in names.values():
                self._keep(value, _DEPTH)
        self._seen = self.look()

    def look(self) -> dict[str, Any]:
        """What can be compared of them now, by name."""
        return {
            f"{space.__name__}.{name}" if isinstance(space, type) else name: looks(value)
            for space in self._spaces()
            for name, value in self._stateful(space).items()
        }

    def restore(self) -> None:
        """Put back what has changed since this was made."""
        for container, kept in self._contents.values():
            _refill(container, kept)
        for space, names in self._names:
            now = self._stateful(space)
            for name in {*now, *names}:
                if name not in names:
                    _write(space, name)
                elif name not in now or now[name] is not names[name]:
                    _write(space, name, names[name])

    @staticmethod
    def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
        """The first name that looks different; empty where none does."""
        return next((name for name in {**one, **other} if not alike(one.get(name), other.get(name), 0.0)), "")

    def _spaces(self) -> Iterator[Any]:
        yield from self._classes
        yield from self._globals

    def _stateful(self, space: Any) -> dict[str, Any]:
        """The values of a space that may change, by name."""
        names = vars(space) if isinstance(space, type) else space
        return {
            name: value
            for name, value in list(names.items())
            if isinstance(name, str) and not name.startswith("__") and self._may_change(value)
        }

    def _may_change(self, value: Any) -> bool:
        return isinstance(value, (*PLAIN, *_CONTAINERS, tuple)) or self._is_object(value)

    def _is_object(self, value: Any) -> bool:
        """Whether this is an object of a class of the script's."""
        return type(value).__module__ in self._own and not isinstance(value, LEFT_OUT) and not callable(value)

    def _keep(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._contents:
            return
        held: Any = vars(value) if self._is_object(value) and hasattr(value, "__dict__") else value
        if not isinstance(held, _CONTAINERS) or len(held) > _LONGEST:
            return
        self._contents[id(value)] = held, copy.copy(held)
        for part in held.values() if isinstance(held, dict) else held:
            if not isinstance(part, PLAIN):
                self._keep(part, depth - 1)


def _is_scripts(kind: type) -> bool:
    forward = vars(kind).get("forward")
    code = getattr(forward, "__code__", None)
    return code is not None and not str(Path(code.co_filename).resolve()).startswith(_LIBRARIES)


def _globals_of(kind: type) -> dict[str, Any] | None:
    return getattr(vars(kind).get("forward"), "__globals__", None)


def _refill(container: Any, kept: Any) -> None:
    if isinstance(container, dict):
        if list(container) != list(kept) or any(container[key] is not kept[key] for key in kept):
            container.clear()
            container.update(kept)
    elif len(container) != len(kept) or any(map(_are_other, container, kept)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(kept)


def _are_other(one: Any, other: Any) -> bool:
    return one is not other


_GONE = object()


def _write(space: Any, name: str, value: Any = _GONE) -> None:
    if isinstance(space, type):
        delattr(space, name) if value is _GONE else setattr(space, name, value)
    elif value is _GONE:
        del space[name]
    else:
        space[name] = value
