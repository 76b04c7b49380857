"""Probe: are the chosen cards set up so that training gets all of them?"""

from __future__ import annotations

from manycard.cards import CardHealth
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_CAP_TOLERANCE = 0.98


def probe(facts: Facts) -> list[Finding]:
    """Find lowered power caps, compute modes that shut processes out, persistence off, screens, pending MIG."""
    findings = []
    for name, info in facts.chosen:
        health = facts.health.get(info.index)
        if health is None:
            continue
        findings += _power(name, info.index, health)
        findings += _compute_mode(name, info.index, health)
        findings += _screen(name, health)
        if health.mig_pending is not None and info.mig is not None and health.mig_pending != info.mig:
            then = "on" if health.mig_pending else "off"
            findings.append(
                Finding(
                    cause=f"{name}'s MIG mode changes at the next reset",
                    evidence=f"it is {'on' if info.mig else 'off'} now and will be {then}",
                    fix=f"reset the card when nobody uses it: nvidia-smi -i {info.index} --gpu-reset",
                    severity="note",
                )
            )
    return [*findings, *_persistence(facts)]


def _power(name: str, index: int, health: CardHealth) -> list[Finding]:
    cap, default = health.power_cap, health.power_default
    if cap is None or default is None or cap >= _CAP_TOLERANCE * default:
        return []
    return [
        Finding(
            cause=f"{name}'s power cap is lower than the one it came with, so it computes slower under load",
            evidence=f"{cap:.0f} W, by default {default:.0f} W",
            fix=f"nvidia-smi -i {index} -pl {default:.0f} (needs root), if power and cooling allow it",
            severity="warning",
        )
    ]


def _compute_mode(name: str, index: int, health: CardHealth) -> list[Finding]:
    fix = f"nvidia-smi -i {index} -c DEFAULT (needs root)"
    if health.compute_mode == "prohibited":
        return [
            Finding(
                cause=f"{name} lets no process compute",
                evidence="its compute mode is prohibited",
                fix=fix,
                severity="error",
            )
        ]
    if health.compute_mode in ("exclusive process", "exclusive thread"):
        return [
            Finding(
                cause=f"{name} lets one process at a time compute",
                evidence=f"its compute mode is {health.compute_mode}; a notebook that has touched it shuts a run out",
                fix=f"end other processes first, or {fix}",
                severity="note",
            )
        ]
    return []


def _screen(name: str, health: CardHealth) -> list[Finding]:
    if not health.display:
        return []
    return [
        Finding(
            cause=f"{name} drives a screen, which takes memory and some of its time",
            evidence="the driver says that its display is active",
            fix="leave it out in long runs if the others wait for it, or work without a desktop",
            severity="note",
        )
    ]


def _persistence(facts: Facts) -> list[Finding]:
    off = [name for name, health in facts.chosen_health if health.persistence is False]
    if not off:
        return []
    return [
        Finding(
            cause="the driver is unloaded while nobody uses the cards, so each start takes seconds longer",
            evidence=f"persistence mode is off on {', '.join(off)}",
            fix="sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1",
            severity="note",
        )
    ]
