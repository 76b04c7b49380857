"""`Parallel.profile`: recording steps of a loop, and saying where their time goes.

Behaviour:
    * Round a loader (``for batch in parallel.profile(loader)``) or as a context (``with parallel.profile() as found``).
      Steps are counted from where it begins; when enough were recorded, or at its end, the profile is printed by rank 0
      and the loop goes on without.
    * In `ddp` every rank records its own steps; rank 0 shows all of them.
    * Under ``manycard profile``, the command's own recording is the one that runs, and this one does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manycard.data import GlobalLoader
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.memory_use import (
    GrowthWatch,
    Reserve,
    Tried,
    judge_fragments,
    judge_memory,
    reserves_of_process,
)
from manycard.diagnosis.profile import Profile, ProfileSettings, Recording, Setup, merged
from manycard.hangs import PULSE
from manycard.parallel.memory import memory_of_process
from manycard.strategies import Strategy

__all__ = [
    "VARIABLE",
    "Profiling",
    "begin_from_environment",
    "end_from_environment",
    "start_recording",
    "with_fragments",
]

VARIABLE = "MANYCARD_PROFILE"
"""Set by ``manycard profile``: ``{"steps": ..., "skip": ..., "out": FOLDER, "whole": ...}``."""
_begun: list[Recording] = []
_strategies: list[Strategy] = []
"""Of the newest `Parallel` of this process."""


class Profiling:
    """A recording of a loop's steps; a context manager, and an iterable where it was given a loader.

    Args:
        strategy: how the run's work is spread.
        loader: what to walk; None for a context alone.
        settings: how much to record.
        say: print the profile.
    """

    def __init__(self, strategy: Strategy, loader: Iterable[Any] | None, settings: ProfileSettings, say: bool) -> None:
        self._strategy = strategy
        self._loader = loader
        self._say = say
        self._recording: Recording | None = None
        self.result: Profile | None = None
        """The profile, on rank 0 that of all ranks; None until enough steps were recorded."""
        self._settings = settings

    def __enter__(self) -> Profiling:
        if not _begun:
            self._recording = start_recording(self._strategy, self._settings, self._show, self._loader)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._recording is not None:
            self._recording.end()

    def __iter__(self) -> Iterator[Any]:
        with self:
            yield from self._loader or ()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _show(self, profile: Profile) -> None:
        everyone = self._strategy.peers.gather_objects(with_memory(profile, self._strategy))
        self.result = with_fragments(merged(everyone), why_not="manycard profile SCRIPT tries them")
        if self._say and self._strategy.peers.rank == 0:
            print("\n".join(f"manycard: {line}" for line in str(self.result).splitlines()), file=sys.stderr)


def with_memory(profile: Profile, strategy: Strategy | None) -> Profile:
    """`profile` with what the memory of this process's cards is for, what is uneven in it, and what is reserved."""
    profile = replace(profile, reserves=tuple(reserve.as_dict() for reserve in reserves_of_process()))
    if strategy is None:
        return profile
    cards = memory_of_process(strategy)
    rows = tuple({**card.as_dict(), "text": str(card)} for card in cards)
    return replace(profile, memory=rows, growth=(*profile.growth, *judge_memory(cards, fragments=False)))


def with_fragments(profile: Profile, tried: Sequence[Tried] = (), why_not: str = "") -> Profile:
    """`profile` with what is to be said of fragmented memory; as it is where there is little of it."""
    step_ms = max((card.step for card in profile.cards), default=None)
    reserves = [Reserve(**row) for row in profile.reserves]
    found = judge_fragments(reserves, tried, why_not=why_not, step_ms=step_ms)
    return replace(profile, growth=(*profile.growth, *found)) if found else profile


def start_recording(
    strategy: Strategy, settings: ProfileSettings, then: Any, loader: Iterable[Any] | None = None
) -> Recording:
    """Begin to record this process's steps."""
    rank = strategy.peers.rank
    several = strategy.peers.world_size > 1
    names = [card.name for card in strategy.cards]
    if several:
        names = [names[rank % len(names)]]
    setup = Setup(
        strategy=strategy.name,
        workers=loader.num_workers if isinstance(loader, GlobalLoader) else None,
        gathers=strategy.name == "torch_dp",
    )
    made = Recording(settings, lambda: names, lambda: setup, then, f"rank{rank}" if several else "trace")
    made.start()
    return made


def begin_from_environment(
    strategy: Strategy | None = None, cards: Sequence[str] = (), rank: int = 0, *, name: str | None = None
) -> None:
    """Begin the recording that ``manycard profile`` has asked for, once a process.

    Args:
        strategy: how the run's work is spread; None where no `Parallel` is known of yet.
        cards: then, the names of the cards of this process.
        rank: then, which rank this is.
        name: then, what the strategy is called, where that is known.
    """
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return
    if strategy is not None:
        rank = strategy.peers.rank
        cards = [card.name for card in strategy.cards]
        cards = [cards[rank % len(cards)]] if strategy.peers.world_size > 1 else cards
    name = name if strategy is None else strategy.name
    # A script without `Parallel` computes its loss outside of the calls that are spread.
    setup = Setup(strategy=name or "", gathers=name in (None, "torch_dp"))
    if _begun:
        _begun[0].describe(lambda: cards, lambda: setup)
        _strategies[:] = [strategy] if strategy is not None else []
        return
    read: Mapping[str, Any] = json.loads(asked)

    _strategies[:] = [strategy] if strategy is not None else []
    growth: list[Finding] = []
    watch = GrowthWatch(growth.append)
    if read.get("memory"):
        PULSE.listeners.append(watch.stepped)
    if read.get("empty_at"):
        _empty_cache_at(read["empty_at"])

    def then(profile: Profile) -> None:
        if watch.stepped in PULSE.listeners:
            PULSE.listeners.remove(watch.stepped)
        profile = with_memory(replace(profile, growth=tuple(growth)), next(iter(_strategies), None))
        profile.write(Path(read["out"]) / f"profile{rank}.json")
        if not read["whole"]:
            raise SystemExit(0)

    settings = ProfileSettings(read["steps"], read["skip"], read["out"])
    made = Recording(settings, lambda: cards, lambda: setup, then, f"rank{rank}" if rank else "trace")
    made.start()
    _begun.append(made)


def _empty_cache_at(step: int) -> None:
    """Empty the allocator's cache once, after this many steps: a remedy that is tried."""
    left = [step]

    def stepped() -> None:
        left[0] -= 1
        if not left[0]:
            PULSE.listeners.remove(stepped)
            torch.cuda.empty_cache()

    PULSE.listeners.append(stepped)


def end_from_environment() -> None:
    """End the recording of a script that made fewer steps than were asked for."""
    while _begun:
        with contextlib.suppress(SystemExit):
            _begun.pop().end()
