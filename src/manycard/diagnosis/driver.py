"""Probe: are there cards, and do all of them answer?"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]


def probe(facts: Facts) -> list[Finding]:
    """Find cards that the driver lists and can't open; note a machine without any."""
    findings = [
        Finding(
            cause="a card doesn't answer",
            evidence=lost,
            fix="look for Xid in the kernel's log (dmesg), then reset the card or restart the machine",
            severity="error",
        )
        for lost in facts.machine.lost
    ]
    if not facts.machine.cards and not facts.visible.cards:
        findings.append(
            Finding(
                cause="there is no GPU to use here, so cards are simulated on the CPU",
                evidence=facts.machine.why_none or "the driver lists none",
                fix="use --cards cpu:N to develop and test; install NVIDIA's driver if this machine has a GPU",
                severity="note",
            )
        )
    return findings
