"""CUDA graphs of the update: scaling, clipping and the optimizers' step, one graph a card.

Behaviour:
    * The first two updates run eager, with the kernels that graphs use, and make the optimizers' states. The third is
      recorded, and compared with an eager one on the primary; a difference ends the graphs, in words, with the eager
      update's parameters.
    * Learning rates live on the card while graphs run: a scheduler's change is written there before the next replay,
      and the script goes on seeing numbers in ``param_groups``. Any other changed setting is recorded anew.
    * Adam, AdamW and SGD run fused in a graph, whichever implementation the script chose: their others wait for the
      card, or launch many times as much. PyTorch's other optimizers with ``capturable`` run with it.
    * Other optimizers, those with hooks of the script's, and updates whose settings change again and again stay eager.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from manycard.engine.driving.threads import CardThreads
from manycard.engine.recording.recorder import Recorder
from manycard.engine.recording.unrepeatable import describe_error
from manycard.engine.replicas.mirrors import Mirrors
from manycard.engine.replicas.sharded import ShardedMirrors

__all__ = ["Done", "UpdateGraphs", "UpdateWork"]

_FUSED = (optim.Adam, optim.AdamW, optim.SGD)
_CAPTURABLE = (optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD, optim.Adadelta, optim.RMSprop, optim.Rprop)
_WARM_UP = 2
_MOST_CHANGES = 8
_TOLERANCE = 1e-3
"""How far a replayed update may lie from an eager one, relative to its size: fused kernels round elsewhere."""


class Done(Enum):
    """What became of an update."""

    NOT = "not"
    ON_ALL = "on all"
    ON_PRIMARY = "on primary"
    """The other cards' parameters and states are to be made like the primary's."""


@dataclass(frozen=True)
class UpdateWork:
    """An update that is to run."""

    threads: CardThreads
    mirrors: Sequence[Mirrors]
    step: Callable[[int, float | Tensor], None]
    """Scales by the second argument, clips and steps on one card."""
    multiplier: float | Tensor
    renewed: bool
    """Whether optimizer states have been made anew."""
    made_for: Any
    """What every graph depends on; all are recorded anew when it changes."""
    used: frozenset[int]
    """The parameters that have gradients."""
    parameters: Sequence[Tensor]
    """The primary's parameters."""
    gradients: Sequence[Tensor]
    """The primary's buckets, which scaling and clipping write."""

    @property
    def scaled(self) -> bool:
        """Whether gradients are multiplied by anything."""
        return isinstance(self.multiplier, Tensor) or self.multiplier != 1.0


class _OnCards:
    """What graphs read anew in each replay, on every card.

    Args:
        optimizers: those of each card.
        devices: the cards.
    """

    def __init__(self, optimizers: Sequence[Sequence[Optimizer]], devices: Sequence[torch.device]) -> None:
        self.optimizers = optimizers
        self.multipliers = [torch.ones((), device=device) for device in devices]
        groups = sum(len(optimizer.param_groups) for optimizer in optimizers[0])
        self._rates = [[torch.zeros((), device=device) for _ in range(groups)] for device in devices]
        self._given: list[Any] = [None] * (1 + groups)

    def write(self, work: UpdateWork) -> None:
        """Write the multiplier and the learning rates that hold now."""
        values = [work.multiplier, *(group["lr"] for each in self.optimizers[0] for group in each.param_groups)]
        for index, value in enumerate(values):
            targets = self.multipliers if index == 0 else [rates[index - 1] for rates in self._rates]
            if isinstance(value, Tensor):
                for target in targets:
                    target.copy_(value, non_blocking=True)
            elif value != self._given[index]:
                for target in targets:
                    target.fill_(value)
            self._given[index] = value

    def multiplier(self, work: UpdateWork, position: int) -> float | Tensor:
        """What a card multiplies gradients by."""
        return self.multipliers[position] if work.scaled else 1.0

    @contextlib.contextmanager
    def capturable(self) -> Iterator[None]:
        """Every card's optimizers read their learning rates from the card, and keep their counters there."""
        with contextlib.ExitStack() as stack:
            for optimizers, rates in zip(self.optimizers, self._rates, strict=True):
                left = list(rates)
                for each in optimizers:
                    stack.enter_context(_capturable(each, [left.pop(0) for _ in each.param_groups]))
            yield


