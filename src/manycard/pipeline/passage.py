"""One micro-batch on its way through the stages: what crosses from card to card, forward and back.

The script's own ``forward`` runs, unchanged, and moves to the next card when it calls a module with which a stage
begins. What this file adds:

    * Any tensor that is used on another stage than it was made on is copied there, once a stage, and cut from the graph
      of its own stage: each stage has a graph of its own, so that its card's thread can run it backward alone. The
      gradient of the copy is carried back to the stage of the original. So skip connections, masks and positions
      that jump over stages are right wherever they come from.
    * A parameter that is used on a stage other than its home has a stand-in there, whose gradient is added to the
      parameter's at the end: so tied weights train as on one card.
    * Code between the modules is watched by a `TorchFunctionMode`. A module all of whose parameters are at home runs
      unwatched, once its arguments have been brought.

How a tensor's stage is known: on real cards by its device. On simulated ones by its place in the graph: nodes are
numbered as they are made, so a node older than the stage's beginning belongs to an earlier one.
"""

from __future__ import annotations

import dataclasses
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from manycard.engine.batches.batch import rebuild
from manycard.errors import ModelError
from manycard.pipeline.copies import Sent, StageCopies

__all__ = [
    "Arrival",
    "Passage",
    "StandIns",
    "all_known",
    "current_passage",
    "map_known",
    "refuse_differentiating",
    "tensors_in_known",
]

_here = threading.local()
_LOOKS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "grad_fn", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda", "grad")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point}
"""What only looks at a tensor, and may do so from any card."""
_DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


def current_passage() -> Passage | None:
    """The micro-batch whose forward pass the calling thread runs; None outside any."""
    return getattr(_here, "passage", None)


@dataclass
class Arrival:
    """A tensor that came from an earlier stage."""

    origin: Tensor
    """The original, in the graph of its own stage."""
    home: int
    """That stage."""
    leaf: Tensor
    """The copy, with which the graph of the stage where it arrived begins."""


