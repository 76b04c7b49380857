"""Strategy ``ddp``: one process a card, gradients averaged by DistributedDataParallel.

Behaviour:
    * Ranks are started by ``manycard run`` or torchrun; a script that runs alone raises `NeedsRanks`.
    * The whole ``loss_fn(module, batch)`` is one forward pass of DistributedDataParallel, so that a loss may call
      the module in parts, more than once, or by other methods.
    * DDP averages over ranks; losses are weighted beforehand so that the average is that of the global batch.
    * A rank that has only a stand-in for an empty shard takes part in every collective and adds nothing. DDP
      reduces only after one of its parameters has had a gradient, so each rank has one more parameter, the anchor,
      for such a rank to use.
    * What DDP can't reduce while backward runs (sparse gradients, reentrant checkpoints) is reduced after it.
    * The first batch that is not from a loader of manycard's is compared over ranks: equal ones are warned of.
    * Buffers are not broadcast in each forward pass; rank 0's are given to all before evaluation and checkpoints.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from manycard.cards.card import Card
from manycard.data import Feed, content_print
from manycard.engine.batches.batch import count_samples, move, tensors_in
from manycard.engine.driving.random import CardGenerators
from manycard.engine.graphs import Graphs
from manycard.engine.replicas.compiling import compile_calls
from manycard.engine.replicas.replicas import same_bits
from manycard.engine.replicas.sync_batchnorm import convert_batchnorm, counting_nothing
from manycard.engine.steps.loss import ShardLoss
from manycard.engine.steps.loss_check import check_mean_loss
from manycard.errors import CardsError, LockstepError, LossError, NeedsRanks
from manycard.precision import Precision
from manycard.strategies.card_memory import is_out_of_memory
from manycard.strategies.peers import Ranks
from manycard.strategies.process import ProcessStrategy
from manycard.strategies.rank_model import RankModel
from manycard.strategies.strategy import Count, LossFn, MicroBatch, StrategyOptions, Update

__all__ = ["DistributedStrategy"]


class DistributedStrategy(ProcessStrategy):
    """One process a card."""

    name = "ddp"
    ranks = True

    def __init__(self, cards: Sequence[Card], precision: Precision, feed: Feed, options: StrategyOptions) -> None:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise NeedsRanks(
                "strategy 'ddp' runs one process a card, and this process is alone",
                fix="start the script with: manycard run --strategy ddp SCRIPT",
            )
        super().__init__(cards, precision, feed, options)
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        if local >= len(self.cards):
            raise CardsError(
                "cards",
                ",".join(map(str, self.cards)),
                f"local rank {local} has no card",
                fix=f"start {len(self.cards)} processes on this machine",
            )
        self._card = self.cards[local]
        self.peers = Ranks(self._card)
        self.generators = CardGenerators([self._card])
        self._samples = 1
        self._compared = False
        self._called: list[RankModel] = []

    @property
    def device(self) -> torch.device:
        return self._card.device

    @property
    def _name(self) -> str:
        return self._card.name

    # ---- set-up --------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.options.sync_batchnorm:
            module = convert_batchnorm(module)
        if self.options.compile is not None:
            compile_calls(module, self.options.compile)
        model = RankModel(module.to(self.device), self)
        _draw_apart(self.peers.rank)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, RankModel) else model

    # ---- the step ------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        unit: Count | None,
        *,
        ends_group: bool,
        graphs: Graphs | None = None,
    ) -> MicroBatch:
        try:
            return super().forward_backward(model, loss_fn, batch, unit, ends_group=ends_group, graphs=graphs)
        except RuntimeError as error:
            if not (self.tells_of_memory and is_out_of_memory(error)) or "ranks ran out of memory" in str(error):
                raise
        # Outside the handler, whose traceback holds activations. The others wait in the exchange that ends a part.
        self._exchanged(torch.zeros(3, dtype=torch.float64, device=self.device), full=True)
        raise AssertionError("an exchange with a full rank raises in every rank")

    def _loss(self, model: nn.Module, loss_fn: LossFn, batch: Any, samples: int) -> Any:
        assert isinstance(model, RankModel), "setup gives a RankModel"
        self._samples = samples
        self._compare_batches(batch)
        if samples or self.options.sync_batchnorm:
            with self.counting():
                return model.reducer(loss_fn, batch)
        return model.reducer(None)

    def counting(self) -> AbstractContextManager[object]:
        """The context for a forward pass, in which a stand-in's samples don't count in statistics."""
        return nullcontext() if self._samples else counting_nothing()

    def _weighted(self, loss: ShardLoss, samples: int, unit: Count) -> Tensor:
        weighted = super()._weighted(loss, samples, unit)
        return weighted if samples else weighted * 0

    def _whole(self, loss: ShardLoss, samples: int) -> MicroBatch:
        own, value = float(samples), loss.value.detach().double()
        count = own if loss.count is None else loss.count
        weighted = value * own if loss.count is None else value
        numbers = torch.zeros(3, dtype=torch.float64, device=self.device)
        if samples:
            over = torch.as_tensor(count, dtype=torch.float64, device=self.device)
            numbers = torch.stack([weighted, numbers.new_tensor(own), over])
        numbers = self._exchanged(numbers, full=False)
        mean = (numbers[0] / numbers[2]).to(loss.value.dtype)
        whole = numbers[1]
        # A stand-in's loss doesn't tell whether the others' are means; the sum of counts is right for both.
        return MicroBatch(mean, whole, whole if samples and loss.count is None else numbers[2])

    def _exchanged(self, numbers: Tensor, *, full: bool) -> Tensor:
        """The sum of every rank's numbers. Where ranks tell of memory, it raises in all if one of them is `full`."""
        if not self.tells_of_memory:
            return self.peers.all_reduce(numbers)
        *found, ranks_full = self.peers.all_reduce(torch.cat([numbers, numbers.new_tensor([float(full)])]))
        if bool(ranks_full):
            raise torch.OutOfMemoryError(f"{int(ranks_full)} of {self.peers.world_size} ranks ran out of memory")
        return torch.stack(found)

    def _reducing(self, model: nn.Module, ends_group: bool) -> AbstractContextManager[object]:
        assert isinstance(model, RankModel), "setup gives a RankModel"
        model.follow()
        return nullcontext() if ends_group else self.no_sync(model)

    def update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        assert isinstance(model, RankModel), "setup gives a RankModel"
        reduced = update.reduced and not model.call.reduces_after
        return super().update(model, optimizers, replace(update, reduced=reduced))

    def check_loss(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
        batch = move(batch, self.device)
        problem: LossError | None = None
        if self.feed.samples(count_samples(batch)):
            try:
                with self.generators.preserved():
                    check_mean_loss(loss_fn, self.unwrap(model), batch, self.device, self.precision)
            except LossError as error:
                problem = error
        # A shard may be too small to tell, or tell nothing: ranks must come to one verdict or wait for each other.
        found = [error for error in self.peers.gather_objects(problem) if error is not None]
        if found:
            raise found[0]

    # ---- the explicit loop ---------------------------------------------------------------------------------

    def note_call(self, model: RankModel, batch: Any) -> None:
        """Remember which model the script called, and with how many samples."""
        if torch.is_grad_enabled() and model not in self._called:
            self._called.append(model)
        if next(tensors_in(batch), None) is not None:
            self._samples = self.feed.samples(count_samples(batch))
            if torch.is_grad_enabled():
                self._compare_batches(batch)

    def _compare_batches(self, batch: Any) -> None:
        """Once: say where ranks were given the same batch, which a loader of the script's own gives them."""
        if self._compared or self.peers.world_size == 1:
            return
        self._compared = True
        info = self.feed.current
        handed_out = info is not None and info.held == count_samples(batch)
        prints = self.peers.gather_objects(None if handed_out else content_print(list(tensors_in(batch))))
        same = [str(rank) for rank, value in enumerate(prints) if value is not None and value == prints[0]]
        if len(same) > 1 and self.peers.rank == 0:
            warnings.warn(
                f"ranks {', '.join(same)} were given the same batch, so each computes the same: in ddp a batch that is "
                "not from parallel.loader counts as its rank's shard. parallel.loader(...), which takes a DataLoader "
                "as well, gives each rank its part",
                stacklevel=2,
            )

    def backward(self, loss: Tensor) -> None:
        share = self._samples * self.peers.world_size / self.peers.total(self._samples)
        super().backward(loss * share)
        for model in self._called:
            if model.call.reduces_after and model.syncs:
                self.peers.average_gradients(model.module.parameters())
        self._called.clear()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, RankModel), "setup gives a RankModel"
        reducer, before = model.reducer, model.syncs
        model.syncs = False
        try:
            with reducer.no_sync() if isinstance(reducer, DistributedDataParallel) else nullcontext():
                yield
        finally:
            model.syncs = before

    def holdings(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[tuple[Card, list[nn.Module], list[Optimizer], list[Tensor]]]:
        return [(self._card, [self.unwrap(model) for model in models], list(optimizers), [])]

    # ---- replicas ------------------------------------------------------------------------------------------

    def check_lockstep(self, model: nn.Module) -> None:
        different = ""
        for name, parameter in self.unwrap(model).named_parameters():
            first = parameter.detach().clone()
            self.peers.broadcast([first])
            if not same_bits(first, parameter):
                different = different or name
        found = [(rank, name) for rank, name in enumerate(self.peers.gather_objects(different)) if name]
        if found:
            rank, name = found[0]
            raise LockstepError(
                f"parameter {name} differs between rank 0 and rank {rank}",
                fix="change parameters on every rank alike, through the optimizer",
            )


def _draw_apart(rank: int) -> None:
    """Give every rank but 0 its own draws, as `dp` gives every card but the primary."""
    if rank:
        seed = torch.initial_seed() + rank
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
