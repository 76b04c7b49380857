"""What looks on while a run trains: profiles, memory, and whether its replicas are still equal."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from manycard.diagnosis.lockstep import LockstepReport, check_lockstep
from manycard.diagnosis.profile import ProfileSettings
from manycard.parallel.memory import MemoryReport, MemoryWatch, report_memory
from manycard.parallel.profiling import Profiling
from manycard.strategies import Strategy
from manycard.strategies.train_step import TrainStep

__all__ = ["LookingOn"]


class LookingOn:
    """The part of `Parallel` that shows how a run is doing."""

    strategy: Strategy
    _steps: weakref.WeakSet[TrainStep]
    _memory_watches: list[MemoryWatch]

    def profile(
        self,
        loader: Iterable[Any] | None = None,
        *,
        steps: int = 8,
        skip: int = 5,
        out: str | None = None,
        say: bool = True,
    ) -> Profiling:
        """Record some steps, and say where their time goes on each card, and what would make them faster.

        Args:
            loader: what the loop walks; without one it is a context.
            steps: how many to record.
            skip: steps before, that compile and warm up.
            out: the folder for the trace, which https://ui.perfetto.dev opens.
            say: print the profile; ``result`` of what comes back has it in any case.
        """
        return Profiling(self.strategy, loader, ProfileSettings(steps, skip, out), say)

    def memory(self, *, snapshot: str | Path | None = None) -> MemoryReport:
        """What each card's memory is for, and where it is uneven or fragmented; every rank calls it.

        Args:
            snapshot: a file for torch's memory viewer (https://docs.pytorch.org/memory_viz); real cards only.
        """
        return report_memory(self.strategy, snapshot)

    def watch_memory(self, *, every: int = 8, snapshot: str | Path | None = None) -> MemoryWatch:
        """Warn of memory that grows from step to step, and name the variable, attribute or list that keeps it.

        Args:
            every: steps between two looks, of some tens of milliseconds each; four looks tell.
            snapshot: a file for torch's memory viewer, written then.
        """
        self._memory_watches.append(MemoryWatch(self.strategy, every, snapshot))
        return self._memory_watches[-1]

    def check_lockstep(self, model: nn.Module) -> LockstepReport:
        """Compare all replicas of `model` bit by bit, over cards and ranks; every rank calls it.

        Raises:
            LockstepError: two differ; says what, where, why and what to do.
        """
        pending = max((step.pending for step in self._steps), default=0)
        return check_lockstep(model, gradients=not pending)
