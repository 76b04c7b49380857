"""An optimizer on every card: the user's own on the primary, and copies that do the same to the replicas.

Behaviour:
    * The user's optimizer stays the object it is: schedulers, hooks and edits of ``param_groups`` act on it, its
      ``state_dict`` is what a checkpoint keeps, and the copies take its groups' settings before each update.
    * When it steps by itself (an explicit loop), loads a state, gains a parameter group, or its ``state`` is emptied or
      replaced, the copies are out of date and are made anew from it before the next update of all cards. Tensors in
      its state that the script writes in place are not looked at.
    * Equal gradients, states and settings give equal updates: no weights travel.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manycard.engine.batches.batch import map_tensors
from manycard.engine.replicas.replicas import Replicas
from manycard.errors import OptimizerError

__all__ = ["Mirrors", "copy_optimizer"]

_OWN = frozenset({"param_groups", "state", "defaults", "step"})
"""Attributes of an optimizer that are not simply copied; ``step`` is there when a scheduler has wrapped it."""


class Mirrors:
    """One optimizer of the user's and its copies.

    Args:
        optimizer: the user's, over parameters of the primary's module.
        replicas: the replicas whose parameters the copies update.

    Raises:
        OptimizerError: its ``step`` calls the model again, which one update of all cards can't do.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas) -> None:
        if _needs_closure(optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__} calls the model again inside step(), which train_step can't spread",
                fix="write the loop out, with parallel.backward(loss) inside the closure given to optimizer.step",
            )
        self._optimizer = weakref.ref(optimizer)
        self._replicas = replicas
        self._copies: list[Optimizer] = []
        self._made_for: Any = None
        self._stepping = False
        self._outdated = True
        self._seen: tuple[Any, int] = (optimizer.state, 0)
        """The optimizer's state after the newest update, and for how many parameters it had one."""
        note = _Note(self)
        optimizer.register_step_post_hook(note)
        optimizer.register_load_state_dict_post_hook(note)

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; whoever calls a train step holds it."""
        optimizer = self._optimizer()
        assert optimizer is not None, "mirrors are reached through their optimizer"
        return optimizer

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of each card, the user's first."""
        return [self.optimizer, *self._copies]

    @property
    def has_other_hooks(self) -> bool:
        """Whether hooks that are not manycard's run before or after a step."""
        optimizer = self.optimizer
        hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
        return any(not getattr(hook, "__module__", type(hook).__module__).startswith("manycard.") for hook in hooks)

    @property
    def outdated(self) -> bool:
        """Whether the user's optimizer did something by itself since the copies were made."""
        return self._outdated or self._stepping

    def note_change(self) -> None:
        """The user's optimizer did something by itself."""
        self._outdated = self._outdated or not self._stepping

    def prepare(self) -> bool:
        """Make the copies like the user's optimizer; returns whether they were out of date."""
        shape = self._shape()
        # Still stepping: an update was interrupted, and some copies may be a step behind.
        outdated = self._outdated or self._stepping or self._dropped or shape != self._made_for
        if outdated:
            self._copies = [self._copy_for(position) for position in range(1, len(self._replicas.cards))]
            self._made_for, self._outdated = shape, False
        else:
            for made, card in zip(self._copies, self._replicas.cards[1:], strict=True):
                self._follow_groups(made, card.device)
        self._stepping = True
        return outdated

    @property
    def _dropped(self) -> bool:
        """Whether the script has taken something out of the optimizer's state since the newest update."""
        state, kept = self._seen
        return self.optimizer.state is not state or len(state) < kept

    def _shape(self) -> Any:
        """What the copies are made for: these replicas, and the optimizer's parameters in their groups."""
        return self._replicas.generation, [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]

    def step(self, position: int) -> None:
        """Update one card's replica. Runs in the card's thread, between `prepare` and `finish`."""
        (self.optimizer if position == 0 else self._copies[position - 1]).step()

    def finish(self) -> None:
        """All cards have stepped."""
        self._stepping = False
        self._seen = (self.optimizer.state, len(self.optimizer.state))

    def _follow_groups(self, made: Optimizer, device: torch.device) -> None:
        for own, primary in zip(made.param_groups, self.optimizer.param_groups, strict=True):
            for key, value in primary.items():
                if key != "params":
                    own[key] = self._on(device, value) if isinstance(value, Tensor) else value

    def _copy_for(self, position: int) -> Optimizer:
        """A copy whose parameters are the replica's at `position`."""
        theirs = self._replicas.parameters[position]
        self._check_inside()
        twins = {id(own): twin for own, twin in zip(self._replicas.parameters[0], theirs, strict=True)}
        device = self._replicas.cards[position].device
        keep = partial(self._keeps, position)
        return copy_optimizer(self.optimizer, twins, lambda value: self._settings(value, device), keep)

    def _keeps(self, position: int, parameter: Any) -> bool:
        """Whether a card keeps the state of one of the primary's parameters."""
        return True

    def _check_inside(self) -> None:
        inside = {id(parameter) for parameter in self._replicas.parameters[0]}
        for number, group in enumerate(self.optimizer.param_groups):
            if any(id(parameter) not in inside for parameter in group["params"]):
                raise OptimizerError(
                    f"group {number} of {type(self.optimizer).__name__} holds parameters that are not the model's",
                    fix="set up one module that contains all parameters the optimizer moves",
                )

    def _settings(self, value: Any, device: torch.device) -> Any:
        """A copy of an optimizer's settings or state with its tensors on `device`."""
        if isinstance(value, dict):
            return {key: self._settings(part, device) for key, part in value.items()}
        if isinstance(value, Tensor | list | tuple):
            return map_tensors(lambda tensor: self._on(device, tensor), value)
        return copy.deepcopy(value)

    def _on(self, device: torch.device, tensor: Tensor) -> Tensor:
        """A copy on `device`; a counter kept on the CPU stays there."""
        home = self._replicas.cards[0].device
        return tensor.detach().to(device, copy=True) if tensor.device == home else tensor.detach().clone()


def copy_optimizer(
    source: Optimizer,
    twins: Mapping[int, Tensor],
    moved: Callable[[Any], Any],
    keep: Callable[[Any], bool],
) -> Optimizer:
    """An optimizer like `source` for other parameters, without its hooks.

    Args:
        twins: the parameters that it is to have, by the ids of those that they stand for; others are left out.
        moved: copies settings and state to where they are used.
        keep: of a parameter of `source`, whether its state is copied too.
    """
    made = source.__class__.__new__(source.__class__)
    memo: dict[int, Any] = dict(twins)
    for key, value in source.__dict__.items():
        if key in _OWN:
            continue
        hooks = key.endswith("_hooks") and isinstance(value, dict)
        made.__dict__[key] = OrderedDict() if hooks else copy.deepcopy(value, memo)
    made.defaults = dict(source.defaults)
    made.param_groups = [
        {
            key: [twins[id(p)] for p in value if id(p) in twins] if key == "params" else moved(value)
            for key, value in group.items()
        }
        for group in source.param_groups
    ]
    made.state = defaultdict(dict)
    for parameter, state in source.state.items():
        if keep(parameter):
            made.state[twins.get(id(parameter), parameter)] = moved(state)
    return made


class _Note:
    """A hook of the user's optimizer that tells its mirrors, and does not keep them alive."""

    def __init__(self, mirrors: Mirrors) -> None:
        self._mirrors = weakref.ref(mirrors)

    def __call__(self, *_: Any) -> None:
        mirrors = self._mirrors()
        if mirrors is not None:
            mirrors.note_change()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return lambda *_: None


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
