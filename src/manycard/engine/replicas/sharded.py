"""An optimizer whose state is shared out: each card keeps it for, and updates, a part of the parameters.

Behaviour:
    * Every parameter belongs to one card, such that cards hold about as many numbers each; state for it is on that
      card alone. After an update each card sends its part to the others. The numbers are those of mirrored updates.
    * Cards still hold all gradients, so clipping sees all of them. At the parameters of other cards a card's optimizer
      finds ``grad`` None, and so passes over them.
    * The user's ``optimizer.state_dict()`` is whole: the other cards' parts are put into it, on the host. Loading one
      shares it out at the next update, and so does a group that is added, or a layer that is exchanged.
    * An optimizer that steps by itself (an explicit loop) gets all of its state back first, and keeps it until the next
      update of all cards.
    * An optimizer whose update of one parameter depends on others can't be shared out; that is tried on two small
      parameters, and refused.
    * An update that Ctrl-C cuts off may count for some parts and not for others; cards stay in lockstep.

Source: Rajbhandari et al., arXiv:1910.02054 (stage 1).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manycard.engine.batches.batch import map_tensors
from manycard.engine.replicas.collective import Collective
from manycard.engine.replicas.flat import FlatLayout, copy_all
from manycard.engine.replicas.mirrors import Mirrors, copy_optimizer
from manycard.engine.replicas.replicas import Replicas
from manycard.errors import OptimizerError

__all__ = ["ShardedMirrors"]

_CHUNK = 1 << 24
"""Numbers that a card sends in one call; buffers of it for every card are held while parts are sent."""


class ShardedMirrors(Mirrors):
    """One optimizer of the user's, and a part of it on every card.

    Args:
        optimizer: the user's, over parameters of the primary's module.
        replicas: the replicas whose parameters are updated.
        collective: how parts are sent.

    Raises:
        OptimizerError: it can't be shared out.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas, collective: Collective) -> None:
        super().__init__(optimizer, replicas)
        self._collective = collective
        self._owners: list[int] = []
        self._owned_for = -1
        self._checked = False
        self._homes: dict[int, tuple[int, Tensor]] = {}
        """Of each of the model's parameters, by id, the card that keeps its state, and that card's own parameter; as
        the copies were made, since replicas may be others by now."""
        optimizer.register_step_pre_hook(_GiveBack(self))
        optimizer.register_state_dict_post_hook(_Complete(self))

    # ---- who owns what -------------------------------------------------------------------------------------

    @property
    def owners(self) -> list[int]:
        """The card of each of the model's parameters."""
        if self._owned_for != self._replicas.generation:
            trained = [p.numel() if p.requires_grad else 0 for p in self._replicas.parameters[0]]
            self._owners = share_out(trained, len(self._replicas.cards))
            self._owned_for = self._replicas.generation
        return self._owners

    def _keeps(self, position: int, parameter: Any) -> bool:
        index = self._places().get(id(parameter))
        return index is None or self.owners[index] == position

    def _places(self) -> dict[int, int]:
        return {id(parameter): index for index, parameter in enumerate(self._replicas.parameters[0])}

    # ---- an update -----------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        # An update that was cut off: what cards have is the newest there is of their parts.
        self._stepping = False
        if not self._checked:
            self._check_apart()
            self._checked = True
        if self._dropped or self._shape() != self._made_for:  # state must not be lost with copies that are made anew
            self.give_back()
        renewed = super().prepare()
        if renewed:
            own = self._replicas.parameters
            self._homes = {
                id(parameter): (owner, own[owner][index])
                for index, (parameter, owner) in enumerate(zip(own[0], self.owners, strict=True))
            }
            for parameter in [each for each in self.optimizer.state if not self._keeps(0, each)]:
                del self.optimizer.state[parameter]
        return renewed

    def step(self, position: int) -> None:
        others = [
            (parameter, parameter.grad)
            for parameter, owner in zip(self._replicas.parameters[position], self.owners, strict=True)
            if owner != position and parameter.grad is not None
        ]
        for parameter, _ in others:
            parameter.grad = None
        try:
            super().step(position)
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient

    def finish(self) -> None:
        self.send_parts()
        super().finish()

    def send_parts(self) -> None:
        """Send each card's parameters to the others."""
        mine = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        first = self._replicas.parameters[0]
        by_dtype: dict[torch.dtype, list[list[int]]] = {}
        for index, (parameter, owner) in enumerate(zip(first, self.owners, strict=True)):
            if id(parameter) in mine and parameter.grad is not None:
                by_dtype.setdefault(parameter.dtype, [[] for _ in self._replicas.cards])[owner].append(index)
        with torch.no_grad():
            for dtype, parts in by_dtype.items():
                chunks = [_chunks(part, [first[index].numel() for index in part]) for part in parts]
                for turn in range(max(map(len, chunks))):
                    self._send(dtype, [of_card[turn] if turn < len(of_card) else [] for of_card in chunks])

    def _send(self, dtype: torch.dtype, parts: Sequence[Sequence[int]]) -> None:
        """Send some parameters of one dtype; `parts` are each card's, by index."""
        cards, parameters = self._replicas.cards, self._replicas.parameters
        layouts = [FlatLayout([parameters[0][index] for index in part]) for part in parts]
        length = max(layout.length(dtype) for layout in layouts)
        gathered = [torch.empty(len(cards), length, dtype=dtype, device=card.device) for card in cards]
        for position, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
            own = [parameters[position][index].detach() for index in part]
            copy_all(layout.views({dtype: gathered[position][position]}), own, layout.groups)
        self._collective.all_gather([gathered[position][position] for position in range(len(cards))], gathered)
        for position in range(len(cards)):
            for owner, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
                if owner != position:
                    theirs = [parameters[position][index] for index in part]
                    copy_all(theirs, layout.views({dtype: gathered[position][owner]}), layout.groups)

    # ---- its state as a whole ------------------------------------------------------------------------------

    def elsewhere(self) -> list[tuple[Any, Any]]:
        """Parameters of the user's optimizer whose state another card keeps, each with that state."""
        emptied = self._dropped and (self.optimizer.state is not self._seen[0] or not self.optimizer.state)
        if self._outdated or emptied:
            return []
        found = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                owner, twin = self._homes.get(id(parameter), (0, parameter))
                state = self._copies[owner - 1].state.get(twin) if owner else None
                if state:
                    found.append((parameter, state))
        return found

    def give_back(self) -> None:
        """Put all state into the user's optimizer, which is about to step by itself."""
        if not self._stepping:
            for parameter, state in self.elsewhere():
                self.optimizer.state[parameter] = _moved(state, parameter.device)
            self._outdated = True

    def complete(self, state_dict: dict[str, Any]) -> None:
        """Put into the state dict of the user's optimizer what other cards keep."""
        numbers = {}
        for group, shown in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            numbers.update({id(p): number for p, number in zip(group["params"], shown["params"], strict=True)})
        for parameter, state in self.elsewhere():
            state_dict["state"][numbers[id(parameter)]] = _moved(state, torch.device("cpu"))
        state_dict["state"] = dict(sorted(state_dict["state"].items()))

    # ---- what can't be shared out --------------------------------------------------------------------------

    def _check_apart(self) -> None:
        """Step copies of two small parameters together and one of them alone: it must come out the same.

        Raises:
            OptimizerError: it does not.
        """
        small = sorted(
            (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None),
            key=lambda parameter: parameter.numel(),
        )[:2]
        if len(small) < 2:
            return
        alone, together = self._stepped(small[:1]), self._stepped(small)
        if not torch.equal(alone, together):
            name = type(self.optimizer).__name__
            raise OptimizerError(
                f"an update of {name} looks at several parameters at once, so cards can't each update some of them",
                fix="leave out shard_optimizer, or take an optimizer that updates each parameter by itself",
            )

    def _stepped(self, some: Sequence[Tensor]) -> Tensor:
        """The first of `some` parameters after copies of them have taken a step of the optimizer's."""
        twins = {}
        for parameter in some:
            assert parameter.grad is not None, "only parameters with gradients are tried"
            twins[id(parameter)] = torch.nn.Parameter(parameter.detach().clone())
            twins[id(parameter)].grad = parameter.grad.clone()
        device = some[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            copy_optimizer(self.optimizer, twins, lambda value: _moved(value, device), lambda _: False).step()
        return twins[id(some[0])].detach()


class _GiveBack:
    """A hook of the user's optimizer: before it steps by itself it has all state."""

    def __init__(self, mirrors: ShardedMirrors) -> None:
        self._mirrors = weakref.ref(mirrors)

    def __call__(self, *_: Any) -> None:
        mirrors = self._mirrors()
        if mirrors is not None:
            mirrors.give_back()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return lambda *_: None


class _Complete(_GiveBack):
    """A hook of the user's optimizer: its state dict is whole."""

    def __call__(self, _: Any, state_dict: Any = None, *__: Any) -> None:
        mirrors = self._mirrors()
        if mirrors is not None:
            mirrors.complete(state_dict)


def share_out(numbers: Sequence[int], cards: int) -> list[int]:
    """The card of each tensor, such that cards get about as many numbers each.

    Example:
        >>> share_out([100, 10, 60, 50], 2)
        [0, 0, 1, 1]
    """
    owners, held = [0] * len(numbers), [0] * cards
    for index in sorted(range(len(numbers)), key=lambda index: -numbers[index]):
        owners[index] = held.index(min(held))
        held[owners[index]] += numbers[index]
    return owners


def _chunks(indices: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    chunks: list[list[int]] = []
    room = 0
    for index, number in zip(indices, numbers, strict=True):
        if not chunks or number > room:
            chunks.append([])
            room = _CHUNK
        chunks[-1].append(index)
        room -= number
    return chunks


def _moved(value: Any, device: torch.device) -> Any:
    """A copy of state with its tensors on `device`; counters on the host stay there."""
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    if isinstance(value, Tensor | list | tuple):
        return map_tensors(
            lambda tensor: tensor.detach().to(tensor.device if tensor.is_cpu else device, copy=True), value
        )
    return value
