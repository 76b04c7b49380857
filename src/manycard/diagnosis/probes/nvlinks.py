"""Probe: are all NVLinks of the chosen cards up, free of errors, and joined to their switches?"""

from __future__ import annotations

from itertools import combinations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_MANY_ERRORS = 1000


def probe(facts: Facts) -> list[Finding]:
    """Find NVLinks that are down or make errors, and a fabric that isn't ready."""
    return [*_down(facts), *_errors(facts), *_fabric(facts)]


def _down(facts: Facts) -> list[Finding]:
    models = {name: info.name for name, info in facts.chosen}
    active = {
        name: (sum(link.active for link in health.nvlinks), len(health.nvlinks))
        for name, health in facts.chosen_health
        if health.nvlinks
    }
    findings = []
    for name, (up, there) in active.items():
        most = max(count for other, (count, _) in active.items() if models[other] == models[name])
        if up < most:
            findings.append(
                Finding(
                    cause=f"{name} has NVLinks that are down",
                    evidence=f"{up} of its {there} are up, and {most} on another {models[name]}",
                    fix="reseat the NVLink bridge or check the NVSwitches (nvidia-smi nvlink -s), then reset the cards",
                    severity="warning",
                )
            )
    counts = set(active.values())
    if len(counts) == 1 and len(active) > 1 and (pair := counts.pop())[0] < pair[1]:
        up, there = pair
        findings.append(
            Finding(
                cause="no NVLink of these cards is up, though they have some"
                if not up
                else "some NVLinks of all cards are down",
                evidence=f"{up} of {there} are up on each card",
                fix="put NVLink bridges on if there are none; on a machine with NVSwitches start Fabric Manager: "
                "systemctl start nvidia-fabricmanager",
                severity="note",
            )
        )
    return findings


def _errors(facts: Facts) -> list[Finding]:
    findings = []
    for name, health in facts.chosen_health:
        bad = [link for link in health.nvlinks if sum(link.errors.values()) >= _MANY_ERRORS]
        if not bad:
            continue
        worst = max(bad, key=lambda link: sum(link.errors.values()))
        counts = ", ".join(f"{count:,} {kind}" for kind, count in worst.errors.items())
        findings.append(
            Finding(
                cause=f"{name}'s NVLinks make errors, and data is sent again",
                evidence=f"{len(bad)} links, the worst is link {worst.number}: {counts}",
                fix="look at nvidia-smi nvlink -e again after a while; if they grow, reseat the bridge or have the "
                "board looked at",
                severity="warning",
            )
        )
    return findings


def _fabric(facts: Facts) -> list[Finding]:
    # Of all cards: where CUDA can't start for it, none is chosen.
    waiting = {
        f"card {index}": health.fabric if health.fabric != "completed" else f"failed with status {health.fabric_status}"
        for index, health in facts.health.items()
        if health.fabric in ("not started", "in progress") or (health.fabric == "completed" and health.fabric_status)
    }
    if not waiting or (facts.torch.available and not _without_p2p(facts)):
        return []  # a virtual machine that was given single cards of such a board works without
    return [
        Finding(
            cause="the cards have not joined their NVSwitches, so CUDA can't start on them (error 802) or has no P2P",
            evidence=", ".join(f"{name}: {state}" for name, state in waiting.items()),
            fix="start Fabric Manager of exactly the driver's version: systemctl restart nvidia-fabricmanager",
            severity="warning" if facts.torch.available else "error",
        )
    ]


def _without_p2p(facts: Facts) -> bool:
    return any(
        facts.links.between(info, other_info).p2p is False
        for (_, info), (_, other_info) in combinations(facts.chosen, 2)
    )
