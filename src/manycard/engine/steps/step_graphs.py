"""CUDA graphs of forward and backward passes: one a card and kind of micro-batch, replayed from one thread.

Behaviour:
    * The first passes run eager and warm up. The last of them is watched: what a graph can't repeat is named once,
      and passes stay eager (see `manycard.engine.recording.unrepeatable`).
    * A kind of micro-batch (shapes, strides, dtypes, plain values, modes of the module) is recorded when it comes for
      the second time. There are graphs for at most 8 kinds; others run eager.
    * The first micro-batch of a group writes the gradients, later ones add to them: two graphs.
    * A graph repeats what it recorded, whatever changes in Python meanwhile. So replays 1, 2, 8, 64, 512 and every
      4096th are compared with an eager pass on the same micro-batch. A difference ends the graphs, in words, and the
      step goes on with the eager pass's gradients.
    * What changes the module (structure, attributes, requires_grad) leads to other graphs.

Recording runs nothing on the cards, so one that fails leaves the eager pass before it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import tensors_in
from manycard.engine.driving.spans import span
from manycard.engine.recording.comparing import MOST_NOISE, TOLERANCE, Moment, due, relative_gap
from manycard.engine.recording.kinds import WARM_UP, Kinds, UnrepeatableError, signature
from manycard.engine.recording.recorder import Recorder, make_room, own_inputs, without_autocast_cache
from manycard.engine.recording.unrepeatable import Looking, describe_error, sparse_gradient, unrepeatable_part
from manycard.engine.steps.loss import ShardLoss
from manycard.engine.steps.passes import Pass
from manycard.errors import BatchError

__all__ = ["StepGraphs"]


class _Recorded:
    """The graphs of one kind of micro-batch, one a card.

    Args:
        replays: run the graphs.
        inputs: each card's tensors that replays read its shard from.
        weights: what each card's loss is multiplied by, 0-dim.
        losses: what replays write.
        used: the parameters whose gradients replays write.
    """

    def __init__(
        self,
        replays: Sequence[Callable[[], None]],
        inputs: Sequence[Sequence[Tensor]],
        weights: Sequence[Tensor],
        losses: Sequence[ShardLoss],
        used: frozenset[int],
    ) -> None:
        self.used = used
        self._count = 0
        self._replays = replays
        self._inputs = inputs
        self._weights = weights
        self._losses = losses
        self._given: list[float | None] = [None] * len(replays)

    @property
    def due(self) -> bool:
        """Whether the next replay is to be compared."""
        return due(self._count + 1)

    def replay(self, work: Pass) -> list[ShardLoss | None]:
        """Run it on this micro-batch; fresh losses come back on the primary."""
        pairs = [
            pair
            for inputs, shard in zip(self._inputs, work.shards, strict=True)
            for pair in zip(inputs, tensors_in(shard), strict=True)
        ]
        work.input_copies.write(pairs)
        for position, replay in enumerate(self._replays):
            weight = work.weigh(work.sizes[position], work.samples, self._losses[position])
            if weight != self._given[position]:
                self._weights[position].fill_(weight)
                self._given[position] = weight
            with work.times.of(position), span("replay", work.replicas.cards[position].name):
                replay()
        work.buckets.attach(self.used)
        self._count += 1
        device = work.replicas.cards[0].device

        def fresh(value: Any) -> Any:
            return value.to(device, copy=True, non_blocking=True) if isinstance(value, Tensor) else value

        return [ShardLoss(fresh(loss.value), fresh(loss.count)) for loss in self._losses]


@dataclass
class _Kind:
    seen: int = 0
    recorded: dict[bool, _Recorded] = field(default_factory=dict)
    """By whether the micro-batch begins a group."""


class StepGraphs:
    """The graphs of one train step's passes.

    Args:
        recorders: one a card.
        give_up: called with the reason, once, when passes stay eager from now on.
    """

    def __init__(self, recorders: Sequence[Recorder], give_up: Callable[[str], None]) -> None:
        self._recorders = recorders
        self._say = give_up
        self._off = False
        self._passes = 0
        self._looked = False
        self._kinds = Kinds(_Kind, self._give_up)

    def run(self, work: Pass, made_for: Any, modes: Any) -> list[ShardLoss | None]:
        """Run a micro-batch, by graphs where there are any.

        Args:
            made_for: what every graph depends on; all are recorded anew when it changes.
            modes: what may go to and fro: each has graphs of its own.
        """
        kind = None if self._off or not all(work.sizes) else self._kind(work, made_for, modes)
        if kind is None:
            return work.eager()
        recorded = kind.recorded.get(work.first)
        if recorded is not None:
            return self._compared(work, recorded) if recorded.due else recorded.replay(work)
        self._passes += 1
        kind.seen += 1
        if self._passes >= WARM_UP and not self._looked:
            return self._look(work)
        return self._record(kind, work) if self._looked and kind.seen >= 2 else work.eager()

    def _give_up(self, reason: str) -> None:
        self._off = True
        self._kinds.clear()
        self._say(reason)

    def _kind(self, work: Pass, made_for: Any, modes: Any) -> _Kind | None:
        try:
            key = modes, tuple(signature(shard) for shard in work.shards)
        except (UnrepeatableError, BatchError) as error:
            self._give_up(str(error).partition(". Fix:")[0])
            return None
        return self._kinds.find(made_for, key)

    def _look(self, work: Pass) -> list[ShardLoss | None]:
        """The last pass of the warm-up, watched for what can't be repeated."""
        module = work.replicas.module
        looking = Looking(module, work.replicas.cards[0].device)
        with looking:
            results = work.eager()
        self._looked = True
        written = f"forward writes {work.written[0]}" if work.written else ""
        reason = unrepeatable_part(module) or sparse_gradient(module) or looking.reason or written
        if reason:
            self._give_up(reason)
        return results

    # ---- recording -----------------------------------------------------------------------------------------

    def _record(self, kind: _Kind, work: Pass) -> list[ShardLoss | None]:
        before = _moment(work)
        results = work.eager()
        used, *others = [work.buckets.used(position) for position in range(len(work.sizes))]
        if not used or any(other != used for other in others):
            self._give_up("cards use different parameters")
            return results
        expected = _Outcome(work, used, results)
        try:
            recorded = self._recorded(work, used)
        except Exception as error:
            work.buckets.attach(used)
            self._give_up(describe_error(error))
            return results
        kind.recorded[work.first] = recorded
        return self._judged(work, recorded, before, expected)

    def _recorded(self, work: Pass, used: frozenset[int]) -> _Recorded:
        cards = work.replicas.cards
        make_room(cards)
        inputs, shards = own_inputs(cards, work.shards)
        weights = [torch.ones((), device=card.device) for card in cards]
        if work.first:
            work.buckets.detach()
        replays, losses = [], []
        for position in range(len(cards)):
            jobs: list[Callable[[], Any] | None] = [None] * len(cards)
            jobs[position] = partial(self._record_card, work, position, shards[position], weights[position])
            replay, loss = work.threads.run(jobs)[position]
            replays.append(replay)
            losses.append(loss)
        return _Recorded(replays, inputs, weights, losses, used)

    def _record_card(
        self, work: Pass, position: int, shard: Any, weight: Tensor
    ) -> tuple[Callable[[], None], ShardLoss]:
        def run() -> ShardLoss:
            loss = work.run_on(position, shard, lambda _: weight)
            return ShardLoss(loss.value.detach(), loss.count)

        with without_autocast_cache():
            return self._recorders[position].record(run)

    # ---- comparing -----------------------------------------------------------------------------------------

    def _compared(self, work: Pass, recorded: _Recorded) -> list[ShardLoss | None]:
        """A replay, compared with an eager pass where there is memory for one."""
        before = _moment(work)
        try:
            expected = _Outcome(work, recorded.used, work.eager())
        except torch.OutOfMemoryError:
            before.restore()
            return recorded.replay(work)
        return self._judged(work, recorded, before, expected)

    def _judged(self, work: Pass, recorded: _Recorded, before: Moment, expected: _Outcome) -> list[ShardLoss | None]:
        before.restore()
        results = recorded.replay(work)
        gap = expected.gap(_Outcome(work, recorded.used, results))
        if gap <= TOLERANCE:
            return results
        before.restore()
        results = work.eager()
        noise = expected.gap(_Outcome(work, recorded.used, results))
        if gap > TOLERANCE + min(4 * noise, MOST_NOISE):
            self._give_up(
                f"a replay gives gradients that lie {gap:.1e} from an eager pass's: forward or the loss depends on"
                " something in Python that changes from step to step"
            )
        return results


def _moment(work: Pass) -> Moment:
    """What a pass is about to change: buffers, random states and the gradients of the group so far."""
    flats = [] if work.first else [flat for flats in work.buckets.flats for flat in flats.values()]
    return Moment(work.replicas.modules, work.threads.generators, flats)


class _Outcome:
    """What a pass gave, kept on the host."""

    def __init__(self, work: Pass, used: frozenset[int], losses: Sequence[ShardLoss | None]) -> None:
        self._losses = [loss.value.detach().to("cpu", torch.float64, copy=True) for loss in losses if loss is not None]
        self._gradients = [
            [view.detach().to("cpu", copy=True) for view in work.buckets.views_of(position, used)]
            for position in range(len(work.sizes))
        ]

    def gap(self, other: _Outcome) -> float:
        """How far `other` lies away, relative to this one: its gradients of a card together, or a loss."""
        gaps = [relative_gap([own], [theirs]) for own, theirs in zip(self._losses, other._losses, strict=True)]
        gaps += [relative_gap(own, theirs) for own, theirs in zip(self._gradients, other._gradients, strict=True)]
        return max(gaps)
