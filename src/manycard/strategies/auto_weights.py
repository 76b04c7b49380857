"""What ``weights="auto"`` does for one model: shares of each batch, by the cards' times and their memory.

Behaviour:
    * Shares start equal. The cards' times in train steps decide on others (`Balancer`), within each card's free memory;
      each change is said in one line.
    * After a card has run out of memory in the first micro-batch of a group it gets less, and the step begins again
      with the buffers and random states it began with.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import torch
from torch import nn

from manycard.cards.card import Card
from manycard.engine.batches.balance import Balancer, Change, Patience
from manycard.engine.batches.cutting import WeightedCutter
from manycard.engine.driving.card_times import MeasuredTimes
from manycard.engine.engine import Engine
from manycard.strategies.before import Before
from manycard.strategies.splitting import AUTO
from manycard.strategies.strategy import Strategy

__all__ = ["AutoWeights"]

_ON_GPUS = Patience(warm_up=8, after_change=4)
"""Steps that record CUDA graphs, or are compared with a replay, take longer."""


class AutoWeights:
    """The shares of one model's batches.

    Args:
        engine: the model's; its batches are cut and its cards timed from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._cards = engine, engine.cards
        self._balancer = Balancer(len(self._cards), None if self._cards[0].simulated else _ON_GPUS)
        self._times = MeasuredTimes(self._cards)
        self._cutter = WeightedCutter(self._balancer.weights, everyone=True)
        engine.cutter, engine.times = self._cutter, self._times
        self.steps = 0
        """Updates so far."""
        self._largest = 1
        """Samples of the largest micro-batch so far."""
        self._before: Before | None = None
        """What a step began with, for one that runs out of memory."""
        self._before_of = 0
        """The generation of replicas that `_before` was made for."""

    @property
    def weights(self) -> list[float]:
        """The shares as they are now."""
        return list(self._balancer.weights)

    def start_from(self, weights: Sequence[float]) -> None:
        """Take up what an earlier run has found."""
        self._balancer.start_from(weights)
        self._cutter.set_weights(self._balancer.weights)

    def note_batch(self, samples: int) -> None:
        """Take note of a micro-batch that the cards have memory for."""
        self._largest = max(self._largest, samples)

    def balance(self) -> int | None:
        """After an update: change the shares where that makes steps shorter; the card that only holds the others up."""
        self.steps += 1
        for step in self._times.finished():
            change = self._balancer.note(step, self._most_shares)
            if change is not None:
                self._cutter.set_weights(change.weights)
                self._times.forget()
                print(_describe_change(change, self._cards), file=sys.stderr)
                break
        self._times.on = self.steps % self._balancer.every == 0
        return self._balancer.held_up_by

    def _most_shares(self) -> list[float]:
        """The largest share of a batch that each card has memory for."""
        return [most / self._largest for most in self._times.most_samples()]

    # ---- out of memory -------------------------------------------------------------------------------------

    def begin(self, strategy: Strategy, model: nn.Module) -> None:
        """Take note of what a step begins with."""
        generation = self._engine.replicas.generation
        if self._before is None or self._before_of != generation:
            self._before, self._before_of = Before(strategy, model), generation
        else:
            self._before.note()

    def give_less(self, card: int | None) -> bool:
        """After a card has run out of memory: give it less; whether that can be."""
        sizes = self._cutter.sizes
        if card is None or sizes[card] <= 1 or not self._balancer.shrink(card):
            return False
        self._cutter.set_weights(self._balancer.weights)
        self._times.forget()
        why = f"{self._cards[card]} ran out of memory with {sizes[card]} of {sum(sizes)} samples"
        print(f"{_describe(why, self._balancer.weights, self._cards)}; the step is taken again", file=sys.stderr)
        return True

    def begin_again(self) -> None:
        """Leave nothing of the failed attempt: memory, what forward wrote into buffers, random draws."""
        gc.collect()  # the failure's traceback holds what the card had made, and is held by its own frames
        for card in self._cards:
            if not card.simulated:
                with torch.cuda.device(card.device):
                    torch.cuda.empty_cache()
        assert self._before is not None, "a step notes what it begins with"
        self._before.restore()


def _describe_change(change: Change, cards: Sequence[Card]) -> str:
    took = ", ".join(f"{1e3 * seconds:.3g}" for seconds in change.seconds)
    why = "the last shares made steps longer" if change.taken_back else f"a step took {took} ms"
    return f"{_describe(why, change.weights, cards)}, and a step is expected to take {1e3 * change.expected:.3g} ms"


def _describe(why: str, weights: Sequence[float], cards: Sequence[Card]) -> str:
    shares = ", ".join(f"{card} {weight / sum(weights):.1%}" for card, weight in zip(cards, weights, strict=True))
    return f'manycard: weights="{AUTO}": {why}; from now on each batch is cut {shares}'
