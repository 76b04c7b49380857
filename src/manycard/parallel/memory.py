"""`Parallel.memory` and `Parallel.watch_memory`: what the cards' memory is for, and what grows.

Behaviour:
    * The report is about the models and optimizers that were set up, and their copies on every card. In `ddp` rank 0's
      has the cards of all ranks.
    * The watch counts steps by the process's pulse until it is stopped, or the run is closed; what it finds is warned
      of, once for each holder.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from manycard.diagnosis.finding import Finding
from manycard.diagnosis.memory_use import CardMemory, GrowthWatch, held_by, judge_memory, read_memory
from manycard.errors import SettingError
from manycard.hangs import PULSE
from manycard.strategies import Strategy

__all__ = ["MemoryReport", "MemoryWatch", "memory_of_process", "report_memory"]


@dataclass(frozen=True)
class MemoryReport:
    """What each card's memory is for."""

    cards: tuple[CardMemory, ...]

    @property
    def findings(self) -> list[Finding]:
        """What is uneven, fragmented or used by others."""
        return judge_memory(self.cards)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.cards), *map(str, self.findings)])


def report_memory(strategy: Strategy, snapshot: str | Path | None = None) -> MemoryReport:
    """Read the memory of the cards of all ranks.

    Raises:
        SettingError: a snapshot is asked for on simulated cards.
    """
    if snapshot is not None:
        dump_snapshot(Path(snapshot), strategy)
    everyone = strategy.peers.gather_objects(memory_of_process(strategy))
    return MemoryReport(tuple(card for each in everyone for card in each))


def memory_of_process(strategy: Strategy) -> list[CardMemory]:
    """The memory of this process's cards."""
    cards = []
    for card, modules, each, more in strategy.holdings(list(strategy.models), list(strategy.optimizers)):
        others = card.position == strategy.cards[0].position
        cards.append(read_memory(card.name, card.device, held_by(modules, each, more), others=others))
    return cards


def dump_snapshot(path: Path, strategy: Strategy) -> None:
    """Write what torch's memory viewer shows.

    Raises:
        SettingError: there is none on simulated cards.
    """
    if strategy.device.type != "cuda":
        raise SettingError("snapshot", str(path), "simulated cards have none", fix="leave it out")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


class MemoryWatch:
    """Warns of memory that grows from step to step, until it is stopped; also a context manager.

    Args:
        strategy: whose cards are watched.
        every: steps between two looks.
        snapshot: a file for torch's memory viewer, written when growth is found, with the stacks of allocations.
    """

    def __init__(self, strategy: Strategy, every: int, snapshot: str | Path | None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingError("every", every, "it must be a whole number of at least 1", fix="leave it out")
        self._strategy = strategy
        self._snapshot = None if snapshot is None else Path(snapshot)
        self.findings: list[Finding] = []
        """What was found so far."""
        if self._snapshot is not None:
            if strategy.device.type != "cuda":
                raise SettingError("snapshot", str(snapshot), "simulated cards have none", fix="leave it out")
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._watch = GrowthWatch(self._found, every)
        PULSE.follow_optimizers()
        PULSE.listeners.append(self._watch.stepped)

    def _found(self, finding: Finding) -> None:
        self.findings.append(finding)
        where = ""
        if self._snapshot is not None:
            dump_snapshot(self._snapshot, self._strategy)
            where = f" The snapshot {self._snapshot} shows the stacks, at https://docs.pytorch.org/memory_viz."
        rank = f"rank {self._strategy.peers.rank}: " if self._strategy.peers.world_size > 1 else ""
        warnings.warn(f"{rank}{finding.cause} ({finding.evidence}). Fix: {finding.fix}.{where}", stacklevel=2)

    def stop(self) -> None:
        """Look no more."""
        if self._watch.stepped in PULSE.listeners:
            PULSE.listeners.remove(self._watch.stepped)
            if self._snapshot is not None:
                torch.cuda.memory._record_memory_history(enabled=None)

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()
