"""A short trial of the links between cards: one large copy, and all-reduces of a few sizes.

It takes well under a second, and under half a GiB on each card. Simulated cards have no links: nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from manycard.cards import Card, inventory, links
from manycard.engine.collective import make_collective
from manycard.planner import LinkFacts
from manycard.trials.confirm import release, wait

__all__ = ["card_speeds", "measure_links"]

_SIZES_MIB = (1, 25, 100, 400)
_ROUNDS = 5


def measure_links(cards: Sequence[Card]) -> LinkFacts:
    """Measure how fast these cards reach one another."""
    if len(cards) < 2 or cards[0].simulated:
        return LinkFacts()
    kind, p2p = _read(cards)
    collective = make_collective(cards)
    times = []
    for size in _SIZES_MIB:
        buffers = [torch.zeros(size * 2**18, device=card.device) for card in cards]
        # Bound here: a buffer of the next size must not be seen by this one's clock.
        times.append((float(size), _best_ms(lambda held=buffers: collective.all_reduce(held), cards)))  # type: ignore[misc]
    source = torch.zeros(256 * 2**18, device=cards[0].device)
    target = torch.empty_like(source, device=cards[1].device)
    copied = _best_ms(lambda: target.copy_(source, non_blocking=True), cards)
    del source, target, buffers
    release(cards)
    return LinkFacts(kind, p2p, 256 * 2**20 / copied / 1e6, tuple(times), len(cards))


def card_speeds(cards: Sequence[Card]) -> list[float]:
    """Each card's speed over the first one's, by matrix products; 1 for simulated cards."""
    if cards[0].simulated:
        return [1.0 for _ in cards]
    times = []
    for card in cards:
        one = torch.ones(4096, 4096, device=card.device, dtype=torch.bfloat16)

        def multiply(matrix: torch.Tensor = one) -> None:
            for _ in range(10):
                matrix @ matrix

        times.append(_best_ms(multiply, [card]))
    release(cards)
    return [times[0] / each for each in times]


def _best_ms(work: Callable[[], object], cards: Sequence[Card]) -> float:
    work()
    found = []
    for _ in range(_ROUNDS):
        wait(cards)
        start = time.perf_counter()
        work()
        wait(cards)
        found.append(1e3 * (time.perf_counter() - start))
    return min(found)


def _read(cards: Sequence[Card]) -> tuple[str, bool | None]:
    """What NVML says joins the cards, and whether each can read every other's memory, as torch says."""
    known = {info.uuid: info for info in inventory()}
    infos = [known[card.uuid] for card in cards if card.uuid in known]
    found = [link for row in links(infos).matrix(infos) for link in row if link.rank]
    if any(link.nvlinks for link in found) and all(link.nvlinks for link in found):
        kind = "NVLink"
    else:
        kind = "PCIe" if found else "unknown"
    pairs = [(a.device, b.device) for a in cards for b in cards if a is not b]
    p2p = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return kind, p2p
