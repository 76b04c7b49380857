"""Probe: what holds the chosen cards' clocks back, at rest or under load?

A card that multiplies matrices may well reach its power cap; that is a finding only where the cap was lowered
(`power`). Heat, a brake of the power supply and clocks that somebody has set are findings whenever they are seen.

Reasons: NVML API reference, "NvmlClocksEventReasons".
"""

from __future__ import annotations

from manycard.cards import CardHealth
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding, Severity
from manycard.diagnosis.measured import Load

__all__ = ["probe"]

_CLOSE_TO_LIMIT = 5
"""Degrees under the card's own limit from which it is worth saying."""

_WORDS: dict[tuple[str, ...], tuple[str, str, Severity]] = {
    ("heat (hardware)", "heat (software)"): (
        "is too hot and lowers its clocks",
        "look at fans, filters and the air's way through the case; lower the power cap meanwhile (nvidia-smi -pl)",
        "warning",
    ),
    ("power brake",): (
        "is slowed down by the power supply's brake signal",
        "check the power supplies and the rack's power budget; one of them may have failed",
        "warning",
    ),
    ("hardware slowdown",): (
        "is slowed down by its hardware (heat, or power that fails)",
        "look at power cables and cooling, and for Xid in the kernel's log (dmesg)",
        "warning",
    ),
    ("sync boost",): (
        "keeps to the clocks of the slowest card of a sync-boost group",
        "end that group (nvidia-smi boost-slider, or DCGM's policy) unless it is wanted",
        "note",
    ),
    ("display clocks",): (
        "keeps its clocks down for a screen",
        "take the screen to another card, or switch it off while training",
        "note",
    ),
}


def probe(facts: Facts) -> list[Finding]:
    """Find cards that run slower than they could."""
    loads = {load.card: load for load in facts.measured.loads}
    findings = []
    for name, health in facts.chosen_health:
        load = loads.get(name)
        findings += _reasons(name, health, load)
        findings += _set_low(name, health, facts)
        findings += _close_to_limit(name, health, load)
    return [*findings, *_slower_than_others(facts)]


def _reasons(name: str, health: CardHealth, load: Load | None) -> list[Finding]:
    seen = {*(health.reasons or ()), *(load.reasons if load else ())}
    findings = []
    for reasons, (what, fix, severity) in _WORDS.items():
        here = [reason for reason in reasons if reason in seen]
        if not here or (reasons == ("hardware slowdown",) and seen & {"heat (hardware)", "power brake"}):
            continue  # hardware slowdown accompanies either
        busy = load if load is not None and set(here) & set(load.reasons) else None
        clock, most = busy.sm_clock if busy else health.sm_clock, health.sm_clock_max
        degrees = busy.temperature if busy else health.temperature
        evidence = [f"the driver says: {', '.join(here)}" + (" (under load)" if busy else "")]
        evidence += [f"{clock} of {most} MHz"] if clock and most else []
        evidence += [f"{degrees} °C"] if degrees else []
        findings.append(Finding(f"{name} {what}", "; ".join(evidence), fix, severity))
    return findings


def _set_low(name: str, health: CardHealth, facts: Facts) -> list[Finding]:
    clock, default = health.application_clock, health.application_clock_default
    if clock is None or default is None or clock >= default:
        return []
    index = next(info.index for other, info in facts.chosen if other == name)
    return [
        Finding(
            cause=f"{name} has its clocks set lower than it came with",
            evidence=f"application clock {clock} MHz, by default {default} MHz",
            fix=f"nvidia-smi -i {index} -rac (needs root)",
            severity="warning",
        )
    ]


def _close_to_limit(name: str, health: CardHealth, load: Load | None) -> list[Finding]:
    degrees = max(health.temperature or 0, (load.temperature if load else None) or 0)
    held = {*(health.reasons or ()), *(load.reasons if load else ())} & {"heat (hardware)", "heat (software)"}
    if held or not health.slows_at or degrees < health.slows_at - _CLOSE_TO_LIMIT:
        return []
    return [
        Finding(
            cause=f"{name} is nearly as hot as it may get",
            evidence=f"{degrees} °C; it lowers its clocks at {health.slows_at} °C",
            fix="look at fans, filters and the air's way through the case before a long run",
            severity="warning",
        )
    ]


_SLOWER = 0.85
"""Share of the fastest equal card's speed, under which a card is held back by something."""


def _slower_than_others(facts: Facts) -> list[Finding]:
    models = {name: info.name for name, info in facts.chosen}
    findings = []
    for model in dict.fromkeys(models.values()):
        speeds = {
            load.card: load.teraflops
            for load in facts.measured.loads
            if load.teraflops is not None and models.get(load.card) == model
        }
        if len(speeds) < 2:
            continue
        best = max(speeds, key=lambda card: speeds[card])
        slow = {card: speed for card, speed in speeds.items() if speed < _SLOWER * speeds[best]}
        verb = "computes" if len(slow) == 1 else "compute"
        if slow:
            findings.append(
                Finding(
                    cause=f"{', '.join(slow)} {verb} slower than {best}, and the slowest sets the pace",
                    evidence=", ".join(f"{card}: {speed:.0f}" for card, speed in {**slow, best: speeds[best]}.items())
                    + " TFLOP/s (matrix products in bf16, all at once)",
                    fix="look for what else runs on it and for its clocks (nvidia-smi -q -d PERFORMANCE,CLOCK)",
                    severity="warning",
                )
            )
    return findings
