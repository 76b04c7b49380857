"""Comparing what cards and ranks hold of one model, in one call.

Behaviour:
    * Cards of `mc.DataParallel` are compared in this process. Ranks are compared over an initialised process group,
      whoever made it; every rank must make the call. Where there is one card alone, nothing is compared.
    * Equal ranks exchange five numbers, in one all-reduce. Only where those differ does each tell the others what it
      holds, so that all come to one verdict with the names.
    * What must be equal and isn't raises LockstepError in every rank. What may differ is in the report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.diagnosis.finding import Finding
from manycard.diagnosis.lockstep.held import Held, read_held, reducer_of
from manycard.diagnosis.lockstep.verdict import find
from manycard.engine.data_parallel import DataParallel
from manycard.errors import LockstepError, ModelError, SettingError
from manycard.strategies.rank_model import RankModel

__all__ = ["LockstepReport", "check_lockstep", "compare"]


@dataclass(frozen=True)
class LockstepReport:
    """What a comparison found."""

    places: tuple[str, ...]
    """The cards or ranks that were compared."""
    parameters: int
    """How many parameters each holds."""
    gradients: int
    """How many of their gradients were compared."""
    findings: tuple[Finding, ...]
    """The gravest first; empty where all is equal."""

    @property
    def equal(self) -> bool:
        """Whether everything is equal that must be."""
        return all(finding.severity != "error" for finding in self.findings)

    def __str__(self) -> str:
        if len(self.places) < 2:
            return "nothing to compare: there is one card and one rank"
        verdict = "in lockstep" if self.equal else "not in lockstep"
        what = f"{self.parameters} parameters and {self.gradients} gradients"
        return "\n".join([f"{', '.join(self.places)} are {verdict}: {what} compared", *map(str, self.findings)])


def check_lockstep(
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    gradients: bool = True,
    buffers: bool = True,
    group: Any = None,
) -> LockstepReport:
    """Compare parameters, gradients and buffers of `model` over cards and ranks, by name and bit by bit.

    Call it after an update, in every rank. It works on what `Parallel.setup` returned, on `mc.DataParallel`, on
    ``DistributedDataParallel`` and on a plain module in an initialised process group.

    Args:
        model: the model as the loop calls it.
        optimizer: its optimizers; parameters of theirs that are not the model's are compared too.
        gradients: compare gradients; False in the middle of an accumulation.
        buffers: compare buffers, for the report.
        group: the process group; the default one where it is None.

    Returns:
        What was compared, and notes on what differs by design.

    Raises:
        LockstepError: parameters or gradients differ, or one card alone holds NaN. Its `findings` say what, where,
            why and what to do.

    Example:
        >>> model = DataParallel(nn.Linear(4, 2), device_ids="cpu:2")
        >>> model(torch.ones(6, 4)).sum().backward()
        >>> check_lockstep(model).equal
        True
    """
    report = compare(model, optimizer=optimizer, gradients=gradients, buffers=buffers, group=group)
    raise_errors(report)
    return report


def raise_errors(report: LockstepReport) -> None:
    """Raise what a report holds of errors.

    Raises:
        LockstepError: it holds one.
    """
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if errors:
        more = "".join(f"; also: {finding.cause} ({finding.evidence})" for finding in errors[1:])
        raise LockstepError(
            f"{', '.join(report.places)} are not in lockstep: {errors[0].cause} ({errors[0].evidence}{more})",
            fix=errors[0].fix,
            findings=report.findings,
        )


def compare(
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    gradients: bool = True,
    buffers: bool = True,
    group: Any = None,
    since: str = "",
    updated: bool = False,
    losses: Sequence[Sequence[bool]] | None = None,
) -> LockstepReport:
    """`check_lockstep` without the error.

    Args:
        since: in which steps a difference came about, in words.
        updated: a train step has just updated, so that all cards of this process hold their gradients.
        losses: asked for what each card's or this rank's newest losses were, if something holds NaN.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a {type(model).__name__} is no module", fix="give the model that the loop calls")
    if isinstance(model, DataParallel):
        held = _of_cards(model, gradients=gradients and updated, buffers=buffers and updated, losses=losses)
    elif dist.is_available() and dist.is_initialized():
        held = _of_ranks(model, optimizer, gradients, buffers, group, losses)
    else:
        held = [_with_losses(read_held("this card", _unwrapped(model), gradients=gradients, buffers=False), losses)]
    findings = find(held, since)
    first = held[0]
    compared = sum(value is not None for value in first.gradients.values())
    return LockstepReport(tuple(each.place for each in held), len(first.parameters), compared, tuple(findings))


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside a wrapper."""
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel | RankModel)
    inner = model.module if wrapped else model
    assert isinstance(inner, nn.Module), "a wrapper holds a module"
    return inner


# ---- cards of one process ----------------------------------------------------------------------------------


def _of_cards(
    model: DataParallel, *, gradients: bool, buffers: bool, losses: Sequence[Sequence[bool]] | None
) -> list[Held]:
    """What each card holds. Gradients are every card's only after a train step's update."""
    engine = model.engine
    with engine.lock:
        engine.refresh(statistics=False)  # sends parameters that only the script's own steps have moved
        for card in engine.cards:
            if not card.simulated:
                torch.cuda.synchronize(card.device)
        held = [
            read_held(str(card), module, gradients=gradients, buffers=buffers and card.position == 0)
            for card, module in zip(engine.cards, engine.replicas.modules, strict=False)
        ]
    return [_with_losses(each, losses, place) for place, each in enumerate(held)]


def _with_losses(held: Held, losses: Sequence[Sequence[bool]] | None, place: int = 0) -> Held:
    """`held` with what its losses were, where that is asked."""
    if not losses or not held.nonfinite or place >= len(losses):
        return held
    return replace(held, losses=tuple(losses[place]))


# ---- ranks -------------------------------------------------------------------------------------------------


def _of_ranks(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    gradients: bool,
    buffers: bool,
    group: Any,
    losses: Sequence[Sequence[bool]] | None,
) -> list[Held]:
    rank = dist.get_rank(group)
    if rank < 0:
        raise SettingError("group", group, "this rank is not in it", fix="call it in the group's ranks only")
    module = _unwrapped(model)
    own = read_held(
        f"rank {rank}",
        module,
        extra=_others(module, optimizer),
        gradients=gradients,
        buffers=buffers,
        reducer=reducer_of(model),
    )
    own = _with_losses(own, losses)
    places = [f"rank {place}" for place in range(dist.get_world_size(group))]
    if _agree(_digest(own), group) and not own.nonfinite:
        return [_renamed(own, place) for place in places]
    held: list[Any] = [None] * len(places)
    dist.all_gather_object(held, own, group=group)
    return held


def _renamed(held: Held, place: str) -> Held:
    return replace(held, place=place)


def _others(module: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters that are trained and not the model's."""
    inside = {id(parameter) for parameter in module.parameters()}
    for number, each in enumerate([optimizer] if isinstance(optimizer, Optimizer) else optimizer):
        name = "optimizer's" if not number else f"optimizer's {number + 1}:"
        for group, settings in enumerate(each.param_groups):
            for index, parameter in enumerate(settings["params"]):
                if id(parameter) not in inside:
                    shape = " x ".join(map(str, parameter.shape)) or "a single number"
                    yield f"{name} group {group}, parameter {index} ({shape})", parameter


def _digest(held: Held) -> list[int]:
    """What must be equal, in numbers: names and order, parameters, gradients, buffers, and whether all is finite."""
    parts = (
        held.order,
        sorted(held.parameters.items()),
        sorted(held.gradients.items()),
        sorted(held.buffers.items()),
        held.nonfinite,
    )
    prints = [hashlib.blake2b(repr(part).encode(), digest_size=8).digest() for part in parts]
    return [int.from_bytes(each, "big", signed=True) for each in prints]


def _agree(numbers: Sequence[int], group: Any) -> bool:
    """Whether every rank gave the same numbers: one all-reduce of them and their complements."""
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    own = torch.tensor([*numbers, *(~number for number in numbers)], dtype=torch.int64)
    most: Tensor = own.to(device, copy=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return torch.equal(most.cpu(), own)
