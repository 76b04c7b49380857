"""Random draws that differ between cards and repeat from one seed.

Behaviour:
    * The primary draws from PyTorch's own generator, as the script on one card would.
    * Card i draws from a generator seeded with the script's seed + i. `torch.manual_seed`, which gives every GPU
      the same seed, is noticed before the next step and offset anew.
    * A GPU has a generator of its own. Simulated cards share the CPU's, so their states are swapped in and out
      as they take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from manycard.cards.card import Card

__all__ = ["CardGenerators"]


class CardGenerators:
    """The random states of one process's cards.

    Args:
        cards: the cards, the primary first.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = tuple(cards)
        self._seed: int | None = None
        self._fresh = torch.empty(0)
        self._states: list[Tensor] = []
        self._primary = torch.get_rng_state()
        self.follow_seed()

    def follow_seed(self) -> None:
        """Give every card but the primary its own draws, where the script set a new seed."""
        if self._cards[0].simulated:
            self._follow_on_cpu()
        else:
            self._follow_on_gpus()

    def _follow_on_cpu(self) -> None:
        seed = torch.initial_seed()
        # The same seed may be set again: the generator is then as fresh as on the first time.
        if seed == self._seed and not torch.equal(torch.get_rng_state(), self._fresh):
            return
        self._seed = seed
        self._fresh, *others = [_seeded(seed + card.position) for card in self._cards]
        self._states = [self._fresh, *others]

    def _follow_on_gpus(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators = torch.cuda.default_generators
        seed = generators[self._cards[0].device.index].initial_seed()
        for card in self._cards[1:]:
            generator = generators[card.device.index]
            if card.device != self._cards[0].device and generator.initial_seed() == seed:
                generator.manual_seed(seed + card.position)

    def enter(self, position: int) -> None:
        """Let simulated card `position` draw from the CPU's generator; a real card has one of its own."""
        if position and self._cards[0].simulated:
            self._primary = torch.get_rng_state()
            torch.set_rng_state(self._states[position])

    def leave(self, position: int) -> None:
        """End what `enter` began: the CPU's generator is the primary's again."""
        if position and self._cards[0].simulated:
            self._states[position] = torch.get_rng_state()
            torch.set_rng_state(self._primary)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put every card's state back at the end, whatever was drawn meanwhile."""
        before, host = self.state_dict(), torch.get_rng_state()
        try:
            yield
        finally:
            self.load_state_dict(before)
            torch.set_rng_state(host)

    def state_dict(self) -> dict[str, Any]:
        """The states of all cards: of GPUs their own, of simulated cards but the primary the swapped-out ones."""
        if self._cards[0].simulated:
            return {"seed": self._seed, "states": [state.clone() for state in self._states]}
        return {"seed": None, "states": [torch.cuda.get_rng_state(card.device) for card in self._cards]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave. States of cards that are not here are left out."""
        if self._cards[0].simulated:
            if state["seed"] is not None:
                self._seed = int(state["seed"])
                saved = [kept.clone() for kept in state["states"][: len(self._cards)]]
                self._states = saved + self._states[len(saved) :]
            return
        for card, kept in zip(self._cards, state["states"], strict=False):
            if kept.numel() == torch.cuda.get_rng_state(card.device).numel():
                torch.cuda.set_rng_state(kept, card.device)


def _seeded(seed: int) -> Tensor:
    """The state of a CPU generator that has just been seeded."""
    return torch.Generator().manual_seed(seed).get_state()
