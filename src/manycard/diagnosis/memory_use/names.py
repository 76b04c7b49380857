"""By what name a script holds an object: a variable, a module's global, an object's attribute, or what is in one.

Of the name, the file is known in which it is looked for (`manycard.diagnosis.memory_use.lines`).
"""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["NOBODY", "Holder", "name_of"]

_DEPTH = 5
_CONTAINERS: tuple[type, ...] = (list, dict, tuple, set)
_Link = tuple[object, object, object]
"""A holder, what it holds, and what that holds."""


@dataclass(frozen=True)
class Holder:
    """Who holds an object."""

    words: str
    """Such as ``list `losses` in train.py``; empty for nobody."""
    name: str = ""
    """The variable's or attribute's own."""
    file: str = ""
    """The source in which it is."""

    def __bool__(self) -> bool:
        return bool(self.words)


NOBODY = Holder("")
_OURS = os.sep + "manycard" + os.sep


def name_of(thing: object, ignored: set[int]) -> Holder:
    """Who holds `thing`; `NOBODY` where nobody is found.

    Args:
        ignored: identities of what only looks, such as lists of the caller's.
    """
    ignored = ignored | {id(ignored), id(sys._getframe())}
    level: list[_Link] = [(thing, thing, thing)]
    seen = {id(thing)}
    for _ in range(_DEPTH):
        above: list[_Link] = []
        for held, inner, innermost in level:
            if found := _attribute(held, inner, innermost) or _variable(held):
                return found
            for holder in gc.get_referrers(held):
                if id(holder) in seen or id(holder) in ignored or isinstance(holder, types.FrameType):
                    continue
                if holder is level or holder is above or _is_link_of(holder, level, above):
                    continue
                seen.add(id(holder))
                above.append((holder, held, inner))
        level = above[:200]
    return NOBODY


def _is_link_of(holder: object, *levels: list[_Link]) -> bool:
    """Whether it is a link of this search's own."""
    return isinstance(holder, tuple) and any(holder is link for level in levels for link in level)


def _variable(thing: object) -> Holder:
    """The local or global variable that is `thing`."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if _OURS in file:
            continue
        for name, value in frame.f_locals.items():
            if value is thing:
                where = f"{os.path.basename(file)}, {frame.f_code.co_name}()"
                words = f"{_kind(thing)}`{name}` in {where.removesuffix(', <module>()')}"
                return Holder(words, name, file)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("manycard", "torch", "builtins", "sys", "gc"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is thing:
                words = f"{_kind(thing)}`{name}` of module {module_name}"
                return Holder(words, name, getattr(module, "__file__", None) or "")
    return NOBODY


def _frames() -> Iterator[types.FrameType]:
    for innermost in list(sys._current_frames().values()):
        frame: types.FrameType | None = innermost
        while frame is not None:
            yield frame
            frame = frame.f_back


def _attribute(holder: object, held: object, inner: object) -> Holder:
    """The attribute by which an object holds `held`, or `inner`, where `held` is what its attributes are in."""
    if isinstance(holder, (*_CONTAINERS, types.ModuleType, types.FunctionType, types.CellType)) or holder is held:
        return NOBODY
    attributes: Any = getattr(holder, "__dict__", None)
    if not isinstance(attributes, dict):
        return NOBODY
    wanted = inner if attributes is held else held
    for name, value in attributes.items():
        if value is wanted:
            owner = holder if isinstance(holder, type) else type(holder)
            file = getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
            return Holder(f"{_kind(value)}`{name}` of {owner.__name__}", name, file)
    return NOBODY


def _kind(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__name__} " if kind.__module__ in ("builtins", "collections") else ""
