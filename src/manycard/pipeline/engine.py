"""A model over several cards, stage by stage, with copies of all of it side by side where there are more cards.

A batch: it is cut over replicas, each one's shard into micro-batches, and those fly through the replica's stages
(`Flight`). Gradients of replicas are added up in buckets, one set a stage. The script's optimizer updates the first
replica, wherever its parameters are; the others get its parameters before the next batch.

Under failure and cancellation:
    * An error on one card, or Ctrl-C, ends the batch on all; the next one starts afresh.
    * Before each batch the other replicas are brought up to date, so nothing of an unfinished one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.engine.batches.batch import count_samples, cut, move
from manycard.engine.driving.context import ThreadContext
from manycard.engine.driving.random import CardGenerators
from manycard.engine.driving.threads import CardThreads
from manycard.engine.replicas.collective import SumsOnHost
from manycard.engine.replicas.replicas import Replicas
from manycard.engine.steps.loss import ShardLoss
from manycard.errors import BatchError, ModelError
from manycard.pipeline.balance import Costs, Room
from manycard.pipeline.carriers import Carriers
from manycard.pipeline.cutting import least_samples, micro_batch_sizes
from manycard.pipeline.flight import Flight, Training
from manycard.pipeline.gradients import ReplicaGradients
from manycard.pipeline.planning import PlanSettings, free_bytes, make_plan
from manycard.pipeline.probe import Probe
from manycard.pipeline.schedule import find_schedule, in_flight
from manycard.pipeline.stages import Part, StagePlan, Stages
from manycard.pipeline.timeline import Recorder, Recording, Timeline

__all__ = ["MicroBatches", "PipelineEngine", "PipelineSettings"]

Work = Callable[[nn.Module, Any], Any]
Weigh = Callable[[int, int, ShardLoss], float]
"""Called with a micro-batch's and the batch's samples and its loss; what the loss is multiplied by in backward."""


@dataclass(frozen=True)
class PipelineSettings:
    """How a pipeline is built."""

    starts: tuple[str, ...] | None
    """The modules with which stages 1, 2, ... begin; None to find them."""
    micro_batches: int
    """Of each replica's shard of a batch."""
    schedule: str
    replicas: int
    checkpointed: bool
    """Recompute each part's activations in its backward pass."""
    limits: tuple[int | None, ...] | None
    """Bytes that a stage may take of each card; None to ask the cards."""


@dataclass(frozen=True)
class MicroBatches:
    """A batch as it is cut."""

    samples: int
    parts: list[list[Any]]
    """By replica."""
    sizes: list[list[int]]


