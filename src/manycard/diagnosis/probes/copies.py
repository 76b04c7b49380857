"""Probe: does what one card sends arrive at the other as it was, and as fast as the link between them can?

Copies that the driver takes for possible and that arrive as something else are known from machines whose IOMMU or
PCIe switches (ACS) redirect them. NCCL's variables don't touch copies that a script makes itself (``.to()``).
"""

from __future__ import annotations

from manycard.cards import CardInfo, Link
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.measured import Copy
from manycard.diagnosis.probes.pcie import GB_PER_S_A_LANE

__all__ = ["probe"]

_LEAST_OF_NVLINK = 0.5
_LEAST_OF_PCIE = 0.4
_LEAST_OF_EQUAL_PAIRS = 0.6
_LATE = 100.0
"""Microseconds of a copy of 4 bytes between cards with P2P that is beyond what any healthy machine takes."""


def probe(facts: Facts) -> list[Finding]:
    """Find copies that arrive wrong or slowly."""
    pairs = [
        (copy, one, other, facts.links.between(one, other))
        for copy in facts.measured.copies
        if (one := _info(facts, copy.source)) is not None and (other := _info(facts, copy.target)) is not None
    ]
    slow = [finding for copy, one, other, link in pairs if (finding := _slow(facts, copy, link, (one, other)))]
    return [
        *_wrong(facts),
        *_refused(pairs),
        *(slow[:1] if len(slow) < 2 else [_together(slow)]),
        *_unequal(pairs, bool(slow)),
    ]


def _info(facts: Facts, name: str) -> CardInfo | None:
    return next((info for other, info in facts.chosen if other == name), None)


def _wrong(facts: Facts) -> list[Finding]:
    wrong = [copy for copy in facts.measured.copies if copy.wrong_bytes]
    if not wrong:
        return []
    pairs = ", ".join(f"{copy.source} to {copy.target}: {copy.wrong_bytes:,} bytes" for copy in wrong[:4])
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    around = _around(facts)
    return [
        Finding(
            cause="copies from card to card arrive wrong: training on these cards together computes nonsense",
            evidence=f"{pairs}{more}, of {wrong[0].compared_bytes:,} compared each way{around}",
            fix="switch the IOMMU off or to pass-through (boot with iommu=pt, or in the BIOS) and PCIe ACS off, then "
            "run this again; NCCL_P2P_DISABLE=1 mends NCCL's share only, never tensor.to(); until then use one card",
            severity="error",
        )
    ]


def _refused(pairs: list[tuple[Copy, CardInfo, CardInfo, Link]]) -> list[Finding]:
    """Pairs for which the management library and CUDA say different things."""
    refused = [copy for copy, _, _, link in pairs if link.p2p and copy.peer is False]
    if not refused:
        return []
    return [
        Finding(
            cause="CUDA refuses direct access between cards (P2P) for which the driver says that it works",
            evidence=", ".join(f"{copy.source} to {copy.target}" for copy in refused[:4])
            + ": torch.cuda.can_device_access_peer is False",
            fix="in a container or a virtual machine, ask its provider for P2P; else restart the machine",
            severity="warning",
        )
    ]


def _around(facts: Facts) -> str:
    around = []
    if facts.surroundings.iommu == "translating":
        around.append("the IOMMU translates addresses")
    if facts.surroundings.acs:
        around.append(f"ACS redirects at {len(facts.surroundings.acs)} PCIe bridges")
    return "; " + ", ".join(around) if around else ""


def _slow(facts: Facts, copy: Copy, link: Link, ends: tuple[CardInfo, CardInfo]) -> Finding | None:
    possible, least = _possible(facts, link, ends)
    if possible is None or copy.gb_per_s >= least * possible:
        return None
    return Finding(
        cause=f"copies from {copy.source} to {copy.target} are much slower than the link between them",
        evidence=f"{copy.source} to {copy.target}: {copy.gb_per_s:.1f} GB/s over {link.words}, which can do "
        f"{possible:.0f} GB/s",
        fix="run again while nothing else uses the cards; on PCIe switch ACS off and boot with iommu=pt; look at "
        "nvidia-smi topo -m and nvidia-smi nvlink -s",
        severity="warning",
    )


def _possible(facts: Facts, link: Link, ends: tuple[CardInfo, CardInfo]) -> tuple[float | None, float]:
    """What a link can do in one direction, 10^9 bytes a second, and the share of it that is well."""
    if link.gb_per_s:
        return link.gb_per_s, _LEAST_OF_NVLINK
    lanes = []
    for info in ends:
        health = facts.health.get(info.index)
        if health is None:
            return None, 0
        lane = GB_PER_S_A_LANE.get(health.pcie.generation_max or 0)
        if lane is None or not health.pcie.width_max:
            return None, 0
        lanes.append(lane * health.pcie.width_max)
    # Without P2P the data goes through the host's memory, and so twice over PCIe.
    return min(lanes), _LEAST_OF_PCIE if link.p2p else _LEAST_OF_PCIE / 2


def _together(slow: list[Finding]) -> Finding:
    shown = "; ".join(finding.evidence for finding in slow[:3]) + (f"; {len(slow)} in all" if len(slow) > 3 else "")
    return Finding("copies between cards are much slower than the links between them", shown, slow[0].fix, "warning")


def _unequal(pairs: list[tuple[Copy, CardInfo, CardInfo, Link]], said: bool) -> list[Finding]:
    if said:
        return []
    findings = []
    for kind in dict.fromkeys(link.kind for *_, link in pairs):
        alike = [copy for copy, _, _, link in pairs if link.kind == kind]
        best = max(alike, key=lambda copy: copy.gb_per_s)
        slow = [copy for copy in alike if copy.gb_per_s < _LEAST_OF_EQUAL_PAIRS * best.gb_per_s]
        if slow:
            findings.append(
                Finding(
                    cause="some pairs of cards are slower than others that are joined alike",
                    evidence=", ".join(f"{c.source} to {c.target}: {c.gb_per_s:.1f} GB/s" for c in [*slow[:3], best]),
                    fix="look at those cards' links (nvidia-smi nvlink -s, nvidia-smi topo -m) and slots",
                    severity="warning",
                )
            )
    late = [copy for copy, _, _, link in pairs if link.p2p and copy.latency_us > _LATE]
    if late:
        worst = max(late, key=lambda copy: copy.latency_us)
        findings.append(
            Finding(
                cause="small copies between cards take long to start",
                evidence=f"{worst.source} to {worst.target}: {worst.latency_us:.0f} us for 4 bytes",
                fix="look for a host that is busy or saves power (cpupower frequency-info), and run this again",
                severity="note",
            )
        )
    return findings
