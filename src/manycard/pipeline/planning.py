"""From a model and one micro-batch to a plan: what the stages are, and whether they fit.

Behaviour:
    * A stage begins with a call of a module. With names, the script says with which; a name of a container that is not
      called itself (an ``nn.ModuleList``) means the first module inside that is.
    * With ``"auto"``, the calls are the model's own, and those inside any that take longer than a stage should. They
      are timed, and cut where the slowest stage is the fastest and all fit (`balance`).
    * A module that is called a second time can't begin a stage. What can't be cut is refused in words.
    * Everything is checked before any training, against each card's free memory where that is known.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.errors import ModelError, SettingError
from manycard.pipeline.balance import Costs, PartCost, Room, balance, check_fits
from manycard.pipeline.probe import Call, Measured, Probe
from manycard.pipeline.stages import Part, StagePlan

__all__ = ["PlanSettings", "free_bytes", "make_plan"]

_TIMES = 3
_KEPT_FREE = 0.92
"""The share of a card's free memory that a stage may take: the rest is for workspaces and fragments."""


@dataclass(frozen=True)
class PlanSettings:
    """What a plan must keep to."""

    starts: tuple[str, ...] | None
    """The modules with which stages 1, 2, ... begin; None to find them."""
    cards: tuple[Card, ...]
    """One a stage."""
    rooms: tuple[Room, ...]
    """What each may use."""
    checkpointed: bool
    """Whether parts keep their inputs alone and compute the rest anew."""
    schedule: str = "1f1b"

    @property
    def fix(self) -> str:
        """What would let more fit that isn't done yet."""
        ways = ["take more cards", "a larger micro_batches="]
        ways += [] if self.schedule == "1f1b" else ['schedule="1f1b"']
        ways += [] if self.checkpointed else ["checkpoint_activations=True"]
        return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def make_plan(module: nn.Module, probe: Probe, settings: PlanSettings) -> tuple[StagePlan, Costs | None]:
    """Find the stages.

    Returns:
        The plan, and the costs of its parts where they were measured.

    Raises:
        SettingError: a name is not one with which a stage can begin.
        ModelError: the model can't be cut, or a stage doesn't fit.
    """
    if settings.starts is not None:
        _check_names(module, settings.starts)
    root = probe.calls(_TIMES if settings.starts is None and len(settings.cards) > 1 else 1)
    if root is None:
        raise ModelError("loss_fn doesn't call the model or any module in it", fix="compute the loss from model(batch)")
    stages = len(settings.cards)
    if settings.starts is not None:
        chosen = [_find_start(root, name, module) for name in settings.starts]
        groups = _groups(root, _around(root, chosen) | _containers(root, settings.checkpointed))
        _check_order(groups, chosen, settings.starts)
    else:
        opened = _worth_opening(root, stages + (settings.checkpointed and stages == 1))
        groups = _groups(root, opened | _containers(root, settings.checkpointed))
    known = any(room.limit is not None for room in settings.rooms)
    costs = None
    if (settings.starts is None and stages > 1) or known:
        costs = _costs(groups, probe, settings, 1 if settings.starts is not None else _TIMES, root)
    if settings.starts is None:
        names = [card.name for card in settings.cards]
        costs = costs or Costs(tuple(PartCost(_label(group), 1.0, 0, 0, 0) for group in groups))
        cuts = balance(costs, settings.rooms, names, settings.fix)
    else:
        cuts = [next(place for place, group in enumerate(groups) if group[0] is call) for call in chosen]
    if costs is not None:
        check_fits(costs, cuts, settings.rooms, [card.name for card in settings.cards], settings.fix)
    return _plan(module, groups, cuts, probe, stages), costs


