"""Probe: does NCCL start on the chosen cards, sum rightly, and as fast as the links allow?

What hangs in training hangs here too, but ends: every stage of the measuring has a time limit, and the finding names
the stage, and a variable with which it works where one was found.
"""

from __future__ import annotations

from manycard.cards import in_words
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_LEAST_OF_SLOWEST_COPY = 0.35
_LARGE = 64 * 1024**2
"""Bytes from which an all-reduce is held back by bandwidth, not by latency."""


def probe(facts: Facts) -> list[Finding]:
    """Find stages that hang or fail, wrong sums, and an all-reduce slower than the links."""
    return [*_stuck(facts), *_wrong(facts), *_slow(facts)]


def _stuck(facts: Facts) -> list[Finding]:
    measured = facts.measured
    stage = measured.hung_at or measured.failed_at
    if not stage:
        return []
    how = "hangs" if measured.hung_at else "fails"
    helped = (
        f"export {measured.helped}: with it this stage works (slower). Then look for the cause: ACS off, iommu=pt, "
        "the BIOS, or a newer driver"
        if measured.helped
        else "set NCCL_DEBUG=INFO and run again to see NCCL's own words; look for Xid in the kernel's log (dmesg)"
    )
    tried = "" if measured.helped else "; neither NCCL_P2P_DISABLE=1 nor NCCL_SHM_DISABLE=1 helps"
    nccl = "NCCL" in stage or "all-reduce" in stage
    return [
        Finding(
            cause=f"{stage} {how} on these cards, and so will training on them",
            evidence=(measured.failure or "it did not end in its time") + (tried if nccl else ""),
            fix=helped
            if nccl
            else "look for Xid in the kernel's log (dmesg), and try the cards one by one (--cards 0,)",
            severity="error",
        )
    ]


def _wrong(facts: Facts) -> list[Finding]:
    wrong = [reduced for reduced in facts.measured.all_reduces if not reduced.right]
    if not wrong:
        return []
    return [
        Finding(
            cause="NCCL's all-reduce gives wrong sums: training on these cards together computes nonsense",
            evidence=f"wrong for {', '.join(in_words(reduced.size) for reduced in wrong)} a card",
            fix="try NCCL_P2P_DISABLE=1; if that mends it, switch PCIe ACS off and boot with iommu=pt",
            severity="error",
        )
    ]


def _slow(facts: Facts) -> list[Finding]:
    large = [reduced for reduced in facts.measured.all_reduces if reduced.size >= _LARGE]
    copies = facts.measured.copies
    if not large or not copies:
        return []
    best, slowest = max(large, key=lambda reduced: reduced.bus_gb_per_s), min(copies, key=lambda copy: copy.gb_per_s)
    if best.bus_gb_per_s >= _LEAST_OF_SLOWEST_COPY * slowest.gb_per_s:
        return []
    return [
        Finding(
            cause="NCCL's all-reduce is much slower than the slowest link between the cards",
            evidence=f"{best.bus_gb_per_s:.1f} GB/s (bus bandwidth, {in_words(best.size)} a card); copies from "
            f"{slowest.source} to {slowest.target}: {slowest.gb_per_s:.1f} GB/s",
            fix="look at the NCCL variables above, and let manycard doctor --deep find settings for this machine",
            severity="warning",
        )
    ]
