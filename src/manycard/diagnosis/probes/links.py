"""Probe: can the chosen cards reach each other, and equally well?"""

from __future__ import annotations

from itertools import combinations

from manycard.cards import Link
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]


def probe(facts: Facts) -> list[Finding]:
    """Find pairs of chosen cards without P2P, and cards whose links are of unequal kinds."""
    pairs = [
        (f"{one}-{other}", facts.links.between(info, other_info))
        for (one, info), (other, other_info) in combinations(facts.chosen, 2)
    ]
    return _without_p2p(pairs) + _unequal(pairs)


def _without_p2p(pairs: list[tuple[str, Link]]) -> list[Finding]:
    refused = [(names, link) for names, link in pairs if link.p2p is False]
    if not refused:
        return []
    reasons = dict.fromkeys(f"{link.why_no_p2p} ({link.words})" for _, link in refused)
    return [
        Finding(
            cause="some cards can't read each other's memory (P2P), so gradients go through the host's memory",
            evidence=f"{len(refused)} of {len(pairs)} pairs, {_shorten([names for names, _ in refused])}: "
            + "; ".join(reasons),
            fix="expect a slower all-reduce, and hide it with accumulate= and larger batches; on a server, switch "
            "PCIe ACS off or boot with iommu=pt; if NCCL hangs, set NCCL_P2P_DISABLE=1",
            severity="warning",
        )
    ]


def _unequal(pairs: list[tuple[str, Link]]) -> list[Finding]:
    known = [(names, link) for names, link in pairs if link.kind != "unknown"]
    if len({link.rank for _, link in known}) < 2:
        return []
    slowest = max(link.rank for _, link in known)
    slow = [(names, link) for names, link in known if link.rank == slowest]
    fast = min((link for _, link in known), key=lambda link: link.rank)
    return [
        Finding(
            cause="the cards are joined by unequal links, and the slowest sets the pace of an all-reduce",
            evidence=f"{_shorten([names for names, _ in slow])}: {slow[0][1].words}; the best pair: {fast.words}",
            fix="compare with --cards auto:N, which takes the N best joined",
            severity="note",
        )
    ]


def _shorten(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
