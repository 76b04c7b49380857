"""Data parallel in one process: one module on several cards, driven by one thread each.

A step: the batch is cut into shards; each card's thread runs ``loss_fn(replica, shard)`` and its backward pass;
gradients are reduced in buckets from one thread; each card's thread clips and runs its own optimizer. No weights
travel, and the replicas stay in lockstep because they start equal and get equal gradients.

Under failure and cancellation:
    * An error on one card drops the group's gradients; the next step starts afresh.
    * If an update ends on some cards only, the next pass begins by making them equal again (`Updates`).
    * Between steps the script may change the module. Changes are brought to the replicas at the next call
      (`Replicas.follow`), parameters the script wrote in place are sent anew.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards.card import Card
from manycard.engine.batches.batch import move
from manycard.engine.batches.cutting import Cutter
from manycard.engine.batches.input_copies import InputCopies
from manycard.engine.driving.card_times import CardTimes
from manycard.engine.driving.random import CardGenerators
from manycard.engine.driving.spans import span
from manycard.engine.driving.threads import CardThreads
from manycard.engine.graphs import Graphs
from manycard.engine.recording.recorder import Recorder, make_recorders
from manycard.engine.replicas.buckets import Buckets
from manycard.engine.replicas.collective import Collective, Rounded, make_collective
from manycard.engine.replicas.lockstep import LockstepGuard
from manycard.engine.replicas.replicas import Replicas
from manycard.engine.steps.passes import Autocast, LossFn, Pass, Weigh
from manycard.engine.steps.updates import Updates
from manycard.errors import ModelError

__all__ = ["Engine"]

ShardResult = tuple[int, Tensor, "float | Tensor | None"]
"""A card's samples, its loss (0-dim, on the primary) and what the loss is a sum over, if it is one."""


