"""A profile: where a step's time goes on each card, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manycard.diagnosis.finding import Finding
from manycard.diagnosis.profile.breakdown import PARTS, CardTime
from manycard.diagnosis.profile.findings import Opportunity, Setup, find_opportunities

__all__ = ["Profile", "merged"]


@dataclass(frozen=True)
class Profile:
    """What was recorded."""

    cards: tuple[CardTime, ...]
    steps: int
    setup: Setup
    traces: tuple[str, ...] = ()
    """Files to open at https://ui.perfetto.dev, one a process."""
    memory: tuple[dict[str, Any], ...] = ()
    """Of each card, what its memory was for, in bytes, and as ``text``; see `manycard.diagnosis.memory_use`."""
    growth: tuple[Finding, ...] = ()
    """Memory that grew from step to step, and memory that is uneven or fragmented."""
    reserves: tuple[dict[str, Any], ...] = ()
    """Of each GPU, what the allocator has taken, in bytes (`manycard.diagnosis.memory_use.Reserve`)."""

    @property
    def opportunities(self) -> list[Opportunity]:
        """What holds the steps back, the biggest gain first."""
        return find_opportunities(self.cards, self.setup)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "steps": self.steps,
            "step_ms": round(max((card.step for card in self.cards), default=0.0), 4),
            "cards": [card.as_dict() for card in self.cards],
            "findings": [
                {**asdict(each.finding), "gain": round(each.gain, 3), "part": each.part} for each in self.opportunities
            ],
            "memory": list(self.memory),
            "growth": [asdict(finding) for finding in self.growth],
            "reserves": list(self.reserves),
            "setup": asdict(self.setup),
            "traces": list(self.traces),
        }

    @classmethod
    def of(cls, read: dict[str, Any]) -> Profile:
        """From what `as_dict` gave."""
        pairs = read["setup"].items()
        setup: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in pairs}
        setup["shared"] = tuple((card, words) for card, words in setup.get("shared", ()))
        return cls(
            tuple(map(CardTime.of, read["cards"])),
            read["steps"],
            Setup(**setup),
            tuple(read["traces"]),
            tuple(read["memory"]),
            tuple(Finding(**finding) for finding in read["growth"]),
            tuple(read.get("reserves", ())),
        )

    def __str__(self) -> str:
        if not self.cards:
            return "no whole step was recorded"
        parts = [name for name in PARTS if any(getattr(card, name) >= 5e-4 for card in self.cards)]
        lines = ["  ".join(["card".ljust(8), *(name.rjust(8) for name in ("step ms", *parts))])]
        for card in self.cards:
            numbers = [card.step, *(getattr(card, name) for name in parts)]
            lines.append("  ".join([card.card.ljust(8), *(f"{number:8.3f}" for number in numbers)]))
        found = self.opportunities
        lines += [f"{number}. {each}" for number, each in enumerate(found, start=1)]
        lines += [] if found else ["Nothing holds these steps back that is looked for."]
        lines += [f"memory of {row['text']}" for row in self.memory]
        lines += [str(finding) for finding in self.growth]
        lines += [f"trace, for https://ui.perfetto.dev: {trace}" for trace in self.traces]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=2), encoding="utf-8")


def merged(profiles: Sequence[Profile]) -> Profile:
    """One profile of those of all ranks."""
    first = profiles[0]
    return Profile(
        tuple(card for each in profiles for card in each.cards),
        first.steps,
        first.setup,
        tuple(trace for each in profiles for trace in each.traces),
        tuple(row for each in profiles for row in each.memory),
        tuple(dict.fromkeys(finding for each in profiles for finding in each.growth)),
        tuple(row for each in profiles for row in each.reserves),
    )