def free_bytes(card: Card, held: int = 0) -> int | None:
    """What a stage may take of a card's memory; None where it isn't known.

    Args:
        held: bytes on the card that the model takes already and that will be counted again.
    """
    if card.simulated:
        return None
    free, _ = torch.cuda.mem_get_info(card.device)
    unused = torch.cuda.memory_reserved(card.device) - torch.cuda.memory_allocated(card.device)
    return int((free + unused + held) * _KEPT_FREE)


# ---- calls -> groups of calls that can begin a stage -------------------------------------------------------------


def _groups(root: Call, opened: set[int]) -> list[list[Call]]:
    """The outermost calls that are not opened, in order; one that can't begin a stage joins the one before."""
    flat: list[Call] = []

    def visit(call: Call) -> None:
        if id(call) in opened:
            for inner in call.calls:
                visit(inner)
        else:
            flat.append(call)

    visit(root)
    groups: list[list[Call]] = []
    for call in flat:
        if groups and call.again:
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _around(root: Call, chosen: Sequence[Call]) -> set[int]:
    """The calls inside which a chosen one begins."""
    found: set[int] = set()
    wanted = {id(call) for call in chosen}

    def visit(call: Call) -> bool:
        inside = [visit(inner) for inner in call.calls]
        if any(inside):
            found.add(id(call))
        return any(inside) or id(call) in wanted

    visit(root)
    return found


def _containers(root: Call, checkpointed: bool) -> set[int]:
    """The calls of containers, for checkpoints: one of a whole container would save nothing."""
    calls = root.walk() if checkpointed else ()
    return {id(call) for call in calls if isinstance(call.module, nn.Sequential) and call.calls and not call.again}


def _worth_opening(root: Call, stages: int) -> set[int]:
    """The calls that must be opened for stages to be of about equal time."""
    opened: set[int] = set()
    if stages == 1:
        return opened
    leaves = [root]
    while True:
        # What a module does itself, between the calls in it, can't be cut.
        candidates = [
            call
            for call in leaves
            if call.calls and not call.again and (call is root or call.own_seconds < 0.5 * call.seconds)
        ]
        if not candidates:
            return opened
        slowest = max(candidates, key=lambda call: call.seconds)
        enough = len({id(call.module) for call in leaves if not call.again}) >= stages
        if enough and slowest.seconds <= root.seconds / stages and slowest is not root:
            return opened
        opened.add(id(slowest))
        place = leaves.index(slowest)
        leaves[place : place + 1] = slowest.calls


def _label(group: Sequence[Call]) -> str:
    return group[0].name or "the model"


# ---- names -------------------------------------------------------------------------------------------------------


def _check_names(module: nn.Module, starts: Sequence[str]) -> None:
    known = [name for name, _ in module.named_modules() if name]
    for name in starts:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            shown = ", ".join(close or known[:8])
            raise SettingError(
                "stages",
                list(starts),
                f"the model has no module called {name!r}",
                fix=f"did you mean {shown}" if close else f"choose among its modules, such as {shown}",
            )


def _find_start(root: Call, name: str, module: nn.Module) -> Call:
    """The first call of the module called `name`, or of one inside it."""
    target = module.get_submodule(name)
    inside = {id(part) for part in target.modules()}
    for wanted in ({id(target)}, inside):
        for call in root.walk():
            if id(call.module) in wanted and call is not root:
                return call
    raise SettingError(
        "stages",
        name,
        "forward never calls this module, so no stage can begin with it",
        fix="name one that is called: "
        + ", ".join(dict.fromkeys(c.name for c in root.walk() if c.name and not c.again)),
    )


