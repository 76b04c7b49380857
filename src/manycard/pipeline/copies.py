"""Copies between the cards of neighbouring stages, beside what both compute.

PyTorch queues a copy between two cards on the current stream of the card it comes from, and makes the current stream
of the other wait for it. In the compute streams a stage would wait for its neighbour's whole queue. So each way from
one stage to another has two streams of its own, one on either card. Ways must not share them: activations from the
stage before and gradients from the stage after arrive on one card, and a copy that waits for its stage to compute would
hold up all others behind it. Events tie the ways to the compute streams; no call waits on the host.

Memory: a tensor that is used on another stream than the one it was made on is recorded there, so that its memory is
not given out anew while that use is queued.

Simulated cards copy too, so that what is written in place on one stage is not seen on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from manycard.cards.card import Card

__all__ = ["Sent", "StageCopies"]


@dataclass(frozen=True)
class Sent:
    """A tensor on its way."""

    tensor: Tensor
    arrived: torch.cuda.Event | None


class StageCopies:
    """Copies between the cards of one chain of stages.

    Args:
        cards: the stages' cards, in order.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self.devices = [card.device for card in cards]
        self.real = self.devices[0].type == "cuda"
        self._ways: dict[tuple[int, int], tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        """From one stage to another: the streams on the card that a copy leaves and on the one where it arrives."""
        if self.real:
            for source, target in permutations(range(len(cards)), 2):
                ends = torch.cuda.Stream(self.devices[source]), torch.cuda.Stream(self.devices[target])  # type: ignore[no-untyped-call]
                self._ways[source, target] = ends

    def mark(self, stage: int) -> torch.cuda.Event | None:
        """A note of what the stage's card has been given so far, for a copy to wait for."""
        return torch.cuda.current_stream(self.devices[stage]).record_event() if self.real else None

    def send(self, tensor: Tensor, source: int, target: int, after: torch.cuda.Event | None = None) -> Sent:
        """Start to copy a stage's tensor to another stage.

        Args:
            tensor: without a graph.
            after: what the copy waits for; without it, all that the source's card has been given so far.
        """
        if not self.real:
            return Sent(tensor.clone(), None)
        if source == target:
            return Sent(tensor, None)
        leaving, arriving = self._ways[source, target]
        if after is None:
            after = self.mark(source)
        assert after is not None, "real cards have events"
        leaving.wait_event(after)
        tensor.record_stream(leaving)
        with torch.cuda.stream(arriving), torch.cuda.stream(leaving):
            copy = tensor.to(self.devices[target], non_blocking=True)
        return Sent(copy, arriving.record_event())

    def receive(self, sent: Sent, target: int) -> Tensor:
        """The copy, for use on the target's compute stream, which waits for it."""
        if sent.arrived is not None:
            stream = torch.cuda.current_stream(self.devices[target])
            stream.wait_event(sent.arrived)
            sent.tensor.record_stream(stream)
        return sent.tensor