class Engine:
    """One module on several cards.

    Args:
        module: the user's module, already on the primary's device.
        cards: the cards, the primary first.
    """

    def __init__(self, module: nn.Module, cards: Sequence[Card]) -> None:
        self.cards = tuple(cards)
        self.device = self.cards[0].device
        self.generators = CardGenerators(cards)
        self.threads = CardThreads(cards, self.generators)
        self.collective = make_collective(cards)
        self.input_copies = InputCopies(cards)
        self._sums: Collective = self.collective
        self.replicas = Replicas(module, cards, self.collective)
        self.updates = Updates(self.replicas, self.threads, self.collective)
        self.cutter = Cutter()
        """How batches become shards."""
        self.times = CardTimes()
        """What notes how long each card computes in a step; nothing in its base."""
        self.lock = threading.RLock()
        """Held by whoever spreads work: several threads of a script are served in turn."""
        self._buckets: Buckets | None = None
        self._buckets_for: Any = None
        self._guard = LockstepGuard()
        self._send_always = False
        self._group_open = False
        self._recorders: list[Recorder] = []
        self._made = 0
        """How often buckets were made."""
        self._made_for: Any = None

    def share_generators(self, generators: CardGenerators) -> None:
        """Draw from the random states that all models of one run share."""
        self.generators = self.threads.generators = generators

    def reduce_in(self, dtype: torch.dtype) -> None:
        """Let buckets be summed in a shorter dtype from now on."""
        self._sums = Rounded(self.collective, dtype)
        self._buckets_for = None

    # ---- one micro-batch -----------------------------------------------------------------------------------

    def start_group(self) -> None:
        """A new group of micro-batches begins; its first drops the gradients there are."""
        self.threads.finish()
        self.times.drop()
        self._group_open = False

    def forward_backward(
        self, loss_fn: LossFn, batch: Any, weigh: Weigh, autocast: Autocast, graphs: Graphs | None = None
    ) -> tuple[list[ShardResult], int]:
        """Run one micro-batch forward and backward on all cards.

        Args:
            weigh: called with the shard's and the batch's samples and the shard's loss; its result multiplies
                the loss before backward.
            graphs: what runs it as CUDA graphs where it can.

        Returns:
            The result of each card that had samples, and the number of samples in the batch.

        Raises:
            BatchError: the batch is empty or can't be cut.
            LossError: no card's loss depends on a parameter.
        """
        whole = self.cutter.cut(batch, self.cards)
        samples, shards, sizes = whole.samples, whole.shards, whole.sizes
        some = next(shard for shard, size in zip(shards, sizes, strict=True) if size)
        self.initialise_lazy(lambda: loss_fn(self.replicas.module, move(some, self.device)))
        buckets = self._prepare_training()
        if self._group_open:
            buckets.check_kept()
        first = not self._group_open
        work = Pass(
            self.replicas,
            self.threads,
            buckets,
            self.input_copies,
            loss_fn,
            autocast,
            weigh,
            samples,
            shards,
            sizes,
            first,
            self.times,
        )
        self._group_open = True
        if graphs is None:
            losses = work.eager()
        else:
            self.generators.follow_seed()
            self._made_for = self._made, self.replicas.changes, self.replicas.addresses()
            losses = graphs.passes.run(work, (*self._made_for, self.cutter.changes), self.replicas.modes)
        self.times.note_samples(sizes)
        results = [(size, loss.value, loss.count) for size, loss in zip(sizes, losses, strict=True) if loss is not None]
        return results, samples

    def initialise_lazy(self, forward: Callable[[], Any]) -> None:
        """Let lazy parameters find their shapes on the primary before replicas are made."""
        if self.replicas.generation or not self.replicas.lazy:
            return
        module = self.replicas.module
        modes = [(part, part.training) for part in module.modules()]
        with torch.no_grad(), self.generators.preserved():
            module.eval()
            forward()
        for part, training in modes:
            part.training = training

    def make_graphs(self, *, required: bool) -> Graphs | None:
        """What one train step needs to run as CUDA graphs; None on cards that have none."""
        self._recorders = self._recorders or make_recorders(self.cards)
        return Graphs(self._recorders, required=required) if self._recorders else None

    def _prepare_training(self) -> Buckets:
        self.refresh(statistics=False)
        if self._guard.drifted(self.replicas.parameters):
            self._send_always = True
            self.replicas.send_parameters()
            warnings.warn(
                "parameters changed on the primary card in a way that the replicas could not see (a write through"
                " .data, say); from now on they are sent in every step, which costs a little",
                stacklevel=2,
            )
        self._refuse_hooks()
        trainable = [index for index, parameter in enumerate(self.replicas.parameters[0]) if parameter.requires_grad]
        key = (self.replicas.generation, trainable)
        if self._buckets is None or key != self._buckets_for:
            if self._group_open:
                raise ModelError(
                    "the module's parameters changed in the middle of a group of micro-batches",
                    fix="change layers and requires_grad only between updates",
                )
            chosen = [[parameters[index] for index in trainable] for parameters in self.replicas.parameters]
            self._buckets, self._buckets_for = Buckets(chosen, self.cards, self._sums), key
            self._made += 1
        return self._buckets

    def _refuse_hooks(self) -> None:
        for index, parameter in enumerate(self.replicas.parameters[0]):
            if len(self.cards) > 1 and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                name = [name for name, _ in self.replicas.module.named_parameters()][index]
                raise ModelError(
                    f"parameter {name} has a gradient hook, which in train_step would see one card's part only",
                    fix="write the loop out: with model(x) and parallel.backward(loss), hooks see the whole gradient",
                )

    def refresh(self, *, statistics: bool) -> None:
        """Bring the replicas to the primary's structure, parameters and buffers where they may differ."""
        self.threads.finish()
        self.replicas.follow()
        if self.updates.apart or self._send_always or self.replicas.moved or self.updates.stepped_alone:
            self.replicas.send_parameters()
        self.replicas.send_buffers(statistics=statistics)

    # ---- the update ----------------------------------------------------------------------------------------

    def mirrors(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has been added."""
        return optimizer in self.updates.mirrored

    def add_optimizer(self, optimizer: Optimizer, *, shard: bool = False) -> None:
        """Mirror the user's optimizer on every card.

        Args:
            shard: let each card keep state for, and update, a part of the parameters.
        """
        self.updates.add(optimizer, shard=shard)

    def update(
        self,
        optimizers: Sequence[Optimizer],
        factor: float | Tensor,
        clip_norm: float | None,
        loss_scale: float | None,
        graphs: Graphs | None = None,
    ) -> bool:
        """Reduce the group's gradients, multiply them by `factor`, unscale, clip, and update every replica.

        Args:
            graphs: what runs the update as CUDA graphs where it can.

        Returns:
            Whether parameters were updated; False where `loss_scale` is given and a gradient is inf or NaN.
        """
        buckets = self._buckets
        assert buckets is not None, "forward_backward comes before update"
        self._group_open = False
        with span("reduce"):
            buckets.reduce()
        return self.updates.run(optimizers, buckets, factor, clip_norm, loss_scale, self.times, graphs, self._made_for)

    # ---- evaluation ----------------------------------------------------------------------------------------

    def evaluate(self, metric_fn: Callable[[Any, Any], Any], batch: Any, autocast: Autocast) -> list[Any]:
        """``metric_fn(replica, shard)`` of every card that has samples."""
        whole = self.cutter.cut(batch, self.cards)
        shards, sizes = whole.shards, whole.sizes
        self.refresh(statistics=True)
        # Evaluation is where averaged or swapped weights are looked at, written in any way.
        self.replicas.send_parameters()

        def shard_job(position: int) -> Any:
            device = self.cards[position].device
            with autocast(device):
                return metric_fn(self.replicas.modules[position], move(shards[position], device))

        jobs = [partial(shard_job, card) if size else None for card, size in enumerate(sizes)]
        return [result for result, job in zip(self.threads.run(jobs), jobs, strict=True) if job is not None]

    def on_card(
        self, position: int, optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer], list[Tensor]]:
        """What there is on a card: the replica, the copies of these optimizers, and buckets."""
        modules = self.replicas.modules[position : position + 1]
        flats = [] if self._buckets is None else list(self._buckets.flats[position].values())
        return modules, self.updates.copies_on(position, optimizers), flats

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """An engine is never copied: a copy of what holds it makes its own, or runs on one card."""

    def close(self) -> None:
        """End the card threads."""
        self.threads.close()
