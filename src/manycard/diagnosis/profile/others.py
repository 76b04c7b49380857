"""Who else computes on the cards that were profiled."""

from __future__ import annotations

from collections.abc import Sequence

from manycard.cards import own_pids, read_machine, visible_now
from manycard.cards.choose import others_on

__all__ = ["others_at_work"]


def others_at_work(cards: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Cards on which processes that are not this run's compute, with one of those in words.

    Args:
        cards: their names; simulated ones are nobody's.
    """
    real = [name for name in cards if name.startswith("cuda:")]
    if not real:
        return ()
    machine, ours = read_machine(), own_pids()
    seen = visible_now(machine.cards, machine.why_none).cards
    found = []
    for name in real:
        place = int(name.removeprefix("cuda:"))
        others = others_on(seen[place], ours) if place < len(seen) else []
        if others:
            found.append((name, str(others[0])))
    return tuple(found)
