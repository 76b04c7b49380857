"""Probe: are there cards, and do all of them answer?"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding, Severity

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
        broken = _broken(facts)
        if broken is not None:
            return [*findings, broken]
        findings.append(
            Finding(
                cause="there is no GPU to use here, so cards are simulated on the CPU",
                evidence=facts.machine.why_none or "the driver lists none",
                fix="use --cards cpu:N to develop and test; install NVIDIA's driver if this machine has a GPU",
                severity="note",
            )
        )
    return findings


def _broken(facts: Facts) -> Finding | None:
    """Why a machine that has NVIDIA cards can't use them."""
    why = facts.machine.why_none
    on_bus = facts.surroundings.cards_on_bus
    # With --cards cpu:N nothing is said of a fallback, and training on the cards asked for does start.
    fatal: Severity = "error" if facts.choice.said else "warning"
    if "machine not restarted" in why:
        return Finding(
            cause="the NVIDIA driver was updated and the machine not restarted since, so no card can be used",
            evidence=why,
            fix="restart the machine, or reload its kernel modules while nobody uses them",
            severity=fatal,
        )
    if "not loaded" in why:
        return Finding(
            cause="the NVIDIA driver is installed but not loaded, so no card can be used",
            evidence=why,
            fix="sudo modprobe nvidia; if that fails, see dmesg: a new kernel needs the module built anew (DKMS)",
            severity=fatal,
        )
    if "did not start" in why or "finds no card" in why:
        return Finding(
            cause="the NVIDIA driver is there and answers with an error, so no card can be used",
            evidence=f"{why}; {on_bus} NVIDIA cards on the PCI bus" if on_bus else why,
            fix="run nvidia-smi for the driver's own words; in a container, start it with --gpus all and check that "
            "nvidia-smi works on the host; see dmesg for Xid",
            severity=fatal if on_bus else "warning",
        )
    if on_bus:
        return Finding(
            cause="this machine has NVIDIA cards that nothing here can use, so cards are simulated on the CPU",
            evidence=f"{on_bus} on the PCI bus; {why or 'the driver lists none'}",
            fix="install NVIDIA's driver; in a container, start it with --gpus all (NVIDIA Container Toolkit)",
            severity="warning",
        )
    return None
