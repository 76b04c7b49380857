"""What one process says of itself when it makes no progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manycard.hangs.collectives import Collective, newest_collective
from manycard.hangs.pulse import Pulse
from manycard.hangs.stacks import Frame, ThreadStack, being_debugged, read_stacks

__all__ = ["ProcessReport", "read_report"]

_STARTING = ("init_process_group", "rendezvous", "_store_based_barrier")
_COMPILING = ("torch/_dynamo/", "torch/_inductor/", "triton/")


@dataclass(frozen=True)
class ProcessReport:
    """One process, seen from a thread of its own."""

    place: str
    """``"rank 1"``; empty for a process alone."""
    steps: int
    """Steps that it has ended."""
    activity: str
    """What it said that it does; empty for the script's own code."""
    silent: float
    """Seconds since there was progress."""
    debugged: bool
    threads: tuple[ThreadStack, ...]
    collective: Collective | None = None

    @property
    def main(self) -> ThreadStack | None:
        """The stack of the main thread."""
        return next((thread for thread in self.threads if thread.main), None)

    @property
    def where(self) -> Frame | None:
        """The line of the script that the main thread is at."""
        return self.main.where if self.main is not None else None

    @property
    def compiling(self) -> bool:
        """Whether something is being compiled, which may take long."""
        return any(thread.has(part) for thread in self.threads for part in _COMPILING)

    @property
    def waits_for(self) -> str:
        """What its main thread waits for: ``"start"``, ``"ranks"``, ``"cards"``, ``"loader"``; empty for none."""
        main = self.main
        if main is None:
            return ""
        if main.has("torch/distributed/", *_STARTING):
            return "start"
        unfinished = self.collective is not None and not self.collective.ended
        if main.has("torch/distributed/") or (main.has("torch/autograd/") and unfinished):
            return "ranks"
        if main.has("manycard/engine/driving/threads", "_wait", "begin", "meet"):
            return "cards"
        if main.has("torch/utils/data/dataloader") or self.activity == "loader":
            return "loader"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, read: dict[str, Any]) -> ProcessReport:
        """From what `as_dict` gave."""
        collective = read["collective"]
        changed = {
            "threads": tuple(map(ThreadStack.of, read["threads"])),
            "collective": None if collective is None else Collective(**collective),
        }
        return cls(**{**read, **changed})

    def same_place(self, later: ProcessReport) -> bool:
        """Whether the main thread has not moved between two reports."""
        one, other = self.main, later.main
        if one is None or other is None or self.collective != later.collective:
            return False
        return one.frames == other.frames and self.steps == later.steps


def read_report(pulse: Pulse, place: str = "") -> ProcessReport:
    """Look at this process now; from another thread than the one that hangs."""
    threads: Sequence[ThreadStack] = read_stacks()
    threads = [t for t in threads if not t.name.startswith("hang-watch")]
    return ProcessReport(
        place, pulse.steps, pulse.activity, pulse.silent, being_debugged(threads), tuple(threads), newest_collective()
    )
