"""Probe: does the chosen cards' memory make errors?

Rules: NVIDIA GPU Memory Error Management; Dynamic Page Retirement.
"""

from __future__ import annotations

from manycard.cards import Ecc
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_MANY_CORRECTED = 1000
_MANY_PAGES = 60
"""Of 64 that a card can take out of use."""


def probe(facts: Facts) -> list[Finding]:
    """Find memory errors, rows and pages that wait for a reset, and ECC that is off."""
    findings = []
    for name, health in facts.chosen_health:
        findings += _errors(name, health.ecc)
        findings += _repairs(name, health.ecc)
        findings += _mode(name, health.ecc)
    return findings


def _errors(name: str, ecc: Ecc) -> list[Finding]:
    findings = []
    if ecc.uncorrected:
        findings.append(
            Finding(
                f"{name}'s memory makes errors that can't be corrected: what it computes can't be trusted",
                f"{ecc.uncorrected} uncorrected ECC errors since the driver was loaded",
                "leave the card out (--cards), reset it (nvidia-smi --gpu-reset), and have it replaced if they return",
                "error",
            )
        )
    elif ecc.uncorrected_ever:
        findings.append(
            Finding(
                f"{name}'s memory has made errors in its life that could not be corrected",
                f"{ecc.uncorrected_ever} uncorrected ECC errors ever, none since the driver was loaded",
                "watch it: nvidia-smi -q -d ECC,ROW_REMAPPER",
                "note",
            )
        )
    if (ecc.corrected or 0) >= _MANY_CORRECTED:
        findings.append(
            Finding(
                f"{name}'s memory makes many errors, which are corrected",
                f"{ecc.corrected:,} corrected ECC errors since the driver was loaded",
                "check its temperature, and have the card looked at if the number grows quickly",
                "note",
            )
        )
    return findings


def _repairs(name: str, ecc: Ecc) -> list[Finding]:
    findings = []
    if ecc.remap_failed:
        findings.append(
            Finding(
                f"{name} can't replace a bad row of its memory any more",
                f"row remapping has failed; {ecc.rows_remapped or 0} rows were replaced before",
                "leave the card out and have it replaced: NVIDIA takes that as a reason for return (RMA)",
                "error",
            )
        )
    elif ecc.remap_pending or ecc.retire_pending:
        what = "a row to be replaced" if ecc.remap_pending else "a page to be taken out of use"
        findings.append(
            Finding(
                f"{name}'s memory has {what}, which happens at the next reset",
                "the driver says that it is pending",
                "reset the card when nobody uses it (nvidia-smi --gpu-reset), or restart the machine",
                "warning",
            )
        )
    if (ecc.pages_retired or 0) >= _MANY_PAGES:
        findings.append(
            Finding(
                f"{name} has taken nearly as many pages of memory out of use as it can",
                f"{ecc.pages_retired} pages; 64 are the most",
                "have the card replaced",
                "warning",
            )
        )
    return findings


def _mode(name: str, ecc: Ecc) -> list[Finding]:
    if ecc.on is None or ecc.pending is None:
        return []
    if ecc.on != ecc.pending:
        now, then = ("on", "off") if ecc.on else ("off", "on")
        return [
            Finding(
                f"{name}'s error correction (ECC) changes at the next reset",
                f"it is {now} now and will be {then}",
                "reset the card when nobody uses it, or restart the machine",
                "note",
            )
        ]
    if not ecc.on:
        return [
            Finding(
                f"{name} runs without error correction (ECC), though it has it",
                "ECC mode is off",
                "nvidia-smi -e 1 and a reset, unless the memory it takes is needed: a flipped bit stays unseen",
                "note",
            )
        ]
    return []