class UpdateGraphs:
    """The graphs of one train step's updates.

    Args:
        recorders: one a card.
        give_up: called with the reason, once, when updates stay eager from now on.
    """

    def __init__(self, recorders: Sequence[Recorder], give_up: Callable[[str], None]) -> None:
        self._recorders = recorders
        self._say = give_up
        self._off = False
        self._seen: Counter[Any] = Counter()
        self._recorded: dict[Any, list[Callable[[], None]]] = {}
        self._settings: Any = None
        self._on_cards: _OnCards | None = None
        self._changes = 0

    def run(self, work: UpdateWork) -> Done:
        """Run an update, by graphs where there are any."""
        if self._off or not self._still_right(work):
            return Done.NOT
        assert self._on_cards is not None, "made with the settings"
        self._on_cards.write(work)
        key = work.used, work.scaled
        recorded = self._recorded.get(key)
        if recorded is not None:
            _replay(recorded)
            return Done.ON_ALL
        self._seen[key] += 1
        if self._seen[key] > _WARM_UP:
            return self._record(key, work, self._on_cards)
        self._run_eager(work, self._on_cards, range(len(self._recorders)))
        return Done.ON_ALL

    def _give_up(self, reason: str) -> None:
        self._off = True
        self._recorded.clear()
        self._say(reason)

    def _still_right(self, work: UpdateWork) -> bool:
        settings = [_settings(group) for mirror in work.mirrors for group in mirror.optimizer.param_groups]
        settings.append({"made for": work.made_for})
        if work.renewed or settings != self._settings:
            self._changes += bool(self._recorded) and not work.renewed
            self._settings = settings
            self._recorded.clear()
            self._seen.clear()
            optimizers = zip(*(mirror.optimizers for mirror in work.mirrors), strict=True)
            self._on_cards = _OnCards(list(optimizers), work.threads.devices)
            reasons = [reason for reason in map(_unrepeatable, work.mirrors) if reason]
            if self._changes > _MOST_CHANGES:
                reasons = ["the script changes other settings of the optimizer than its learning rate, again and again"]
            if reasons:
                self._give_up(reasons[0])
        return not self._off

    def _run_eager(self, work: UpdateWork, on_cards: _OnCards, positions: Sequence[int]) -> None:
        """As a replay computes it, to the last bit: a run that is resumed warms up again, and must not differ."""
        jobs: list[Callable[[], Any] | None] = [None] * len(self._recorders)
        for position in positions:
            jobs[position] = partial(work.step, position, on_cards.multiplier(work, position))
        with on_cards.capturable():
            work.threads.run(jobs)

    def _record(self, key: Any, work: UpdateWork, on_cards: _OnCards) -> Done:
        try:
            recorded = self._make(work, on_cards)
        except Exception as error:
            self._give_up(describe_error(error))
            return Done.NOT
        changed = [*work.parameters, *(t for each in on_cards.optimizers[0] for t in _state_of(each))]
        before, gradients = _on_host(changed), _on_host(work.gradients)
        self._run_eager(work, on_cards, [0])
        expected = _on_host(changed)
        _write(changed, before)
        _write(work.gradients, gradients)
        _replay(recorded)
        if _gap(before, expected, _on_host(changed)) <= _TOLERANCE:
            self._recorded[key] = recorded
            return Done.ON_ALL
        _write(changed, expected)
        self._give_up("a replay gives other parameters than an eager update")
        return Done.ON_PRIMARY

    def _make(self, work: UpdateWork, on_cards: _OnCards) -> list[Callable[[], None]]:
        """The replays of every card."""
        replays = []
        for position, recorder in enumerate(self._recorders):
            step = partial(work.step, position, on_cards.multiplier(work, position))
            jobs: list[Callable[[], Any] | None] = [None] * len(self._recorders)
            jobs[position] = partial(recorder.record, step)
            with on_cards.capturable():
                replay, _ = work.threads.run(jobs)[position]
            replays.append(replay)
        return replays


def _replay(recorded: Sequence[Callable[[], None]]) -> None:
    for replay in recorded:
        replay()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Everything of a parameter group that a graph has for good."""
    return {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}


def _unrepeatable(mirror: Mirrors) -> str:
    """Why an optimizer's step can't be recorded; empty where it can."""
    optimizer = mirror.optimizer
    name = type(optimizer).__name__
    if type(optimizer) not in (*_FUSED, *_CAPTURABLE):
        return f"graphs are made for PyTorch's own optimizers on the card, and {name} is none"
    if mirror.has_other_hooks:
        return f"a hook of {name} would not run"
    if isinstance(mirror, ShardedMirrors):
        return "with shard_optimizer cards send each other their parts of the parameters"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name} is differentiable"
        if any(not parameter.is_floating_point() for parameter in group["params"]):
            return f"{name} holds complex parameters"
    return ""


@contextlib.contextmanager
def _capturable(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """An optimizer that reads its learning rates from the card and keeps its counters there."""
    before = [dict(group) for group in optimizer.param_groups]
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != parameter.device:
                state[key] = value.to(parameter.device)
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
            if type(optimizer) in _FUSED:
                group["fused"], group["foreach"] = True, False
        yield
    finally:
        for group, kept in zip(optimizer.param_groups, before, strict=True):
            group.update(kept)


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.data.copy_(value)


def _gap(before: Sequence[Tensor], expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """The largest difference of two updates, relative to the larger's size in its tensor."""
    gaps = [0.0]
    for start, one, other in zip(before, expected, actual, strict=True):
        if not torch.equal(one, other) and one.is_floating_point():
            size = max(float((one - start).abs().max()), 1e-6 * float(one.abs().max()), 1e-30)
            gap = float((one - other).abs().max()) / size
            gaps.append(gap if gap == gap else float("inf"))
    return max(gaps)
