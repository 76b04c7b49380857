"""A short trial of the links between cards: one large copy, and all-reduces of a few sizes.

It takes well under a second, and under half a GiB on each card. Simulated cards have no links: nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from manycard.cards import Card, inventory, links
from manycard.engine.replicas.collective import make_collective
from manycard.planner import LinkFacts
from manycard.trials.confirm import release, wait

__all__ = ["card_speeds", "measure_links"]

_SIZES_MIB = (1, 25, 100, 400)
_COPY_MIB = 256
_ROUNDS = 5


def measure_links(cards: Sequence[Card]) -> LinkFacts:
    """Measure how fast these cards reach one another."""
    if len(cards) < 2 or cards[0].simulated:
        return LinkFacts()
    kind, p2p = _read(cards)
    times = tuple((float(size), _all_reduce_ms(cards, size)) for size in _SIZES_MIB)
    copied = _copy_ms(cards[0], cards[1], _COPY_MIB)
    release(cards)
    return LinkFacts(kind, p2p, _COPY_MIB * 2**20 / copied / 1e6, times, len(cards))


def _all_reduce_ms(cards: Sequence[Card], mib: int) -> float:
    collective = make_collective(cards)
    buffers = [torch.zeros(mib * 2**18, device=card.device) for card in cards]
    return _best_ms(lambda: collective.all_reduce(buffers), cards)


def _copy_ms(one: Card, other: Card, mib: int) -> float:
    source = torch.zeros(mib * 2**18, device=one.device)
    target = torch.empty_like(source, device=other.device)
    return _best_ms(lambda: target.copy_(source, non_blocking=True), [one, other])


def card_speeds(cards: Sequence[Card]) -> list[float]:
    """Each card's speed over the first one's, by matrix products; 1 for simulated cards."""
    if cards[0].simulated:
        return [1.0 for _ in cards]
    times = []
    for card in cards:
        one = torch.ones(4096, 4096, device=card.device)

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
