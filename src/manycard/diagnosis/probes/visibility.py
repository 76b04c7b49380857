"""Probe: does CUDA_VISIBLE_DEVICES say what its author meant?"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_SETTING = "CUDA_VISIBLE_DEVICES"


def probe(facts: Facts) -> list[Finding]:
    """Find entries of CUDA_VISIBLE_DEVICES that CUDA ignores, and cards it hides; orders that CUDA doesn't know."""
    if not facts.machine.cards:
        return []
    findings = _order(facts)
    for line in facts.visible.said:
        if not line.startswith(_SETTING):
            continue
        meant = "hides every card" in line
        if "named before" in line:
            findings.append(
                Finding(
                    cause=f"{_SETTING} names a card twice, and CUDA then shows no card at all",
                    evidence=line,
                    fix="name each card once",
                    severity="error",
                )
            )
            continue
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


def _order(facts: Facts) -> list[Finding]:
    order = facts.environment.get("CUDA_DEVICE_ORDER")
    if order is not None and order not in ("PCI_BUS_ID", "FASTEST_FIRST"):
        return [
            Finding(
                cause="CUDA_DEVICE_ORDER holds no order that CUDA knows, so it numbers cards fastest first",
                evidence=f"CUDA_DEVICE_ORDER={order!r}",
                fix="write PCI_BUS_ID, which is nvidia-smi's numbering, or unset it",
                severity="warning",
            )
        ]
    numbered = facts.environment.get(_SETTING, "").strip()[:1].isdecimal()
    if order is None and len({info.name for info in facts.machine.cards}) > 1 and numbered:
        return [
            Finding(
                cause=f"{_SETTING} counts cards fastest first here, which isn't nvidia-smi's numbering",
                evidence=", ".join(dict.fromkeys(info.name for info in facts.machine.cards))
                + f"; {_SETTING}={facts.environment[_SETTING]}",
                fix="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name cards by UUID (manycard doctor --select)",
                severity="note",
            )
        ]
    return []
