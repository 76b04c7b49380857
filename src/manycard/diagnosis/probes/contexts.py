"""Probe: do processes hold memory on a card beside the one that they work on?

A rank that touches CUDA before it has chosen its card, or that loads a checkpoint to where it was saved, makes a
context of about 500 MiB on the first card, which then runs out of memory before the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manycard.cards import in_words
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["extra_contexts", "probe"]

_SMALL = 0.25
"""Share of what a process holds on its own card, up to which what it holds on another is no work there."""


def probe(facts: Facts) -> list[Finding]:
    """Find cards on which ranks of other cards hold memory."""
    on = {
        f"card {info.index}": [
            (process.pid, process.memory or 0) for process in info.processes or () if process.computes
        ]
        for info in facts.machine.cards
        if not info.mig
    }
    return [
        Finding(
            cause=f"{card} also holds memory of processes that work on other cards",
            evidence=", ".join(f"pid {pid}: {in_words(memory)}" for pid, memory in extra[:4]),
            fix="call torch.cuda.set_device(local_rank) before anything else touches CUDA, and load checkpoints with "
            "map_location; manycard run does the first for you",
            severity="warning",
        )
        for card, extra in extra_contexts(on).items()
    ]


def extra_contexts(on: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
    """Card -> processes (and their bytes) that hold a little there and work on another card.

    Args:
        on: card -> its processes and their bytes. A process that drives several cards by itself is none of these:
            it holds about as much on each.
    """
    held: dict[int, dict[str, int]] = {}
    for card, processes in on.items():
        for pid, memory in processes:
            held.setdefault(pid, {})[card] = memory
    found: dict[str, list[tuple[int, int]]] = {}
    for pid, cards in held.items():
        most = max(cards.values())
        for card, memory in cards.items():
            others = any(other != pid and card in elsewhere for other, elsewhere in held.items())
            if 0 < memory <= _SMALL * most and others:
                found.setdefault(card, []).append((pid, memory))
    return found
