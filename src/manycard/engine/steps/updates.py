"""Updates of every replica: the script's optimizers mirrored on all cards, stepped with equal gradients.

Under failure: an update that ends on some cards only leaves the replicas `apart`; parameters and optimizer states are
sent from the primary before they are used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manycard.engine.batches.batch import move
from manycard.engine.driving.card_times import CardTimes
from manycard.engine.driving.spans import span
from manycard.engine.driving.threads import CardThreads
from manycard.engine.graphs import Graphs
from manycard.engine.replicas.buckets import Buckets, gradients_of
from manycard.engine.replicas.collective import Collective
from manycard.engine.replicas.mirrors import Mirrors
from manycard.engine.replicas.replicas import Replicas
from manycard.engine.replicas.sharded import ShardedMirrors
from manycard.engine.steps.update_graphs import Done, UpdateWork

__all__ = ["Updates"]


class Updates:
    """The updates of one engine.

    Args:
        replicas: what is updated.
        threads: where each card's part of it runs.
        collective: how cards that share an optimizer's state send their parts.
    """

    def __init__(self, replicas: Replicas, threads: CardThreads, collective: Collective) -> None:
        self._replicas, self._threads, self._collective = replicas, threads, collective
        self.mirrored: weakref.WeakKeyDictionary[Optimizer, Mirrors] = weakref.WeakKeyDictionary()
        """What steps each of the script's optimizers on all cards."""
        self.apart = False
        """Whether replicas may differ, since an update didn't end on all of them."""

    @property
    def stepped_alone(self) -> bool:
        """Whether the script's optimizers may have moved the primary's parameters only. Fused ones leave no trace."""
        return not self.mirrored or any(mirror.outdated for mirror in self.mirrored.values())

    def add(self, optimizer: Optimizer, *, shard: bool) -> None:
        """Mirror the script's optimizer on every card.

        Args:
            shard: let each card keep state for, and update, a part of the parameters.
        """
        if shard and len(self._replicas.cards) > 1:
            self.mirrored[optimizer] = ShardedMirrors(optimizer, self._replicas, self._collective)
        else:
            self.mirrored[optimizer] = Mirrors(optimizer, self._replicas)

    def copies_on(self, position: int, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """What there is of these optimizers on a card."""
        mirrors = [self.mirrored[each] for each in optimizers if each in self.mirrored]
        return [copy for mirror in mirrors for copy in mirror.optimizers[position : position + 1]]

    def run(
        self,
        optimizers: Sequence[Optimizer],
        buckets: Buckets,
        factor: float | Tensor,
        clip_norm: float | None,
        loss_scale: float | None,
        times: CardTimes,
        graphs: Graphs | None,
        made_for: Any,
    ) -> bool:
        """Multiply reduced gradients by `factor`, unscale, clip, and step on every card.

        Args:
            buckets: with the gradients.
            times: notes how long each card takes.
            graphs: what runs it as CUDA graphs where it can.
            made_for: what the graphs of passes depend on.

        Returns:
            Whether parameters were updated; False where `loss_scale` is given and a gradient is inf or NaN.
        """
        multiplier = factor if loss_scale is None else factor / loss_scale
        cards = range(len(self._replicas.cards))
        if loss_scale is not None:
            finite = self._threads.run([partial(self._scale_and_check, card, multiplier) for card in cards])
            if not bool(finite[0]):
                return False
            multiplier = 1.0
        mirrors = [self.mirrored[optimizer] for optimizer in optimizers]
        outdated = [mirror.prepare() for mirror in mirrors]
        self.apart = True
        done = Done.NOT
        if graphs is not None and not buckets.sparse:
            work = self._work(mirrors, buckets, multiplier, clip_norm, any(outdated), made_for)
            with span("update"), times.of_all():
                done = graphs.updates.run(work)
        if done is Done.NOT:
            self._threads.run([partial(self._step, card, mirrors, multiplier, clip_norm) for card in cards], times)
        times.close()
        if done is not Done.ON_PRIMARY:  # or else parameters and states are sent before they are used again
            for mirror in mirrors:
                mirror.finish()
            self.apart = False
        if done is not Done.ON_ALL:  # a replay leaves version counters where they are
            self._replicas.mark_sent()
        return True

    def _work(
        self,
        mirrors: Sequence[Mirrors],
        buckets: Buckets,
        multiplier: float | Tensor,
        clip_norm: float | None,
        renewed: bool,
        made_for: Any,
    ) -> UpdateWork:
        def step(position: int, multiplier: float | Tensor) -> None:
            self._step(position, mirrors, multiplier, clip_norm)

        parameters, gradients = self._replicas.parameters[0], list(buckets.flats[0].values())
        return UpdateWork(
            self._threads, mirrors, step, multiplier, renewed, made_for, buckets.held, parameters, gradients
        )

    # ---- one card's part -----------------------------------------------------------------------------------

    def _scale(self, position: int, multiplier: float | Tensor) -> list[Tensor]:
        """Multiply a card's gradients and return them."""
        gradients = gradients_of(self._replicas.parameters[position])
        if gradients and (isinstance(multiplier, Tensor) or multiplier != 1.0):
            torch._foreach_mul_(gradients, move(multiplier, self._replicas.cards[position].device))
        return gradients

    def _scale_and_check(self, position: int, multiplier: float | Tensor) -> Tensor:
        """Multiply a card's gradients; whether all are finite, 0-dim. They are equal on every card."""
        norms = torch._foreach_norm(self._scale(position, multiplier), float("inf"))
        return torch.stack([norm.float() for norm in norms]).isfinite().all()

    def _step(
        self, position: int, mirrors: Sequence[Mirrors], multiplier: float | Tensor, clip_norm: float | None
    ) -> None:
        with span("update", self._replicas.cards[position].name):
            self._scale(position, multiplier)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._replicas.parameters[position], clip_norm)
            for mirror in mirrors:
                mirror.step(position)
