"""Probe: do files set variables of NCCL's that nobody sees in the environment?"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]


def probe(facts: Facts) -> list[Finding]:
    """Find NCCL's configuration files."""
    return [
        Finding(
            cause="a file sets variables of NCCL's for every run here",
            evidence=f"{where}: " + ", ".join(f"{name}={value}" for name, value in pairs.items()),
            fix="keep it if you know why it is there; what each does here is in findings of its own",
            severity="note",
        )
        for where, pairs in facts.surroundings.nccl_files.items()
    ]