class _Enter(torch.autograd.Function):
    """An arrived copy as something that may be written in place, which a leaf may not."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@dataclass
class StandIns:
    """Copies of parameters on stages that are not their home; made when first used, for one batch."""

    copies: StageCopies
    home_of: Mapping[int, int]
    """The home of each parameter and buffer, by id."""
    began: Sequence[torch.cuda.Event | None]
    """For each stage, what its card had been given before the batch: parameters don't change after that."""
    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By stage and id: the parameter and its stand-in."""

    def on(self, parameter: Tensor, stage: int) -> Tensor:
        """The stand-in of `parameter` on `stage`."""
        key = stage, id(parameter)
        if key not in self.made:
            home = self.home_of.get(id(parameter), stage)
            sent = self.copies.send(parameter.detach(), home, stage, self.began[home])
            leaf = self.copies.receive(sent, stage).to(self.copies.devices[stage])
            self.made[key] = parameter, leaf.detach().requires_grad_(parameter.requires_grad)
        return self.made[key][1]

    def settle(self) -> None:
        """Add the gradients of stand-ins to those of their parameters."""
        for (stage, _), (parameter, leaf) in self.made.items():
            if leaf.grad is None:
                continue
            home = self.home_of.get(id(parameter), stage)
            found = self.copies.receive(self.copies.send(leaf.grad, stage, home), home).to(parameter.device)
            with torch.no_grad():
                parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
        self.made.clear()


class Passage:
    """The forward pass of one micro-batch.

    Args:
        copies: moves tensors between the stages.
        stand_ins: parameters away from home.
        pause: called on leaving a stage; returns when the next stage's card has time.
        begun: called when a stage begins to compute, with its index.
        ended: called when it has.
    """

    def __init__(
        self,
        copies: StageCopies,
        stand_ins: StandIns,
        pause: Callable[[], None],
        begun: Callable[[int], None],
        ended: Callable[[int], None],
    ) -> None:
        self.stage = 0
        self.stages = len(copies.devices)
        self.arrivals: list[list[Arrival]] = [[] for _ in range(self.stages)]
        self._copies, self._stand_ins = copies, stand_ins
        self._pause, self._begun, self._ended = pause, begun, ended
        self._floors: list[int] = []
        self._marks: dict[int, torch.cuda.Event | None] = {}
        self._held: dict[tuple[int, bool], tuple[Tensor, int, Tensor]] = {}
        self._ahead: dict[tuple[int, bool], tuple[Tensor, Sent]] = {}
        self._mode = _Watch(self)

    # ---- the pass ------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], Any]) -> Any:
        """``work()``, watched; ends on the last stage."""
        self._floors = [_get_sequence_nr()]
        depth = torch._C._len_torch_function_stack()
        _here.passage = self
        _push_mode(self._mode)  # type: ignore[no-untyped-call]
        self._begun(0)
        try:
            result = work()
        finally:
            _here.passage = None
            while torch._C._len_torch_function_stack() > depth:
                _pop_mode()  # type: ignore[no-untyped-call]
            self._held.clear()
            self._ahead.clear()
        return result

    def run_out(self) -> None:
        """Pass the stages that the work has not come to, and leave the last."""
        self._leave(self.stages - 1)
        self._ended(self.stage)
        self._floors, self._marks = [], {}

    def advance(self, stage: int, arguments: Any) -> None:
        """Move to a later stage; `arguments` are sent there while this one's card computes on."""
        self._marks[self.stage] = self._copies.mark(self.stage)
        self._ahead.clear()
        for tensor in tensors_in_known(arguments):
            if self._is_foreign(tensor, stage, arriving=True) and not self._is_leaf(tensor):
                self._ahead[self._key(tensor)] = tensor, self._send(tensor, stage)
        self._leave(stage)
        self._held.clear()

    def _leave(self, stage: int) -> None:
        while self.stage < stage:
            self._ended(self.stage)
            self._marks.setdefault(self.stage, self._copies.mark(self.stage))
            self._pause()
            self.stage += 1
            if self._copies.real:
                torch.cuda.set_device(self._copies.devices[self.stage])
            self._floors.append(_get_sequence_nr())
            if self.stage == stage:
                for _, sent in self._ahead.values():
                    self._copies.receive(sent, stage)
            self._begun(self.stage)

    def unwatched(self, work: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Run a module whose arguments and parameters are all here, without looking at what it does."""
        if _get_current_function_mode() is not self._mode:  # type: ignore[no-untyped-call]
            return work(*arguments, **keywords)
        _pop_mode()  # type: ignore[no-untyped-call]
        try:
            return work(*arguments, **keywords)
        finally:
            _push_mode(self._mode)  # type: ignore[no-untyped-call]

    # ---- what crosses --------------------------------------------------------------------------------------

    def bring(self, value: Any) -> Any:
        """A nesting with every tensor of another stage replaced by its copy here; the same object where none is."""
        if not any(self._is_foreign(tensor, self.stage) for tensor in tensors_in_known(value)):
            return value
        return map_known(lambda tensor: self._here(tensor) if self._is_foreign(tensor, self.stage) else tensor, value)

    def _is_foreign(self, tensor: Tensor, stage: int, *, arriving: bool = False) -> bool:
        if self._copies.real:
            return tensor.is_cuda and tensor.device != self._copies.devices[stage]
        if tensor.grad_fn is not None:
            return arriving or tensor.grad_fn._sequence_nr() < self._floors[stage]
        return self._stand_ins.home_of.get(id(tensor), stage) != stage

    def _home(self, tensor: Tensor) -> int:
        if self._copies.real:
            devices = self._copies.devices
            return devices.index(tensor.device) if tensor.device in devices else self.stage
        if tensor.grad_fn is not None:
            return max(0, bisect_right(self._floors, tensor.grad_fn._sequence_nr()) - 1)
        return self._stand_ins.home_of.get(id(tensor), self.stage)

    @staticmethod
    def _is_leaf(tensor: Tensor) -> bool:
        return tensor.grad_fn is None and tensor.requires_grad

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, bool]:
        return id(tensor), torch.is_grad_enabled()

    def _send(self, tensor: Tensor, stage: int) -> Sent:
        home = self._home(tensor)
        if self._copies.real and tensor.device != self._copies.devices[home]:
            return Sent(tensor.detach().to(self._copies.devices[stage], non_blocking=True), None)
        return self._copies.send(tensor.detach(), home, stage, self._marks.get(home))

    def _here(self, tensor: Tensor) -> Tensor:
        """The copy of another stage's tensor on this one."""
        if self._is_leaf(tensor):
            return self._stand_ins.on(tensor, self.stage)
        key = self._key(tensor)
        held = self._held.get(key)
        if held is not None and held[1] == tensor._version:
            return held[2]
        home = self._home(tensor)
        origin, sent = self._ahead.pop(key, (None, None))
        if sent is None or origin is not tensor:
            sent = self._send(tensor, self.stage)
        value = self._copies.receive(sent, self.stage)
        if tensor.requires_grad and torch.is_grad_enabled():
            leaf = value.detach().requires_grad_()
            self.arrivals[self.stage].append(Arrival(tensor, home, leaf))
            value = _Enter.apply(leaf)
        self._held[key] = tensor, tensor._version, value
        return value


def refuse_differentiating(func: Any) -> None:
    """Refuse a call that differentiates inside the script's code.

    Raises:
        ModelError: `func` is such a call.
    """
    if func in _DIFFERENTIATES:
        raise ModelError(
            f"{func.__name__} is called inside loss_fn or forward, and each stage knows its own graph only",
            fix="a loss that differentiates the model (a gradient penalty) needs the whole model on one card: take"
            ' mc.Parallel(strategy="dp")',
        )


class _Watch(TorchFunctionMode):
    """Brings the tensors of other stages to each operation of the code between the modules."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self._passage = passage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            return func(*args, **kwargs)
        if self._passage.stage > 0:
            refuse_differentiating(func)
        here = self._passage.bring(args)
        if here is not args and here[0] is not args[0]:
            self._refuse_in_place(func, args[0])
        return func(*here, **self._passage.bring(kwargs))

    def _refuse_in_place(self, func: Any, target: Any) -> None:
        name = getattr(func, "__name__", "")
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if in_place and name not in ("requires_grad_", "detach_") and isinstance(target, Tensor):
            raise ModelError(
                f"forward writes in place ({name}) into a tensor of shape {tuple(target.shape)} that an earlier stage"
                f" made, in stage {self._passage.stage}",
                fix="write y = x + z for x += z, or cut the model elsewhere",
            )


# ---- nestings that hold anything -----------------------------------------------------------------------------


def _parts(value: Any) -> list[Any] | None:
    """The parts of a nesting; None for anything else, objects that hold tensors included."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in dataclasses.fields(value)]
    return None


def tensors_in_known(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for part in _parts(value) or ():
        if isinstance(part, Tensor):
            found.append(part)
        elif not isinstance(part, int | float | str):
            found += tensors_in_known(part)
    return found


def map_known(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nesting like `value` with `function` applied to its tensors; what is no nesting stays as it is."""
    if isinstance(value, Tensor):
        return function(value)
    parts = _parts(value)
    return value if parts is None else rebuild(value, [map_known(function, part) for part in parts])


def all_known(value: Any) -> bool:
    """Whether all tensors in `value` can be seen: whether it holds no object that might hide some."""
    if value is None or isinstance(value, Tensor | int | float | complex | str | bytes | torch.dtype | torch.device):
        return True
    parts = _parts(value)
    return parts is not None and all(all_known(part) for part in parts)
