"""Probe: is there memory on the chosen cards, and does somebody else compute on them?"""

from __future__ import annotations

from manycard.cards import DEFAULT_MIN_FREE, CardInfo, in_words
from manycard.cards.choose import others_on
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_UNEXPLAINED = 2 * 1024**3
"""Used memory beyond that of the processes listed, above which somebody out of sight holds it; the driver itself
takes under 1 GiB."""


def probe(facts: Facts) -> list[Finding]:
    """Find other people's processes and too little free memory on the chosen cards."""
    return [finding for name, info in facts.chosen for finding in _look_at(name, info, facts.own_pids)]


def _look_at(name: str, info: CardInfo, own_pids: frozenset[int]) -> list[Finding]:
    findings = []
    others = others_on(info, own_pids)
    if others:
        use = "" if info.utilisation is None else f"; {info.utilisation} % utilisation"
        findings.append(
            Finding(
                cause=f"{name} is in use by others",
                evidence="; ".join(map(str, others)) + use,
                fix="use --cards auto, which leaves it out, or wait until they are done",
                severity="warning",
            )
        )
    if info.memory_free is not None and info.memory_free < DEFAULT_MIN_FREE:
        findings.append(
            Finding(
                cause=f"{name} has too little free memory to train",
                evidence=f"{in_words(info.memory_free)} of {in_words(info.memory_total)} are free, and CUDA, NCCL and "
                f"cuBLAS need up to {in_words(DEFAULT_MIN_FREE)}{_out_of_sight(info)}",
                fix="end what holds it, or use --cards auto, which leaves the card out",
                severity="error",
            )
        )
    return findings


def _out_of_sight(info: CardInfo) -> str:
    if info.memory_total is None or info.memory_free is None or info.processes is None:
        return ""
    held = sum(process.memory or 0 for process in info.processes)
    missing = info.memory_total - info.memory_free - held
    if missing < _UNEXPLAINED:
        return ""
    return f"; {in_words(missing)} are held by processes that can't be seen from here, as in another container"
