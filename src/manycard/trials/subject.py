"""What is tried: a model, its optimizers, a loss and one global batch.

Behaviour:
    * A trial trains copies: the script's own module, optimizers and their state stay as they are.
    * Random states of the host and of all cards are put back after it (`preserving_draws`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manycard.cards import Card
from manycard.checkpoint import global_rng_state, load_global_rng_state
from manycard.engine.batches.batch import count_samples, cut
from manycard.engine.replicas.copying import ModuleCopier
from manycard.strategies.strategy import LossFn

__all__ = ["Subject", "preserving_draws"]


@dataclass(frozen=True)
class Subject:
    """One training, to be tried on copies."""

    name: str
    module: nn.Module
    optimizers: tuple[Optimizer, ...]
    loss_fn: LossFn
    batch: Any
    """A global batch, on the host or on the primary card."""
    precision: str = "default"
    clip_norm: float | None = None
    written: str = "api"
    """As `Facts.written`."""
    input_rate: float | None = None
    """Samples a second that its loader was seen to give."""

    @property
    def samples(self) -> int:
        """Samples in the global batch."""
        return count_samples(self.batch)

    def part(self, samples: int) -> Any:
        """The first `samples` of the batch; the whole batch where it has no more."""
        held = self.samples
        return self.batch if samples >= held else cut(self.batch, [samples, held - samples])[0]

    def copies(self, device: torch.device) -> tuple[nn.Module, list[Optimizer]]:
        """The module and its optimizers anew, on `device`; equal to the originals.

        Raises:
            ModelError: the module holds something that can't be copied.
        """
        module = ModuleCopier(self.module, device).replica
        own, twins = list(self.module.parameters()), list(module.parameters())
        # Parameters are in the memo, so that groups and states of the copy hold the copy's.
        memo: dict[int, Any] = {id(one): twin for one, twin in zip(own, twins, strict=True)}
        optimizers = []
        for optimizer in self.optimizers:
            made = copy.deepcopy(optimizer, memo)
            for each in made.param_groups:
                each["params"] = list(each["params"])
            optimizers.append(made)
        return module, optimizers


@contextmanager
def preserving_draws(cards: Sequence[Card]) -> Iterator[None]:
    """Put back the random states of the host and of `cards`, whatever is drawn meanwhile."""
    devices = [card.device for card in cards if not card.simulated]
    host, states = global_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    try:
        yield
    finally:
        load_global_rng_state(host)
        for device, state in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(state, device)
