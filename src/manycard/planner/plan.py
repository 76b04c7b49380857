"""`Plan`: a strategy and its settings, what every candidate was predicted to give, and the forks that led there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from manycard.planner.candidates import Candidate
from manycard.planner.facts import Facts

__all__ = ["Branch", "Fork", "Measured", "Plan", "Prediction"]


@dataclass(frozen=True)
class Measured:
    """What a short trial of one candidate found."""

    step_ms: float | None = None
    memory_mib: float | None = None
    error: str = ""
    """Why it could not be run; empty where it ran."""


@dataclass(frozen=True)
class Prediction:
    """One candidate, as tables and ``plan --json`` show it."""

    candidate: Candidate
    step_ms: float | None
    """Measured where a trial was made, else predicted; None where neither can be told."""
    samples_per_s: float | None
    memory_mib: float | None
    measured: bool = False
    predicted_ms: float | None = None
    """What was predicted before any trial."""
    predicted_mib: float | None = None
    why_not: str = ""
    """Why it isn't the plan's choice; empty for the choice."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Where the predicted time goes: ``cards_ms``, ``host_ms``, ``reduce_ms``, ``exposed_ms``, ``copies_ms``."""

    def to_row(self) -> dict[str, Any]:
        """The row of JSON."""
        return {
            "strategy": self.candidate.strategy,
            "name": self.candidate.name,
            "cards": self.candidate.cards,
            "step_ms": self.step_ms,
            "samples_per_s": self.samples_per_s,
            "memory_mib": self.memory_mib,
            "how": "measured" if self.measured else "predicted",
            "predicted_ms": self.predicted_ms,
            "predicted_mib": self.predicted_mib,
            "settings": self.candidate.settings(),
            "why_not": self.why_not,
            "parts": dict(self.parts),
        }


@dataclass(frozen=True)
class Branch:
    """One way out of a fork."""

    answer: str
    leads_to: str


@dataclass(frozen=True)
class Fork:
    """One question of the decision tree, and how it was answered."""

    name: str
    question: str
    number: str
    """What decided it, with units."""
    taken: str
    """The answer of the branch taken."""
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Plan:
    """What to train with, and why."""

    choice: Candidate
    reasons: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    forks: tuple[Fork, ...]
    facts: Facts
    notes: tuple[str, ...] = ()
    """What a reader must know: what was not measured, what is predicted only, what isn't built."""

    @property
    def strategy(self) -> str:
        """Its word for `Parallel` and ``--strategy``."""
        return self.choice.strategy

    @property
    def settings(self) -> dict[str, Any]:
        """What `Parallel` and its train step are to be given."""
        found = self.choice.settings()
        # Where graphs could not be tried, nothing speaks against letting a step look for itself.
        if "graphs" in found and not any(row.candidate.graphs for row in self.predictions):
            found["graphs"] = "auto"
        return found

    @property
    def chosen(self) -> Prediction:
        """The row of the choice."""
        return next(row for row in self.predictions if row.candidate == self.choice)

    @property
    def line(self) -> str:
        """The plan in one line."""
        cards = f"{self.choice.cards} card" + ("s" if self.choice.cards > 1 else "")
        row = self.chosen
        figure = ""
        if row.step_ms is not None and row.samples_per_s is not None:
            how = "measured" if row.measured else "predicted"
            figure = f", {row.samples_per_s:,.0f} samples/s {how}"
        why = f"; {self.reasons[-1]}" if self.reasons else ""
        return f"{self.choice.name} on {cards}{figure}{why}"

    def to_document(self) -> dict[str, Any]:
        """The plan as ``plan --json`` prints it and as the cache keeps it."""
        return {
            "strategy": self.strategy,
            "settings": self.settings,
            "reasons": list(self.reasons),
            "predictions": [row.to_row() for row in self.predictions],
            "forks": [asdict(fork) for fork in self.forks],
            "notes": list(self.notes),
            "line": self.line,
            "batch": self.facts.batch,
            "facts": self.facts.to_document(),
        }
