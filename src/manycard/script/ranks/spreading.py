"""Spreading an unmodified script's training over ranks: each runs the whole script, and its part of every call.

Every rank runs the script in lockstep, from equal seeds, on whole batches. Outermost calls of trained modules are cut
over the ranks and their outputs gathered (`RankCall`), so that every rank's script sees what it would see on one card.

Behaviour, where it differs from `ScriptSpreading`:
    * Whether and how a call can be cut is found by each rank on its own card (`InTurn`); ranks then agree: a call is
      spread when all of them would, by rank 0's layout, and the reason against it is rank 0's.
    * A call with fewer samples than ranks, or from another thread than the main one, whose order no other rank could
      know, runs whole in each rank.
    * Draws inside a spread call are the rank's own; afterwards every generator is as it was before (`RankDraws`).
    * What forward writes into buffers (BatchNorm statistics, counters) is rank 0's afterwards, in every rank.
    * That ranks are in lockstep is looked at now and then (`check_lockstep`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from manycard.engine.batches.layout import Layout
from manycard.engine.driving.spans import span
from manycard.engine.replicas.sync_batchnorm import SyncedBatchNorm, alone
from manycard.engine.replicas.watching import Watch
from manycard.script.comparison.check import Verdict, find_layout
from manycard.script.comparison.layout import Joined
from manycard.script.means import SpreadsCalls
from manycard.script.ranks.call import RankCall, RankModule
from manycard.script.ranks.draws import RankDraws
from manycard.script.ranks.exchange import broadcast_first
from manycard.script.ranks.lockstep import CallCounts, check_lockstep, is_due
from manycard.script.ranks.parts import InTurn
from manycard.script.spreading import ModuleReport, ScriptSpreading, SpreadModule, SpreadSettings
from manycard.strategies.peers import Peers

__all__ = ["RankSpreading", "Team"]


@dataclass(frozen=True)
class Team:
    """What one rank knows of all."""

    peers: Peers
    """How they talk."""
    device: torch.device
    """This rank's card."""
    counts: CallCounts
    """How far each has come."""
    names: tuple[str, ...]
    """The cards of all ranks."""


class RankSpreading(ScriptSpreading):
    """Handles a script's outermost calls in one rank.

    Args:
        settings: how; its cards are one for each rank, as this rank sees its own.
        join: makes the ranks a team; called when the first trained module is.
    """

    def __init__(self, settings: SpreadSettings, join: Callable[[], Team]) -> None:
        super().__init__(settings)
        self._join = join
        self.team: Team | None = None
        """Once a trained module has been called."""

    def _spread_module(self, module: nn.Module, report: ModuleReport) -> SpreadModule:
        self.team = self.team or self._join()
        return _ModuleInRanks(module, self, report, self.team)

    def _names(self) -> str:
        return ", ".join(self.team.names) if self.team is not None else super()._names()


class _ModuleInRanks(SpreadModule):
    """One module of the script's, in one rank."""

    def __init__(self, module: nn.Module, spreading: RankSpreading, report: ModuleReport, team: Team) -> None:
        super().__init__(module, spreading.cards, spreading.settings, report)
        self._team = team
        self._draws = RankDraws(team.peers.rank, team.device)
        self._fewest = max(2, team.peers.world_size)
        self._calls = 0

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any]) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self._say_whole("it is called from a thread of the script's own", args, kwargs)
            return self._on_one_card(args, kwargs, plain)
        self._team.counts.begin()
        if is_due(self._calls):
            check_lockstep(self.module, (args, kwargs), self._calls, self._team.peers, self._team.device)
        self._calls += 1
        return super().call(args, kwargs, plain)

    def _on_one_card(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any]) -> Any:
        with alone():
            return super()._on_one_card(args, kwargs, plain)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: Any = None) -> Verdict:
        assert self._cards is not None, "placed before"
        module = getattr(self.module, "_orig_mod", self.module)
        with span("comparison"):
            return _agreed(find_layout(module, self._cards, args, kwargs, known, InTurn), self._team.peers)

    def _make_spreader(self) -> _RankSpreader:
        self._started = time.perf_counter()
        return _RankSpreader(self.module, self._team, self._draws)

    def _spread(self, spreader: SpreadsCalls, kind: Any, samples: int) -> Callable[..., Any]:
        assert isinstance(spreader, _RankSpreader), "made here"
        spreader.draws_on_host = kind.verdict.draws
        return super()._spread(spreader, kind, samples)


def _agreed(own: Verdict, peers: Peers) -> Verdict:
    """The verdict of all ranks."""
    found: list[Verdict] = peers.gather_objects(own)
    refusing = [verdict for verdict in found if verdict.layout is None]
    draws = any(verdict.draws for verdict in found)
    first = refusing[0] if refusing else found[0]
    return Verdict(first.layout, first.reason, draws, all(verdict.decided for verdict in found))


class _RankSpreader:
    """Spreads one module's calls over ranks (a `manycard.script.means.SpreadsCalls`)."""

    def __init__(self, module: nn.Module, team: Team, draws: RankDraws) -> None:
        self._team = team
        self._draws = draws
        self._module = module
        self._lock = threading.RLock()
        self._calls = 0
        self.draws_on_host = True
        """Whether forward may draw from ``random`` or NumPy."""
        self._see()

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held around `prepare` and `run`."""
        return self._lock

    @property
    def parts(self) -> int:
        """How many ranks there are."""
        return self._team.peers.world_size

    def _see(self) -> None:
        self._of = RankModule(self._module, self._team.device, self._team.peers)
        self._watch = Watch(self._module)
        self._buffers = _Buffers(self._module)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """What the script has changed since the last call."""
        if self._watch.structure_changed():
            self._see()
            return {"structure"}
        return {change.name for change in self._watch.changes()}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout) -> Any:
        """Run this rank's part; gives the outputs of all."""
        assert isinstance(layout, Joined), "a comparison gives a Joined"
        ask = is_due(self._calls)
        self._calls += 1
        self._buffers.look()
        with self._draws.apart(host=self.draws_on_host):
            value = RankCall(self._of, args, kwargs, sizes, layout, ask=ask).run()
        broadcast_first(self._buffers.written(), self._team.device)
        self._watch.changes()  # what forward wrote is no change of the script's
        return value

    def close(self) -> None:
        """There is nothing to let go of."""


class _Buffers:
    """Which buffers of a module a forward pass writes."""

    def __init__(self, module: nn.Module) -> None:
        self._statistics = [
            part
            for part in module.modules()
            if isinstance(part, _NormBase) and part.track_running_stats and not isinstance(part, SyncedBatchNorm)
        ]
        apart = {id(part) for part in module.modules() if isinstance(part, _NormBase)}
        self._others = [(part, name) for part in module.modules() if id(part) not in apart for name in part._buffers]
        self._seen: list[tuple[int, int]] = []

    def look(self) -> None:
        """Note how they are before a forward pass."""
        self._seen = [_state(part._buffers[name]) for part, name in self._others]

    def written(self) -> list[Tensor]:
        """Those that were written since; statistics in training always are, by kernels that leave no trace."""
        found = [
            part._buffers[name]
            for (part, name), seen in zip(self._others, self._seen, strict=True)
            if _state(part._buffers.get(name)) != seen
        ]
        for layer in self._statistics:
            if layer.training:
                found += [layer.running_mean, layer.running_var]
        return [buffer for buffer in found if buffer is not None]


def _state(buffer: Tensor | None) -> tuple[int, int]:
    if buffer is None:
        return 0, 0
    return id(buffer), 0 if buffer.is_inference() else buffer._version
