"""One micro-batch's forward and backward pass on every card, as it runs without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import map_tensors, move
from manycard.engine.batches.input_copies import InputCopies
from manycard.engine.driving.card_times import CardTimes
from manycard.engine.driving.spans import span
from manycard.engine.driving.threads import CardThreads
from manycard.engine.replicas.buckets import Buckets
from manycard.engine.replicas.replicas import Replicas
from manycard.engine.steps.loss import ShardLoss, read_loss
from manycard.errors import BatchError, LossError

__all__ = ["Autocast", "LossFn", "Pass", "Weigh"]

Autocast = Callable[[torch.device], AbstractContextManager[object]]
LossFn = Callable[[Any, Any], Any]
Weigh = Callable[[int, int, ShardLoss], float]
"""Called with a shard's and the batch's samples and the shard's loss; what the loss is multiplied by in backward."""


@dataclass
class Pass:
    """A micro-batch that is to run forward and backward.

    Losses that come back are on the primary, by card; None for a card without samples.
    """

    replicas: Replicas
    threads: CardThreads
    buckets: Buckets
    input_copies: InputCopies
    loss_fn: LossFn
    autocast: Autocast
    weigh: Weigh
    samples: int
    shards: Sequence[Any]
    sizes: Sequence[int]
    """Samples of each card's shard."""
    first: bool
    """Whether it begins a group: gradients of before are dropped."""
    times: CardTimes
    """Notes how long each card takes."""
    written: Sequence[str] = ()
    """The attributes of the module that an eager run wrote, as ``Class.name``."""

    def run_on(self, position: int, shard: Any, weight: Callable[[ShardLoss], float | Tensor]) -> ShardLoss:
        """One card's forward and backward pass; gradients end in its buckets. Runs in the card's thread."""
        card = self.replicas.cards[position]
        with span("forward", card.name), self.autocast(card.device):
            loss = read_loss(self.loss_fn(self.replicas.modules[position], shard))
        self.times.between(position, self.sizes[position])
        with span("backward", card.name):
            if loss.value.requires_grad:
                (loss.value * weight(loss)).backward()  # type: ignore[no-untyped-call]
            self.buckets.collect(position)
        return loss

    def eager(self) -> list[ShardLoss | None]:
        """Run it on every card that has samples.

        Raises:
            LossError: no card's loss depends on a parameter.
        """
        if self.first:
            self.buckets.forget()
            for parameter in chain.from_iterable(self.replicas.parameters):
                parameter.grad = None
        primary = self.replicas.cards[0].device
        shards = self._copied_ahead()

        def job(position: int) -> tuple[ShardLoss, bool]:
            card = self.replicas.cards[position]
            with span("copy", card.name):
                shard = move(shards[position], card.device)
            shards[position] = None
            loss = self.run_on(position, shard, partial(self.weigh, self.sizes[position], self.samples))
            return ShardLoss(loss.value.detach(), loss.count), loss.value.requires_grad

        jobs = [partial(job, card) if size else None for card, size in enumerate(self.sizes)]
        results = self.threads.run(jobs, self.times)
        self.written = self.replicas.absorb()
        if not any(result[1] for result in results if result is not None):
            raise LossError(
                "the loss depends on no parameter", fix="compute it from the model's output, without detach()"
            )
        # Sent when every card has been given all its work: the primary waits for what is sent to it, and would wait in
        # the middle of its own pass for a card that takes longer.
        losses = [None if result is None else result[0] for result in results]
        return [loss and ShardLoss(move(loss.value, primary), move(loss.count, primary)) for loss in losses]

    def _copied_ahead(self) -> list[Any]:
        """The shards, those that come from another card already on their way."""
        with self.input_copies.apart():
            pairs = zip(self.shards, self.replicas.cards, strict=True)
            return [self._ahead(shard, card.device) for shard, card in pairs]

    def _ahead(self, shard: Any, device: torch.device) -> Any:
        try:
            return map_tensors(partial(self.input_copies.ahead, device=device), shard)
        except BatchError:
            return shard  # an object with a `to` of its own, which only a split of the script's gives; moved later
