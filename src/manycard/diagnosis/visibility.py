"""Probe: does CUDA_VISIBLE_DEVICES say what its author meant?"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_SETTING = "CUDA_VISIBLE_DEVICES"


def probe(facts: Facts) -> list[Finding]:
    """Find entries of CUDA_VISIBLE_DEVICES that CUDA ignores, and cards it hides."""
    if not facts.machine.cards:
        return []
    findings = []
    for line in facts.visible.said:
        if not line.startswith(_SETTING):
            continue
        meant = "hides every card" in line
        findings.append(
            Finding(
                cause=f"{_SETTING} hides every card" if meant else f"{_SETTING} holds an entry that CUDA can't use",
                evidence=line,
                fix=f"unset {_SETTING}, or name cards that are there: 0 to {len(facts.machine.cards) - 1}",
                severity="note" if meant else "warning",
            )
        )
    if facts.hidden and facts.visible.cards and not findings and _SETTING in facts.environment:
        findings.append(
            Finding(
                cause=f"{_SETTING} hides some of the machine's cards",
                evidence=f"{_SETTING}={facts.environment[_SETTING]!r} hides "
                + ", ".join(f"card {info.index} ({info.name})" for info in facts.hidden),
                fix=f"unset {_SETTING} to use them; --cards counts only what it shows",
                severity="note",
            )
        )
    return findings
