"""Probe: do the IOMMU or PCIe bridges send what cards send each other through the host?

It matters where cards reach each other over PCIe. Without measurements it is a risk; `copies` finds the damage.
"""

from __future__ import annotations

from itertools import combinations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]


def probe(facts: Facts) -> list[Finding]:
    """Find redirecting bridges and a translating IOMMU between cards that are joined by PCIe."""
    over_pcie = [
        f"{one}-{other}"
        for (one, info), (other, other_info) in combinations(facts.chosen, 2)
        if not facts.links.between(info, other_info).nvlinks
    ]
    if not over_pcie or facts.surroundings.virtual:
        return []
    findings = []
    if facts.surroundings.acs:
        shown = ", ".join(facts.surroundings.acs[:4]) + (" and more" if len(facts.surroundings.acs) > 4 else "")
        findings.append(
            Finding(
                cause="PCIe bridges send what cards send each other through the host (ACS), which is slower",
                evidence=f"ACS redirects at {shown}; cards joined by PCIe: {', '.join(over_pcie[:4])}",
                fix="switch ACS off in the BIOS, or with setpci at each start (NCCL's guide, 'PCI Access Control "
                "Services')",
                severity="warning",
            )
        )
    if facts.surroundings.iommu == "translating":
        findings.append(
            Finding(
                cause="the IOMMU translates what cards send each other over PCIe, which is slower and known to "
                "damage copies on some boards",
                evidence=f"the kernel's IOMMU groups translate; cards joined by PCIe: {', '.join(over_pcie[:4])}",
                fix="boot with iommu=pt, or switch the IOMMU off in the BIOS",
                severity="note",
            )
        )
    return findings
