"""Recording what a script's training does in this process, step by step.

Behaviour:
    * `Recorder` is told of everything by the stand-ins of `manycard.script.verify.standing_in`; it changes nothing that
      the script computes, and draws nothing.
    * What manycard itself runs is not the script's: trial calls, cards other than the primary, what happens inside
      a train step (whose batch and loss are recorded as they came and went).
    * After the last step asked for, `RecordedEnough` is raised in the script's thread. It is no Exception, so that
      scripts which catch those let it pass; one that catches it too meets it again at its next step.
    * Nothing is recorded after that.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from manycard.engine.driving.threads import current_place
from manycard.errors import BatchError
from manycard.script.calls import Handler
from manycard.script.comparison.check import batchnorm_in_training
from manycard.script.verify.naming import ParameterNames
from manycard.script.verify.recording import (
    NO_OPTIMIZER,
    Call,
    OptimizerRecord,
    Recording,
    StepRecord,
    keeps_whole,
    sketch,
)
from manycard.script.verify.samples import rows_of
from manycard.script.verify.where import line_of_script
from manycard.strategies.rank_model import RankModel

__all__ = ["RecordedEnough", "Recorder", "RecordingHandler"]

Plain = Callable[..., Any]


class RecordedEnough(BaseException):
    """All steps asked for are recorded."""


@dataclass
class _Optimizer:
    """One optimizer that has stepped."""

    optimizer: Optimizer
    """Held, so that no other takes its identity."""
    whole: bool
    """Whether its gradients and parameters are kept whole."""


@dataclass
class _Since:
    """What happened since the step before."""

    losses: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    backward_at: str = ""
    scaled_clip: bool = False


class Recorder:
    """Records the first steps of a script.

    Args:
        steps: how many.
        budget: bytes that gradients and parameters may take before they are kept as sketches.
    """

    def __init__(self, steps: int, budget: int) -> None:
        self.active = True
        """False once all steps are recorded."""
        self.scaled = False
        """Whether a loss scale is in the gradients."""
        self.epoch = 0
        self.facts: dict[str, Any] = {"shuffles": False, "padding": 0, "uses_manycard": False, "draws": False}
        self.cards: tuple[str, ...] = ()
        self.has_optimizer = False
        self._wanted = steps
        self._budget = budget
        self._names = ParameterNames()
        self._since = _Since()
        self._loose: tuple[str, ...] = ()
        self._sketched = False
        self._steps: list[StepRecord] = []
        self._waiting: list[StepRecord] = []
        self._optimizers: list[_Optimizer] = []
        self._stepping: Optimizer | None = None
        self._before: StepRecord | None = None
        self._inside = 0
        self._updated: Sequence[Optimizer] | None = None
        """In a train step, the optimizers that it steps."""
        self._batchnorm: dict[str, None] = {}
        self.precisions: set[str] = set()
        self._on_gpu = False

    # ---- calls of modules ----------------------------------------------------------------------------------

    def call(
        self, by: Handler | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Plain
    ) -> Any:
        """Run and record an outermost call of the script's; `by` does it, where it is given."""
        if not self.listens():
            return plain(*args, **kwargs)
        self.note_call(module, (args, kwargs))
        with self.inside(), self._noting_draws():
            value = plain(*args, **kwargs) if by is None else by(module, args, kwargs, plain)
        self._look_at(module)
        return value

    def listens(self) -> bool:
        """Whether what happens now is the script's own doing, and to be recorded."""
        return self.active and not self._inside and current_place() is None

    def note_call(self, module: nn.Module, batch: Any) -> None:
        """The script is about to call `module`."""
        self._names.add(unwrapped(module))
        if torch.is_grad_enabled():
            self._note_batch(type(unwrapped(module)).__name__, batch)

    def _note_batch(self, name: str, batch: Any) -> None:
        with contextlib.suppress(BatchError):  # which the call itself will raise where it matters
            self._since.calls.append(Call(name, rows_of(batch)))

    def _look_at(self, module: nn.Module) -> None:
        """Note what in a module makes numbers differ, after its call: the first one may have changed it."""
        if batchnorm_in_training(module):
            self._batchnorm[type(unwrapped(module)).__name__] = None
        for parameter in module.parameters():
            self._on_gpu = self._on_gpu or parameter.is_cuda
            half = torch.is_autocast_enabled(parameter.device.type) or parameter.element_size() < 4
            self.precisions.add("half" if half else "double" if parameter.dtype == torch.float64 else "single")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What happens meanwhile is not the script's own."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.contextmanager
    def _noting_draws(self) -> Iterator[None]:
        if self.facts["draws"]:
            yield
            return
        before = _random_states()
        yield
        self.facts["draws"] = self.facts["draws"] or _random_states() != before

    # ---- backward passes -----------------------------------------------------------------------------------

    def note_backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """The script is about to call backward."""
        pairs = [pair for pair in zip(roots, gradients, strict=True) if isinstance(pair[0], Tensor)]
        self.note_loss(sum(_root_value(*pair) for pair in pairs))

    def note_loss(self, loss: float) -> None:
        """A backward pass is to run from `loss`."""
        self._since.losses.append(loss)
        self._since.backward_at = line_of_script() or self._since.backward_at

    def note_backward_done(self) -> None:
        """The backward pass has ended; it is a step where there is no optimizer."""
        if self.has_optimizer:
            return
        of = self._names.parameters()
        whole = keeps_whole(sum(each.numel() for each in of), self._wanted, self._budget)
        now = self._vectors(of, whole)
        self._sketched = not whole
        self._loose = self._names.of([of])  # while the modules are there
        self._keep(StepRecord(0, (), (), self._gradients(of, whole), now, before=() if self._steps else now))

    # ---- train steps ---------------------------------------------------------------------------------------

    def train_step(
        self,
        module: nn.Module,
        batch: Any,
        samples: int,
        optimizers: Sequence[Optimizer],
        call: Callable[[], Tensor],
    ) -> Tensor:
        """Run and record one train step of manycard's, in which this process's batch has `samples` samples."""
        self._names.add(module)
        self._note_batch(type(module).__name__, batch)
        if not samples and self._since.calls:  # a stand-in for a rank without samples
            self._since.calls[-1] = replace(self._since.calls[-1], rows=rows_of(()))
        self._since.backward_at = line_of_script()
        self._updated = optimizers
        try:
            with self.inside(), self._noting_draws():
                loss = call()
        finally:
            self._updated = None
        self._look_at(module)
        self.note_loss(float(loss.detach()))
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self._keep(self._with_other_cards(step))
        return loss

    def _with_other_cards(self, step: StepRecord) -> StepRecord:
        """A train step's record, with what other cards have updated of it (``shard_optimizer``): while the primary's
        optimizer steps, it sees no gradients there, and theirs are sent afterwards."""
        optimizer = self._optimizers[step.optimizer]
        now = _parameters(optimizer.optimizer)
        unseen = [each for each, known in zip(now, step.gradients, strict=False) if known is None]
        if all(each.grad is None for each in unseen):
            return step
        return replace(
            step, gradients=self._gradients(now, optimizer.whole), parameters=self._vectors(now, optimizer.whole)
        )

    # ---- optimizers ----------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """``optimizer.step`` begins."""
        # Inside another's step it is no step of its own. The same one again: its class calls its parent's step, or
        # the call before raised.
        if not self._counts() or (self._stepping is not None and self._stepping is not optimizer):
            return
        if self._updated is not None and optimizer not in self._updated:  # a copy on which something is tried
            return
        self._stepping = optimizer
        number = self._number(optimizer)
        known = number in (step.optimizer for step in (*self._steps, *self._waiting))
        closure = len(args) > 1 or kwargs.get("closure") is not None
        parameters = _parameters(optimizer)
        whole = self._optimizers[number].whole
        self._before = StepRecord(
            number,
            (),
            tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups),
            () if closure else self._gradients(parameters, whole),
            (),
            before=() if known else self._vectors(parameters, whole),
            step_at=line_of_script(),
        )

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """``optimizer.step`` has ended."""
        if not self._counts() or self._stepping is not optimizer:
            return
        self._stepping = None
        begun, self._before = self._before, None
        assert begun is not None, "a step that ends has begun"
        whole, parameters = self._optimizers[begun.optimizer].whole, _parameters(optimizer)
        # A closure makes the gradients inside the step.
        gradients = begun.gradients or self._gradients(parameters, whole)
        step = replace(begun, gradients=gradients, parameters=self._vectors(parameters, whole))
        if self._inside:
            self._waiting.append(step)
        else:
            self._keep(step)

    def _counts(self) -> bool:
        place = current_place()
        return self.active and (place is None or place.position == 0)

    def _number(self, optimizer: Optimizer) -> int:
        for number, known in enumerate(self._optimizers):
            if known.optimizer is optimizer:
                return number
        elements = sum(parameter.numel() for parameter in _parameters(optimizer))
        self._optimizers.append(_Optimizer(optimizer, keeps_whole(elements, self._wanted, self._budget)))
        return len(self._optimizers) - 1

    def _gradients(self, parameters: Sequence[Tensor], whole: bool = True) -> tuple[Tensor | None, ...]:
        return tuple(None if parameter.grad is None else _vector(parameter.grad, whole) for parameter in parameters)

    def _vectors(self, parameters: Sequence[Tensor], whole: bool) -> tuple[Tensor, ...]:
        return tuple(_vector(parameter, whole) for parameter in parameters)

    def _keep(self, step: StepRecord) -> None:
        since, self._since = self._since, _Since()
        self._steps.append(
            replace(
                step,
                losses=tuple(since.losses),
                calls=tuple(since.calls),
                epoch=self.epoch,
                backward_at=since.backward_at,
                step_at=step.step_at or since.backward_at,
                scaled_clip=since.scaled_clip,
            )
        )
        self.scaled = False
        if len(self._steps) >= self._wanted:
            self.active = False
            raise RecordedEnough

    def note_clip(self) -> None:
        """The script clips gradients."""
        self._since.scaled_clip = self._since.scaled_clip or self.scaled

    # ---- the result ----------------------------------------------------------------------------------------

    def recording(self, **known: Any) -> Recording:
        """What was recorded.

        Args:
            known: fields of `Recording` that the recorder can't know.
        """
        precision = next((name for name in ("half", "single", "double") if name in self.precisions), "single")
        optimizers = [
            OptimizerRecord(type(each.optimizer).__name__, self._names.of(_groups(each.optimizer)))
            for each in self._optimizers
        ]
        if not optimizers and self._steps:
            optimizers = [OptimizerRecord(NO_OPTIMIZER, self._loose)]
        return Recording(
            steps=tuple(self._steps),
            optimizers=tuple(optimizers),
            cards=self.cards,
            batchnorm=tuple(self._batchnorm),
            precision=precision,
            on_gpu=self._on_gpu,
            sketched=self._sketched or not all(each.whole for each in self._optimizers),
            **self.facts,
            **known,
        )


