"""The ways of training that a plan chooses among, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manycard.planner.facts import Facts

__all__ = ["Candidate", "candidates"]


@dataclass(frozen=True)
class Candidate:
    """One strategy with its settings."""

    strategy: str
    cards: int
    graphs: bool = False
    """Whether a step is replayed as CUDA graphs."""
    compile: bool = False
    drop_in: bool = False
    """Whether the script's own loop calls a spread module, so that outputs are gathered: `DataParallel`, `run`."""
    accumulate: int = 1
    """Parts of the global batch that are computed one after the other."""
    weights: tuple[float, ...] = ()
    """Each card's share of a batch where shares differ; empty for even ones."""

    @property
    def name(self) -> str:
        """How tables call it."""
        words = [self.strategy]
        words += ["drop-in"] if self.drop_in else []
        words += ["compiled"] if self.compile else []
        words += ["graphs"] if self.graphs else []
        words += [f"in {self.accumulate} parts"] if self.accumulate > 1 else []
        return ", ".join(words)

    @property
    def ranks(self) -> bool:
        """Whether it has one process a card."""
        return self.strategy in ("ddp", "fsdp")

    def settings(self) -> dict[str, Any]:
        """What `Parallel` and its train step are to be given."""
        found: dict[str, Any] = {"cards": self.cards}
        if self.strategy in ("dp", "single", "manual"):
            found["graphs"] = "auto" if self.graphs else "off"
        if self.compile:
            found["compile"] = True
        if self.accumulate > 1:
            found["accumulate"] = self.accumulate
        if self.weights:
            found["weights"] = [round(weight, 4) for weight in self.weights]
        return found


def candidates(facts: Facts) -> list[Candidate]:
    """Every way that is worth a prediction, before memory and the script's own limits are looked at."""
    count = facts.all_cards
    own_loop = facts.written in ("loop", "notebook")
    graphs = _graphs_possible(facts)
    found = [Candidate("single", 1)]
    if graphs and not own_loop:
        # One card's CUDA graphs are the engine's: strategy dp with one card.
        found.append(Candidate("dp", 1, graphs=True))
    if facts.step.compiled and not own_loop:
        found.append(Candidate("dp", 1, graphs=True, compile=True))
    if count == 1:
        return found
    if facts.machines == 1:
        found.append(Candidate("dp", count, drop_in=own_loop))
        if graphs:
            found.append(Candidate("dp", count, graphs=True, drop_in=own_loop))
        if facts.step.compiled and not own_loop:
            found.append(Candidate("dp", count, graphs=True, compile=True))
        if _uneven(facts) and not own_loop:
            speeds = [card.speed for card in facts.cards]
            weights = tuple(speed / sum(speeds) for speed in speeds)
            found.append(Candidate("manual", count, graphs=graphs, weights=weights))
    found.append(Candidate("ddp", count))
    found.append(Candidate("fsdp", count))
    return found


def _graphs_possible(facts: Facts) -> bool:
    return bool(facts.step.graphed) or (facts.step.stated and not facts.step.no_graphs)


def _uneven(facts: Facts, tolerance: float = 0.1) -> bool:
    speeds = [card.speed for card in facts.cards]
    return min(speeds) < (1 - tolerance) * max(speeds)
