"""Names for parameters, from the modules that a script calls.

A parameter has the name it has in the first module with it that was called. Where several modules were called, the
module's class stands in front, with a number where several have the same: ``Generator.net.0.weight``,
``Linear#2.weight``. Parameters of no module are named by their place: ``group 0, parameter 3``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["ParameterNames"]


@dataclass(frozen=True)
class _Name:
    owner: int
    """Number of the module, in the order in which they were seen."""
    name: str


class ParameterNames:
    """The names of all parameters seen."""

    def __init__(self) -> None:
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._owners: list[str] = []

    def add(self, module: nn.Module) -> None:
        """Take names from `module`."""
        new = [(name, parameter) for name, parameter in module.named_parameters() if parameter not in self._names]
        if not new:
            return
        self._owners.append(type(module).__name__)
        for name, parameter in new:
            self._names[parameter] = _Name(len(self._owners) - 1, name)

    def parameters(self) -> list[nn.Parameter]:
        """All that have a name, in the order in which they were seen."""
        return [parameter for parameter in self._names if isinstance(parameter, nn.Parameter)]

    def of(self, groups: Sequence[Sequence[Tensor]]) -> tuple[str, ...]:
        """The names of an optimizer's parameters, in the order of its groups."""
        return tuple(
            self._name(parameter) or f"group {number}, parameter {place}"
            for number, group in enumerate(groups)
            for place, parameter in enumerate(group)
        )

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            return ""
        found = self._names[parameter]
        if len(self._owners) == 1:
            return str(found.name)
        kind = self._owners[found.owner]
        alike = [number for number, owner in enumerate(self._owners) if owner == kind]
        number = f"#{alike.index(found.owner) + 1}" if len(alike) > 1 else ""
        return f"{kind}{number}.{found.name}"
