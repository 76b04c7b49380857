"""One batch under way: the micro-batches' passes, run on the cards by the schedule.

Behaviour:
    * Each card's thread works off its schedule. It waits for nothing but what its next action needs: the micro-batch
      from the stage before, or the gradients from the stage after. It waits on the host for those to be *queued*; cards
      wait for each other's data by events.
    * Each stage's backward pass runs from its card's thread, on that stage's own graph.
    * An exception on one stage ends the batch on all: cards stop before their next action, passes that stand at a gate
      are abandoned, and the exception has a note with stage and micro-batch. The same for Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from manycard.engine.driving.context import ThreadContext
from manycard.engine.driving.spans import span
from manycard.engine.driving.threads import current_place, with_note
from manycard.engine.steps.loss import ShardLoss, read_loss
from manycard.errors import LossError
from manycard.pipeline.carriers import AbandonedError, Carrier, Carriers
from manycard.pipeline.copies import Sent
from manycard.pipeline.passage import Passage, StandIns
from manycard.pipeline.schedule import Action, Schedule
from manycard.pipeline.stages import Stages
from manycard.pipeline.timeline import Recorder

__all__ = ["Flight", "Training"]

Work = Callable[[], Any]


@dataclass
class Training:
    """What turns the result of a micro-batch into gradients."""

    weights: Sequence[Callable[[ShardLoss], float]]
    """For each micro-batch: what its loss is multiplied by before backward."""


class Flight:
    """One batch on one copy of the model.

    Args:
        stages: the model on its cards.
        carriers: threads for passes.
        context: the caller's per-thread state.
        schedule: in which order each stage works.
        works: for each micro-batch, what runs the script's code on it.
        training: what makes gradients; None for forward passes alone.
        recorder: notes when each action runs; may do nothing.
    """

    def __init__(
        self,
        stages: Stages,
        carriers: Carriers,
        context: ThreadContext,
        schedule: Schedule,
        works: Sequence[Work],
        training: Training | None,
        recorder: Recorder,
    ) -> None:
        self.results: list[Any] = [None] * len(works)
        """What the script's code returned, by micro-batch; for training its `ShardLoss`, detached."""
        self.held_most = [0] * len(stages.cards)
        """For each stage, the most micro-batches whose graphs it held at once."""
        self.trained = False
        """Whether any loss depended on a parameter."""
        self._stages, self._context, self._works = stages, _on_any_card(context), works
        self._training, self.recorder = training, recorder
        self._carriers = carriers
        self._passes: dict[int, tuple[Carrier, Passage]] = {}
        began = [stages.copies.mark(stage) for stage in range(len(stages.cards))]
        self._stand_ins = StandIns(stages.copies, stages.home_of, began)
        self._actions = [
            [action for action in schedule(stage, len(stages.cards), len(works)) if training or not action.backward]
            for stage in range(len(stages.cards))
        ]
        self._forwarded = [0] * len(stages.cards)
        self._backwarded = [0] * len(stages.cards)
        self._roots: dict[tuple[int, int], list[tuple[Tensor, Sent | None]]] = {}
        self._cancelled = False
        self._lock = threading.Lock()
        self._at_work = len(stages.cards)
        self._undo: Callable[[], None] | None = None

    # ---- the cards' jobs -----------------------------------------------------------------------------------

    def jobs(self) -> list[Callable[[], None]]:
        """What each stage's card thread is to run. From now on the model's parts are led."""
        before: list[Any] = []
        self._undo = partial(self._stages.unlead, before)
        self._stages.lead(before)
        return [partial(self._job, stage) for stage in range(len(self._stages.cards))]

    def cancel(self) -> None:
        """Let every card stop before its next action."""
        self._cancelled = True

    def end(self) -> None:
        """Abandon what is unfinished, and leave the model as it was. Only when no card is at work."""
        with self._lock:
            passes, self._passes = self._passes, {}
            undo, self._undo = self._undo, None
        for carrier, _ in passes.values():
            carrier.abandon()
        if undo is not None:
            undo()
            torch.clear_autocast_cache()
        self._roots.clear()

    def settle(self) -> None:
        """Bring the gradients of parameters used away from home back to them; after the cards' jobs."""
        self._stand_ins.settle()

    def _job(self, stage: int) -> None:
        place = current_place()
        assert place is not None, "a stage runs in its card's thread"
        try:
            for action in self._actions[stage]:
                place.wait(partial(self._is_ready, stage, action))
                if self._cancelled:
                    raise AbandonedError
                try:
                    (self._backward if action.backward else self._forward)(stage, action.micro_batch)
                except BaseException as failure:
                    way = "backward" if action.backward else "forward"
                    parts = self._stages.plan.names(stage)
                    with_note(failure, f"in stage {stage} ({parts}), {way} of micro-batch {action.micro_batch}")
                    raise
                place.threads.notify()
        finally:
            with self._lock:
                self._at_work -= 1
                last = self._at_work == 0
            if last:
                self.end()

    def _is_ready(self, stage: int, action: Action) -> bool:
        if self._cancelled:
            return True
        if action.backward:
            return stage == len(self._forwarded) - 1 or self._backwarded[stage + 1] > action.micro_batch
        return stage == 0 or self._forwarded[stage - 1] > action.micro_batch

    # ---- forward -------------------------------------------------------------------------------------------

    def _forward(self, stage: int, number: int) -> None:
        if stage == 0:
            self._passes[number] = self._begin(number)
        carrier, _ = self._passes[number]
        with span("forward", self._stages.cards[stage].name):
            carrier.go_on()
        self._forwarded[stage] += 1
        if self._training is None and carrier.ended:
            del self._passes[number]
        held = self._forwarded[stage] - self._backwarded[stage]
        self.held_most[stage] = max(self.held_most[stage], held)

    def _begin(self, number: int) -> tuple[Carrier, Passage]:
        gate: list[Callable[[], None]] = []
        passage = Passage(
            self._stages.copies,
            self._stand_ins,
            lambda: gate[0](),
            partial(self.recorder.begin, number=number, backward=False),
            partial(self.recorder.end, number=number, backward=False),
        )

        def body(carrier: Carrier) -> None:
            gate.append(carrier.gate)
            device = self._stages.cards[0].device
            # Leaving puts the current device back, which gates have changed.
            with (
                torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
                _shared_casts(),
                self._context.entered(device),
            ):
                result = passage.run(partial(self._work, number, passage))
                self.results[number] = result
                passage.run_out()

        return self._carriers.make(body), passage

    def _work(self, number: int, passage: Passage) -> Any:
        returned = self._works[number]()
        if self._training is None:
            return returned
        loss = read_loss(returned)
        if loss.value.requires_grad:
            self.trained = True
            root = loss.value * self._training.weights[number](loss)
            self._roots[number, passage.stage] = [(root, None)]
        return ShardLoss(loss.value.detach(), loss.count)

    # ---- backward ------------------------------------------------------------------------------------------

    def _backward(self, stage: int, number: int) -> None:
        _, passage = self._passes[number]
        copies = self._stages.copies
        roots: dict[int, tuple[Tensor, Tensor | None]] = {}
        for origin, sent in self._roots.pop((number, stage), ()):
            gradient = None if sent is None else copies.receive(sent, stage)
            before = roots.get(id(origin))
            if before is not None and before[1] is not None and gradient is not None:
                gradient = before[1] + gradient
            roots[id(origin)] = origin, gradient
        self.recorder.begin(stage, number=number, backward=True)
        if roots:
            with span("backward", self._stages.cards[stage].name):
                torch.autograd.backward([root for root, _ in roots.values()], [grad for _, grad in roots.values()])
        self.recorder.end(stage, number=number, backward=True)
        mark = copies.mark(stage)
        for arrival in passage.arrivals[stage]:
            if arrival.leaf.grad is not None:
                sent = copies.send(arrival.leaf.grad, stage, arrival.home, mark)
                self._roots.setdefault((number, arrival.home), []).append((arrival.origin, sent))
        passage.arrivals[stage].clear()
        self._backwarded[stage] += 1
        if stage == 0:
            del self._passes[number]

    def check_trained(self) -> None:
        """Check that a loss depended on a parameter.

        Raises:
            LossError: none did.
        """
        if not self.trained:
            raise LossError(
                "the loss depends on no parameter", fix="compute it from the model's output, without detach()"
            )


@contextmanager
def _shared_casts() -> Iterator[None]:
    """Let all micro-batches use the casts of the weights that autocast makes for the first.

    Autocast's cache is one for all threads. Leaving the outermost autocast of any of them clears it, so inside none is.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


def _on_any_card(context: ThreadContext) -> ThreadContext:
    """`context`, with a default device that names a GPU meaning the one of the stage that runs."""
    modes = tuple(
        DeviceContext(torch.device("cuda"))
        if isinstance(mode, DeviceContext) and torch.device(mode.device).type == "cuda"
        else mode
        for mode in context.function_modes
    )
    return replace(context, function_modes=modes)
