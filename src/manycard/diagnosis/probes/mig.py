"""Probe: do MIG slices stand in the way?"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]


def probe(facts: Facts) -> list[Finding]:
    """Find cards in MIG mode: without slices they are invisible, and two slices of one can't train together."""
    findings = []
    for info in facts.machine.cards:
        if info.mig and not info.slices:
            findings.append(
                Finding(
                    cause=f"card {info.index} ({info.name}) is in MIG mode without a slice, so CUDA doesn't show it",
                    evidence="MIG mode on, 0 slices",
                    fix=f"make slices (nvidia-smi mig -cgi), or switch MIG off: nvidia-smi -i {info.index} -mig 0",
                    severity="warning",
                )
            )
        elif info.mig:
            findings.append(
                Finding(
                    cause=f"card {info.index} ({info.name}) is cut into MIG slices, which can't train together",
                    evidence=f"{len(info.slices)} slices; CUDA shows a process one, and NCCL refuses two of one card",
                    fix="train on one slice, chosen with CUDA_VISIBLE_DEVICES=MIG-..., or switch MIG off for the whole "
                    f"card: nvidia-smi -i {info.index} -mig 0",
                    severity="note",
                )
            )
    return findings
