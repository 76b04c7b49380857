"""Noticing what a script has changed in the primary's module since the replicas were made.

Between two calls a script may switch a part to ``eval()``, set an attribute, freeze a layer, swap one, replace a
``forward`` or register a hook. `Watch.changes` finds that by comparing identities: all modules at a glance, about a
microsecond a module, and each by itself where something has changed. What the forward pass itself writes is the
primary's own state and no change: calling `Watch.changes` after each pass takes note of it.

Seen: attributes and the items of their lists, dicts and objects, one level deep; submodules, parameters, hooks and
classes. Not seen: changes deeper inside an attribute's objects.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

__all__ = ["AttributeChange", "Watch"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_non_full_backward_hooks_",
)
_FLAT = (bool, int, float, str, tuple, type, type(None))
_CONTAINERS = (list, set, deque, dict)
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules", *_HOOKS})
_UNSEEN_BY_FORWARD = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)


@dataclass(frozen=True)
class AttributeChange:
    """One attribute that differs from when it was last seen."""

    module: int
    """Index in ``list(module.modules())``."""
    name: str
    gone: bool
    """Whether it was deleted."""


class _Seen:
    """One module as it was last seen. Strong references keep every compared identity meaningful."""

    __slots__ = ("attributes", "buffers", "contents", "empty", "ids", "kind", "module", "tables")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind = type(module)
        state = module.__dict__
        registered = [state["_parameters"], state["_modules"], *(state[name] for name in _HOOKS if name in state)]
        self.tables = [(table, list(table), list(map(id, table.values()))) for table in registered if table]
        self.empty = [table for table in registered if not table]
        self.buffers = list(state["_buffers"])
        self.look()

    def look(self) -> None:
        self.attributes = dict(self.module.__dict__)
        self.ids = list(map(id, self.attributes.values()))
        contents = {name: _items(name, value) for name, value in self.attributes.items()}
        self.contents = {name: ids for name, ids in contents.items() if ids is not None}

    def structure_changed(self) -> bool:
        if type(self.module) is not self.kind or any(self.empty):
            return True
        if list(self.module.__dict__["_buffers"]) != self.buffers:
            return True
        return any(list(map(id, table.values())) != ids or list(table) != names for table, names, ids in self.tables)

    def attributes_changed(self) -> bool:
        state = self.module.__dict__
        if list(map(id, state.values())) != self.ids:
            return True
        return bool(self.contents) and any(_items(name, state[name]) != ids for name, ids in self.contents.items())

    def changed_names(self) -> Iterator[str]:
        state = self.module.__dict__
        for name in {*state, *self.attributes} - _REGISTERED:
            both = name in state and name in self.attributes
            if not both or state[name] is not self.attributes[name] or self._contents_changed(name):
                yield name

    def _contents_changed(self, name: str) -> bool:
        return _items(name, self.module.__dict__[name]) != self.contents.get(name)


def _items(name: str, value: Any) -> list[int] | None:
    """Identities one level inside an attribute that can change in place."""
    if isinstance(value, _FLAT) or name in _REGISTERED or name in _UNSEEN_BY_FORWARD:
        return None
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else [value._version]
    if isinstance(value, dict):
        return [*map(id, value.keys()), *map(id, value.values())]
    if isinstance(value, list | set | deque):
        return sorted(map(id, value)) if isinstance(value, set) else list(map(id, value))
    state = getattr(value, "__dict__", None)
    return list(map(id, state.values())) if isinstance(state, dict) and not callable(value) else None


class _Glance:
    """All modules at once, compared in a few calls that loop in C: most often nothing has changed."""

    def __init__(self, seen: Sequence[_Seen]) -> None:
        modules = [each.module for each in seen]
        self._modules = modules
        self._kinds = list(map(type, modules))
        self._states = [module.__dict__ for module in modules]
        self._values = list(_values_of(self._states))
        self._tables = [table for each in seen for table, _, _ in each.tables]
        self._names = list(chain.from_iterable(self._tables))
        self._held = list(_values_of(self._tables))
        self._empty = [table for each in seen for table in each.empty]
        self._buffers = [state["_buffers"] for state in self._states]
        self._buffer_names = list(chain.from_iterable(self._buffers))
        contents = [(name, each.attributes[name], ids) for each in seen for name, ids in each.contents.items()]
        self._contents = [entry for entry in contents if entry[2] or not isinstance(entry[1], _CONTAINERS)]
        self._bare = [value for _, value, ids in contents if not ids and isinstance(value, _CONTAINERS)]

    def structure_is_as_before(self) -> bool:
        return (
            list(map(type, self._modules)) == self._kinds
            and not any(self._empty)
            and list(chain.from_iterable(self._tables)) == self._names
            and _same_objects(_values_of(self._tables), self._held)
            and list(chain.from_iterable(self._buffers)) == self._buffer_names
        )

    def attributes_are_as_before(self) -> bool:
        return (
            sum(map(len, self._states)) == len(self._values)
            and _same_objects(_values_of(self._states), self._values)
            and not any(self._bare)
            and all(_items(name, value) == ids for name, value, ids in self._contents)
        )


def _values_of(tables: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))


def _same_objects(values: Iterator[Any], before: list[Any]) -> bool:
    """Whether an iterator gives these very objects; it gives as many."""
    return all(map(operator.is_, before, values))


class Watch:
    """The primary's module as it was last seen.

    Args:
        module: the primary's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen = [_Seen(part) for part in module.modules()]
        self._glance = _Glance(self._seen)

    def structure_changed(self) -> bool:
        """Whether replicas have to be made anew: other submodules, parameters, buffers, hooks or classes."""
        return not self._glance.structure_is_as_before() and any(seen.structure_changed() for seen in self._seen)

    def changes(self) -> list[AttributeChange]:
        """The attributes that changed since they were last seen, and take note of them."""
        if self._glance.attributes_are_as_before():
            return []
        found = self._look_at_each()
        self._glance = _Glance(self._seen)
        return found

    def _look_at_each(self) -> list[AttributeChange]:
        found: list[AttributeChange] = []
        for index, seen in enumerate(self._seen):
            if seen.attributes_changed():
                state = seen.module.__dict__
                found.extend(AttributeChange(index, name, name not in state) for name in seen.changed_names())
                seen.look()
        return found

    def value(self, change: AttributeChange) -> Any:
        """The attribute's value now."""
        return self._seen[change.module].module.__dict__[change.name]
