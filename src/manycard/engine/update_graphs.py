"""CUDA graphs of the update: scaling, clipping and the optimizers' step, one graph a card.

Behaviour:
    * The first two updates run eager and make the optimizers' states. The third is recorded, and compared with an
      eager one on the primary; a difference ends the graphs, in words, with the eager update's parameters.
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

from manycard.engine.mirrors import Mirrors
from manycard.engine.recorder import Recorder
from manycard.engine.threads import CardThreads
from manycard.engine.unrepeatable import describe_error

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


class _Recorded:
    """The graphs of one kind of update, one a card.

    Args:
        replays: run the graphs.
        multipliers: what each card multiplies gradients by, 0-dim; read by a graph of a scaled update only.
        rates: each card's learning rates, 0-dim, by optimizer and group.
    """

    def __init__(
        self, replays: Sequence[Callable[[], None]], multipliers: Sequence[Tensor], rates: Sequence[Sequence[Tensor]]
    ) -> None:
        self._replays = replays
        self._multipliers = multipliers
        self._rates = rates
        self._given: list[Any] = [None] * (1 + len(rates[0]))

    def replay(self, work: UpdateWork) -> None:
        values = [work.multiplier, *(group["lr"] for mirror in work.mirrors for group in mirror.optimizer.param_groups)]
        for index, value in enumerate(values):
            targets = self._multipliers if index == 0 else [rates[index - 1] for rates in self._rates]
            if isinstance(value, Tensor):
                for target in targets:
                    target.copy_(value, non_blocking=True)
            elif value != self._given[index]:
                for target in targets:
                    target.fill_(value)
            self._given[index] = value
        for replay in self._replays:
            replay()


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
        self._recorded: dict[Any, _Recorded] = {}
        self._settings: Any = None
        self._changes = 0

    def run(self, work: UpdateWork) -> Done:
        """Run an update by graphs where there are any."""
        if self._off or not self._still_right(work):
            return Done.NOT
        key = work.used, work.scaled
        recorded = self._recorded.get(key)
        if recorded is not None:
            recorded.replay(work)
            return Done.ON_ALL
        self._seen[key] += 1
        return self._record(key, work) if self._seen[key] > _WARM_UP else Done.NOT

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
        if self._changes > _MOST_CHANGES:
            self._give_up("the script changes other settings of the optimizer than its learning rate, again and again")
        return not self._off

    def _record(self, key: Any, work: UpdateWork) -> Done:
        for mirror in work.mirrors:
            reason = _unrepeatable(mirror)
            if reason:
                self._give_up(reason)
                return Done.NOT
        try:
            recorded = self._make(work)
        except Exception as error:
            self._give_up(describe_error(error))
            return Done.NOT
        changed = [*work.parameters, *(t for mirror in work.mirrors for t in _state_of(mirror.optimizer))]
        before, gradients = _on_host(changed), _on_host(work.gradients)
        work.threads.run([partial(work.step, 0, work.multiplier), *[None] * (len(self._recorders) - 1)])
        expected = _on_host(changed)
        _write(changed, before)
        _write(work.gradients, gradients)
        recorded.replay(work)
        if _gap(before, expected, _on_host(changed)) <= _TOLERANCE:
            self._recorded[key] = recorded
            return Done.ON_ALL
        _write(changed, expected)
        self._give_up("a replay gives other parameters than an eager update")
        return Done.ON_PRIMARY

    def _make(self, work: UpdateWork) -> _Recorded:
        cards = work.threads.cards
        multipliers = [torch.ones((), device=card.device) for card in cards]
        rates: list[list[Tensor]] = []
        replays = []
        for position, card in enumerate(cards):
            optimizers = [mirror.optimizers[position] for mirror in work.mirrors]
            own = [torch.zeros((), device=card.device) for each in optimizers for _ in each.param_groups]
            rates.append(own)
            multiplier: float | Tensor = multipliers[position] if work.scaled else 1.0
            jobs: list[Callable[[], Any] | None] = [None] * len(cards)
            jobs[position] = partial(
                self._record_card, position, optimizers, own, partial(work.step, position, multiplier)
            )
            replays.append(work.threads.run(jobs)[position])
        return _Recorded(replays, multipliers, rates)

    def _record_card(
        self, position: int, optimizers: Sequence[Optimizer], rates: Sequence[Tensor], step: Callable[[], None]
    ) -> Callable[[], None]:
        with contextlib.ExitStack() as stack:
            left = list(rates)
            for each in optimizers:
                stack.enter_context(_capturable(each, [left.pop(0) for _ in each.param_groups]))
            replay, _ = self._recorders[position].record(step)
        return replay


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