class RecordingHandler:
    """Sees a script's outermost calls (a `manycard.script.calls.Handler`), records them, and hands them on.

    Args:
        recorder: records them.
        inner: who does them; None for the script itself.
        one_card: whether to keep what ``nn.DataParallel`` would spread on one card.
    """

    def __init__(self, recorder: Recorder, inner: Handler | None = None, *, one_card: bool = False) -> None:
        self._recorder = recorder
        self._inner = inner
        self._one_card = one_card

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Plain) -> Any:
        inner = None if self._recorder.facts["uses_manycard"] else self._inner
        if self._one_card and isinstance(module, nn.DataParallel):
            module = plain = module.module
        return self._recorder.call(inner, module, args, kwargs, plain)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the script made, inside what it was wrapped in."""
    while True:
        if isinstance(module, nn.DataParallel | DistributedDataParallel | RankModel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _groups(optimizer: Optimizer) -> list[list[Tensor]]:
    return [group["params"] for group in optimizer.param_groups]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in _groups(optimizer) for parameter in group]


def _vector(tensor: Tensor, whole: bool) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.reshape(-1).to("cpu", copy=True)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat if whole else sketch(flat)


def _root_value(root: Tensor, gradient: Tensor | None) -> float:
    value = root.detach() if gradient is None else root.detach() * gradient.detach()
    total = value.sum()
    return float(total.real if total.is_complex() else total)


def _random_states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)["state"]
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    bits = tuple(state.numpy().tobytes() for state in states)
    return (*bits, random.getstate(), numpy["pos"], numpy["key"].tobytes())