def _check_order(groups: Sequence[Sequence[Call]], chosen: Sequence[Call], starts: Sequence[str]) -> None:
    firsts = [group[0] for group in groups]
    places = []
    for name, call in zip(starts, chosen, strict=True):
        place = next((place for place, first in enumerate(firsts) if first is call), None)
        if place is None:
            problem = f"{name} is called inside a module that runs more than once, so no stage can begin with it"
            raise SettingError("stages", list(starts), problem, fix="name a module that runs once")
        places.append(place)
    if places != sorted(set(places)):
        order = ", ".join(starts[index] for index in sorted(range(len(places)), key=places.__getitem__))
        problem = "stages must begin in the order in which forward calls these modules, each with one of its own"
        raise SettingError("stages", list(starts), problem, fix=f"forward calls them in the order {order}")
    if places and places[0] == 0:
        problem = f"forward begins with {starts[0]}, so nothing would be left for the first card"
        raise SettingError(
            "stages", list(starts), problem, fix="name the modules with which the second, third, ... begin"
        )


# ---- costs -------------------------------------------------------------------------------------------------------


def _costs(groups: Sequence[Sequence[Call]], probe: Probe, settings: PlanSettings, times: int, root: Call) -> Costs:
    calls = [call for group in groups for call in group]
    measured = probe.costs(calls, times)
    place = 0
    counted: set[int] = set()
    parts = []
    code = _code_before(root, {id(call) for call in calls})
    for group in groups:
        own = [measured.get(place + index, Measured(0.0, 0, 0)) for index in range(len(group))]
        place += len(group)
        parts.append(_part_cost(group, own, sum(code[id(call)] for call in group), counted, settings))
    extra = probe.rest(root, times)
    last = parts[-1]
    parts[-1] = PartCost(
        last.name, last.seconds + extra, last.parameter_bytes, last.trained_bytes, last.activation_bytes
    )
    return Costs(tuple(parts))


def _code_before(root: Call, parts: set[int]) -> dict[int, float]:
    """For each part, by id, the time of the code of opened modules that comes to its stage.

    Where in a module its own code runs isn't known, so all of it counts with the first part inside.
    """
    found: dict[int, float] = {}
    waiting = 0.0

    def visit(call: Call) -> None:
        nonlocal waiting
        if id(call) in parts:
            found[id(call)], waiting = waiting, 0.0
            return
        waiting += call.own_seconds
        for inner in call.calls:
            visit(inner)

    visit(root)
    return found


def _part_cost(
    group: Sequence[Call], measured: Sequence[Measured], code: float, counted: set[int], settings: PlanSettings
) -> PartCost:
    held = trained = 0
    for call in group:
        for tensor in [*call.module.parameters(), *call.module.buffers()]:
            if id(tensor) not in counted:
                counted.add(id(tensor))
                held += tensor.nbytes
                trained += tensor.nbytes * tensor.requires_grad
    seconds = code + sum(each.seconds for each in measured)
    kept = sum(each.input_bytes if settings.checkpointed else each.activation_bytes for each in measured)
    return PartCost(_label(group), seconds, held, trained, kept)


# ---- the plan ----------------------------------------------------------------------------------------------------


def _plan(
    module: nn.Module, groups: Sequence[Sequence[Call]], cuts: Sequence[int], probe: Probe, stages: int
) -> StagePlan:
    edges = set(cuts)
    parts: list[Part] = []
    homes: dict[int, int] = {}
    stage = 0
    began = []
    known: set[int] = set()
    for place, group in enumerate(groups):
        if place in edges:
            stage += 1
            began.append(group[0].began)
        for call in group:
            begins = place in edges and call is group[0]
            tensors: list[Tensor] = [*call.module.parameters(), *call.module.buffers()]
            if id(call.module) in known or not (begins or tensors):
                continue
            known.add(id(call.module))
            parts.append(Part(call.name, stage, begins))
            for tensor in tensors:
                homes.setdefault(id(tensor), stage)
    for key, first in probe.first_use.items():
        # What no part holds belongs where the code between the parts first uses it.
        homes.setdefault(key, sum(1 for start in began if start <= first - 1))
    named = [*module.named_parameters(), *module.named_buffers()]
    return StagePlan(stages, tuple(parts), {name: homes[id(tensor)] for name, tensor in named if id(tensor) in homes})
