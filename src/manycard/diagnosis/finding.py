"""A finding: one thing that is wrong or slows training down, with its cause, the evidence and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SEVERITIES", "Finding", "Severity"]

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""From grave to light.

``error``: training on these cards can't start, fails or goes wrong. ``warning``: it works, slower than it could or
at a risk. ``note``: good to know.
"""


@dataclass(frozen=True)
class Finding:
    """A diagnosis."""

    cause: str
    """What is wrong, in a sentence without its full stop."""
    evidence: str
    """The figures that show it."""
    fix: str
    """What to do, as an imperative sentence without its full stop."""
    severity: Severity
    """How grave it is; see `SEVERITIES`."""

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, f"severity {self.severity!r}"
        assert self.cause, "a finding without a cause"
        assert self.fix, "a finding without a fix"

    def __str__(self) -> str:
        return f"{self.severity}: {self.cause} ({self.evidence}). Fix: {self.fix}."
