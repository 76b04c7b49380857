"""Probe: do the chosen cards have the PCIe link to the host that they could have?

An idle card lowers its link's generation to save power, so generation and width count only as they were while
copies ran; without measuring, only a width that is too small is a finding, for it doesn't change at rest.
"""

from __future__ import annotations

from manycard.cards import CardHealth
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.measured import HostCopy

__all__ = ["GB_PER_S_A_LANE", "probe"]

GB_PER_S_A_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe generation -> 10^9 bytes a second in one direction, after line coding."""
_LEAST_SHARE = 0.5
"""Of the link's own speed, that copies from pinned memory reach at least on a machine that is well (0.8 to 0.9)."""
_LEAST_OF_BEST = 0.6
_MANY_REPLAYS = 1000


def probe(facts: Facts) -> list[Finding]:
    """Find narrow and slow PCIe links, ones that repeat packets, and copies slower than their link."""
    copies = {copy.card: copy for copy in facts.measured.host_copies}
    findings = []
    for name, health in facts.chosen_health:
        findings += _narrow(name, health, copies.get(name))
        findings += _replays(name, health)
        findings += _slow_copies(name, health, copies.get(name))
    return [*findings, *_unequal(list(copies.values()), said=bool(findings))]


def _narrow(name: str, health: CardHealth, copy: HostCopy | None) -> list[Finding]:
    pcie = health.pcie
    width = (copy.width if copy else None) or pcie.width
    short = []
    if width and pcie.width_max and width < pcie.width_max:
        short.append(f"{width} of {pcie.width_max} lanes")
    if copy and copy.generation and pcie.generation_max and copy.generation < pcie.generation_max:
        short.append(f"generation {copy.generation} of {pcie.generation_max} while copies ran")
    if not short or (copy is not None and _faster_than_told(copy)):
        return []
    return [
        Finding(
            cause=f"{name}'s PCIe link is slower than the card and its slot can have",
            evidence=", ".join(short),
            fix="reseat the card and its riser, check which slot has all lanes, and the BIOS's setting of the "
            "PCIe generation",
            severity="warning",
        )
    ]


def _faster_than_told(copy: HostCopy) -> bool:
    """Whether copies were faster than the link that the driver tells of, which then was told while it slept."""
    lane = GB_PER_S_A_LANE.get(copy.generation or 0)
    return lane is not None and copy.width is not None and copy.to_card > lane * copy.width


def _replays(name: str, health: CardHealth) -> list[Finding]:
    replays = health.pcie.replays or 0
    if replays < _MANY_REPLAYS:
        return []
    return [
        Finding(
            cause=f"{name}'s PCIe link repeats packets that arrive damaged",
            evidence=f"{replays:,} replays since the driver was loaded",
            fix="reseat the card and its riser or cable; lower the PCIe generation in the BIOS if it stays",
            severity="warning",
        )
    ]


def _slow_copies(name: str, health: CardHealth, copy: HostCopy | None) -> list[Finding]:
    if copy is None:
        return []
    generation, width = copy.generation or health.pcie.generation_max, copy.width or health.pcie.width_max
    lane = GB_PER_S_A_LANE.get(generation or 0)
    if lane is None or not width:
        return []
    possible, slower = lane * width, min(copy.to_card, copy.from_card)
    if slower >= _LEAST_SHARE * possible:
        return []
    way = "to the card" if copy.to_card <= copy.from_card else "from the card"
    return [
        Finding(
            cause=f"copies between the host and {name} are much slower than its PCIe link",
            evidence=f"{slower:.1f} GB/s {way} from pinned memory; generation {generation} x {width} can "
            f"{possible:.0f} GB/s",
            fix="bind the process to the card's NUMA node (numactl --cpunodebind --membind), check that all memory "
            "channels are filled, and that nothing else copies meanwhile",
            severity="warning",
        )
    ]


def _unequal(copies: list[HostCopy], said: bool) -> list[Finding]:
    if len(copies) < 2 or said:
        return []
    best = max(copies, key=lambda copy: copy.to_card)
    slow = [copy for copy in copies if copy.to_card < _LEAST_OF_BEST * best.to_card]
    if not slow:
        return []
    return [
        Finding(
            cause=f"the host reaches {', '.join(copy.card for copy in slow)} more slowly than the other cards",
            evidence=", ".join(f"{copy.card}: {copy.to_card:.1f} GB/s" for copy in [*slow, best]),
            fix="look at its slot and at which NUMA node it hangs on (nvidia-smi topo -m)",
            severity="warning",
        )
    ]
