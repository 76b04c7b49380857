"""Tensors that modules keep as plain attributes, neither parameters nor buffers: each must be where its stage computes.

Behaviour:
    * One that a single stage's modules keep moves to that stage's card in place, as parameters do. Tensors on the host
      stay there.
    * One that several stages share, that another object holds for the module, or that is a parameter of another stage,
      is brought to where it is used by the watched forward pass: the modules that keep it are named `strangers`.
    * In a copy of the model, a tensor goes to the copy's own card wherever the original's is on a card.
    * A tensor that requires gradients and is no registered parameter is refused, and so is a random generator of
      another card, by the attribute's name.
    * Seen are attributes, what lists, tuples and dicts hold, and the attributes of other objects, three levels deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from manycard.errors import ModelError

__all__ = ["Attribute", "attributes_of", "settle_attributes"]

_DEEPEST = 3
_PLAIN = (str, bytes, int, float, type(None), type, ModuleType, nn.Module)
_MODULES_OWN = frozenset(nn.Module().__dict__)
"""Tables that every module has: of parameters, buffers, submodules and hooks."""


@dataclass(frozen=True)
class Attribute:
    """A tensor or generator that a module keeps."""

    path: str
    """Such as ``blocks.1.tables['cos']``."""
    module: nn.Module
    value: Tensor | torch.Generator
    own: bool
    """Whether it is the module's, and no other object's that the module keeps."""


def attributes_of(model: nn.Module) -> Iterator[Attribute]:
    """What the modules of `model` keep as plain attributes, in a fixed order."""
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in part.__dict__.items():
            if key not in _MODULES_OWN:
                for path, held, own in _inside(value, f"{prefix}{key}", _DEEPEST):
                    yield Attribute(path, part, held, own)


def _inside(
    value: Any, path: str, depth: int, own: bool = True
) -> Iterator[tuple[str, Tensor | torch.Generator, bool]]:
    if isinstance(value, Tensor | torch.Generator):
        yield path, value, own
        return
    if depth == 0 or isinstance(value, _PLAIN) or callable(value):
        return
    parts: Iterator[tuple[str, Any]]
    if isinstance(value, Mapping):
        parts = ((f"{path}[{key!r}]", part) for key, part in value.items() if not isinstance(part, _PLAIN))
    elif isinstance(value, list | tuple):
        parts = ((f"{path}[{index}]", part) for index, part in enumerate(value) if not isinstance(part, _PLAIN))
    else:
        state = getattr(value, "__dict__", None)
        held = state.items() if isinstance(state, dict) else ()
        own, parts = False, ((f"{path}.{key}", part) for key, part in held if not isinstance(part, _PLAIN))
    for inner, part in parts:
        yield from _inside(part, inner, depth - 1, own)


def settle_attributes(
    model: nn.Module,
    stage_of: Mapping[int, int],
    home_of: Mapping[int, int],
    devices: Sequence[torch.device],
    original: nn.Module | None = None,
) -> set[int]:
    """Put what modules keep where they use it.

    Args:
        stage_of: the stage of each module, by id; one that is in none belongs to the code between the parts.
        home_of: the stage of each parameter and buffer, by id.
        devices: the card of each stage.
        original: the model that `model` is a copy of.

    Returns:
        `strangers`, by id: modules that keep what is on another stage.

    Raises:
        ModelError: an attribute can't be used on several cards.
    """
    found = list(attributes_of(model))
    stages: dict[int, set[int]] = {}
    for each in found:
        if each.own and (len(devices) > 1 or original is not None):
            _check(each, stage_of, home_of, devices)
        if id(each.module) in stage_of:
            stages.setdefault(id(each.value), set()).add(stage_of[id(each.module)])
    on_card = _on_card(original)
    strangers = set()
    for each in found:
        value, stage = each.value, stage_of.get(id(each.module))
        if not isinstance(value, Tensor):
            continue
        if id(value) in home_of:
            if stage is not None and home_of[id(value)] != stage:
                strangers.add(id(each.module))
            continue
        if each.own and each.path in on_card:
            _move(value, devices[min(stages.get(id(value), {0}))])
        if stage is None or value.device.type != "cuda" or value.device == devices[stage]:
            continue
        if each.own and len(stages[id(value)]) == 1 and value.grad_fn is None:
            _move(value, devices[stage])
        else:
            strangers.add(id(each.module))
    return strangers


def _on_card(original: nn.Module | None) -> set[str]:
    """The paths at which `original` keeps tensors of cards."""
    found = () if original is None else attributes_of(original)
    return {each.path for each in found if each.value.device.type == "cuda"}


def _check(
    attribute: Attribute, stage_of: Mapping[int, int], home_of: Mapping[int, int], devices: Sequence[torch.device]
) -> None:
    value, path = attribute.value, attribute.path
    if isinstance(value, torch.Generator):
        device = devices[stage_of.get(id(attribute.module), 0)]
        if value.device.type == "cuda" and value.device != device:
            raise ModelError(
                f"attribute {path} is a random generator of {value.device}, and its module runs on {device}",
                fix="draw without a generator of your own (each card has one), or make it there when forward runs",
            )
    elif value.requires_grad and value.is_leaf and id(value) not in home_of:
        raise ModelError(
            f"attribute {path} is a tensor that requires gradients and is no registered parameter, so its gradient"
            " would be neither weighted nor brought to one card",
            fix="register it: an nn.Parameter as an attribute of its module, or an nn.ParameterList",
        )


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