class PipelineEngine:
    """One model on several cards.

    Args:
        module: the script's own; its parameters are moved to their stages' cards.
        cards: the stages' cards of the first replica, then those of the second, and so on.
        settings: how.
    """

    def __init__(self, module: nn.Module, cards: Sequence[Card], settings: PipelineSettings) -> None:
        self.module = module
        self.cards = tuple(cards)
        self.settings = settings
        self.stages = len(cards) // settings.replicas
        self.generators = CardGenerators(cards)
        self.threads = CardThreads(cards, self.generators)
        self.plan: StagePlan | None = None
        self.costs: Costs | None = None
        """What the parts cost, where they were measured."""
        self._schedule = find_schedule(settings.schedule)
        self._carriers = Carriers()
        self._replicas = Replicas(
            module, [Card(replica, torch.device("cpu")) for replica in range(settings.replicas)], SumsOnHost()
        )
        self._chains: list[Stages] = []
        self._made_for = -1
        self._gradients = ReplicaGradients()
        self._group_open = False
        self._unfinished: list[Flight] = []

    # ---- the plan ------------------------------------------------------------------------------------------

    def make_plan(self, work: Work, batch: Any, state_copies: int) -> None:
        """Find the stages with the first micro-batch of `batch`, and move the model to its cards.

        Args:
            work: the script's code: ``work(module, micro_batch)``.
            state_copies: how many copies of a parameter its gradient and the optimizer's state take.

        Raises:
            SettingError: a name is not one with which a stage can begin.
            ModelError: the model can't be cut, or a stage doesn't fit.
        """
        cards = self.cards[: self.stages]
        if self.stages == 1 and not self.settings.checkpointed and self.settings.limits is None:
            self.plan = StagePlan(1, (Part("", 0),), {})
            return
        sample = move(self.cut(batch).parts[0][0], cards[0].device)
        rooms = self._rooms(state_copies)
        settings = PlanSettings(self.settings.starts, cards, rooms, self.settings.checkpointed, self.settings.schedule)
        tensors = [*self.module.parameters(), *self.module.buffers()]
        free, size = free_bytes(cards[0]), sum(tensor.nbytes for tensor in tensors)
        streamed = free is not None and size > free // 2 and any(t.device != cards[0].device for t in tensors)
        probe = Probe(self.module, cards[0], partial(work, self.module, sample), streamed=streamed)
        with self.generators.preserved():
            self.plan, self.costs = make_plan(self.module, probe, settings)
        if not cards[0].simulated:
            torch.cuda.empty_cache()  # of what the probe took

    def _rooms(self, state_copies: int) -> tuple[Room, ...]:
        rooms = []
        for stage, card in enumerate(self.cards[: self.stages]):
            if self.settings.limits is not None:
                limit = self.settings.limits[stage]
            else:
                own = [each for each in self.module.parameters() if each.device == card.device]
                limit = free_bytes(card, sum(parameter.nbytes for parameter in own))
            actions = self._schedule(stage, self.stages, self.settings.micro_batches)
            rooms.append(Room(limit, in_flight(actions), state_copies))
        return tuple(rooms)

    # ---- replicas ------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring every replica to the first one's structure, modes, parameters and buffers, each on its cards."""
        assert self.plan is not None, "make_plan comes first"
        self._end_unfinished()
        if self.settings.replicas > 1:
            self._replicas.follow()
        if self._made_for != self._replicas.generation or not self._chains:
            self._chains = [
                Stages(
                    module,
                    self.plan,
                    self.cards_of(replica),
                    checkpointed=self.settings.checkpointed,
                    original=self.module if replica else None,
                )
                for replica, module in enumerate(self._replicas.modules)
            ]
            self._made_for = self._replicas.generation
        for chain in self._chains:
            chain.follow()
        if len(self._chains) > 1:
            self._replicas.send_parameters()
            self._replicas.send_buffers(statistics=True)

    def cards_of(self, replica: int) -> tuple[Card, ...]:
        """The cards of a replica's stages."""
        return self.cards[replica * self.stages : (replica + 1) * self.stages]

    def parameters_by_stage(self) -> list[list[nn.Parameter]]:
        """The script's own parameters, by the stage that holds them."""
        return [self._chains[0].parameters_of(stage) for stage in range(self.stages)]

    def _end_unfinished(self) -> None:
        """Wait for what Ctrl-C left running, and clear up after it."""
        self.threads.finish()
        for flight in self._unfinished:
            flight.end()
        self._unfinished = []

    def check_lockstep(self) -> None:
        """Compare every replica's parameters with the first one's, bit by bit.

        Raises:
            LockstepError: one differs.
        """
        if self.settings.replicas > 1 and self.plan is not None:
            self.refresh()
            self._replicas.check_lockstep()

    # ---- a batch -------------------------------------------------------------------------------------------

    def cut(self, batch: Any) -> MicroBatches:
        """Cut a batch over replicas, and each one's shard into micro-batches.

        Raises:
            BatchError: it is empty or can't be cut.
        """
        samples = count_samples(batch)
        if samples == 0:
            raise BatchError("the batch has 0 samples", fix="drop empty batches in the loader")
        least = least_samples(self.module)
        sizes = micro_batch_sizes(samples, self.settings.replicas, self.settings.micro_batches, least)
        parts = iter(cut(batch, [size for each in sizes for size in each]))
        return MicroBatches(samples, [[next(parts) for _ in each] for each in sizes], sizes)

    def start_group(self) -> None:
        """A new group of micro-batches begins; its first batch drops the gradients there are."""
        self._end_unfinished()
        self._group_open = False

    def forward_backward(self, work: Work, batch: Any, weigh: Weigh, record: bool) -> tuple[Any, Timeline | None]:
        """Run a batch forward and backward, adding to the gradients.

        Args:
            work: ``work(module, micro_batch)`` -> what `loss_fn` returns.
            weigh: what a micro-batch's loss is multiplied by before its backward pass.
            record: whether to note when each card works.

        Returns:
            ``(sizes, losses)`` of all micro-batches, losses on the primary; and where the time went.

        Raises:
            LossError: no loss depends on a parameter.
        """
        pieces = self.cut(batch)
        self.refresh()
        self._refuse_hooks()
        if not self._group_open:
            for chain in self._chains:
                for parameter in chain.module.parameters():
                    parameter.grad = None
            self._gradients.forget()
            self._group_open = True
        weights = [[partial(weigh, size, pieces.samples) for size in sizes] for sizes in pieces.sizes]
        flights = self._fly(work, pieces, [Training(each) for each in weights], record)
        flights[0].check_trained()
        for flight in flights:
            flight.settle()
        self._gradients.collect(self._chains, self._replicas.generation)
        losses = [
            loss for flight, chain in zip(flights, self._chains, strict=False) for loss in self._home(flight, chain)
        ]
        sizes = [size for each in pieces.sizes for size in each]
        timeline = self._timeline(flights) if record else None
        return (sizes, losses), timeline

    def _refuse_hooks(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ModelError(
                    f"parameter {name} has a gradient hook, which would see the gradient of one micro-batch at a time",
                    fix="remove it; after a step, parameter.grad is the whole gradient",
                )

    def run(self, work: Work, pieces: MicroBatches) -> list[Any]:
        """Run the micro-batches forward only, without gradients; what the script's code returned for each."""
        self.refresh()
        with torch.no_grad():
            flights = self._fly(work, pieces, [None] * len(pieces.parts), False)
        return [result for flight in flights for result in flight.results]

    def _fly(
        self, work: Work, pieces: MicroBatches, trainings: Sequence[Training | None], record: bool
    ) -> list[Flight]:
        flights = []
        jobs: list[Callable[[], None] | None] = [None] * len(self.cards)
        for replica, (parts, training) in enumerate(zip(pieces.parts, trainings, strict=True)):
            chain, cards = self._chains[replica], self.cards_of(replica)
            # Of all cards: a batch lies on the primary, from where other replicas take theirs.
            context = ThreadContext.capture(list(dict.fromkeys(card.device for card in (*cards, *self.cards))))
            works = [partial(self._piece, work, chain, part) for part in parts]
            recorder = Recording(cards) if record else Recorder()
            flight = Flight(chain, self._carriers, context, self._schedule, works, training, recorder)
            flights.append(flight)
            self._unfinished.append(flight)
            jobs[replica * self.stages : (replica + 1) * self.stages] = flight.jobs()
        try:
            self.threads.run(jobs)
        except Exception:
            self._unfinished = []  # all cards have ended, and cleared up
            raise
        except BaseException:
            for flight in flights:
                flight.cancel()
            self.threads.notify()
            raise
        self._unfinished = []
        return flights

    @staticmethod
    def _piece(work: Work, chain: Stages, part: Any) -> Any:
        return work(chain.module, move(part, chain.cards[0].device))

    def _home(self, flight: Flight, chain: Stages) -> list[ShardLoss]:
        """The losses of a replica's micro-batches, on the primary."""
        first, last = self.cards[0].device, chain.copies

        def brought(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.device == first or not last.real:
                return value
            if value.device in last.devices and first in last.devices:
                sent = last.send(value, last.devices.index(value.device), 0)
                return last.receive(sent, 0)
            return value.to(first, non_blocking=True)

        return [ShardLoss(brought(loss.value), brought(loss.count)) for loss in flight.results]

    def reduce(self) -> None:
        """Add up the replicas' gradients."""
        self._group_open = False
        self._gradients.reduce()

    # ---- the rest ------------------------------------------------------------------------------------------

    def _timeline(self, flights: Sequence[Flight]) -> Timeline:
        assert self.plan is not None, "a batch has flown"
        cards = [card for replica in range(len(flights)) for card in self.cards_of(replica)]
        spans = [span for flight in flights for span in flight.recorder.spans()]
        peaks = [None if card.simulated else torch.cuda.max_memory_allocated(card.device) // 2**20 for card in cards]
        return Timeline(
            self.settings.schedule,
            max(len(flight.results) for flight in flights),
            tuple(card.name for card in cards),
            tuple(self.plan.names(stage) for stage in range(self.stages)),
            tuple(spans),
            tuple(held for flight in flights for held in flight.held_most),
            tuple(peaks),
            cards[0].simulated,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """An engine is never copied."""

    def close(self) -> None:
        """End the threads."""
        self.threads.close()
        self._carriers.close()
