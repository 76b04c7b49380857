"""Why a row is slower than its cards allow: a few of its own steps, profiled after the timed ones.

Behaviour:
    * Whoever starts the row says what one card did (`Expected`). When the row's timed steps come to an efficiency under
      `EFFICIENT`, some steps more are recorded in the same process or ranks: at most `_MOST`, in about `_SECONDS`.
      Nothing is recorded before the last timed step has ended.
    * A row that is efficient enough, or that nobody expects anything of, trains not a step more.
    * The decision is rank 0's, so that all ranks record or none does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from manycard.benchmark.measurement import EFFICIENT, Measurement
from manycard.diagnosis.profile import Profile, ProfileSettings, Recording, merged
from manycard.parallel.profiling import start_recording
from manycard.strategies import Strategy

__all__ = ["Expected", "Look", "findings_of"]

_MOST, _LEAST = 8, 3
_SECONDS = 3.0


@dataclass(frozen=True)
class Expected:
    """What a row's speed is compared with, known before its last round."""

    single: float
    """Samples a second of one card."""
    cards: int
    earlier: tuple[float, ...] = ()
    """Of the row's earlier rounds."""

    def is_missed(self, samples_per_s: float | None) -> bool:
        """Whether the row, with this for its last round, is less efficient than `EFFICIENT`."""
        if samples_per_s is None:
            return False
        return median([*self.earlier, samples_per_s]) < EFFICIENT * self.single * self.cards

    def as_dict(self) -> dict[str, Any]:
        """For the file that travels to the row's process."""
        return asdict(self)

    @classmethod
    def of(cls, read: Mapping[str, Any] | None) -> Expected | None:
        """From what `as_dict` gave."""
        return None if read is None else cls(**{**read, "earlier": tuple(read["earlier"])})


class Look:
    """A look into the steps that follow a row's timed ones.

    Args:
        strategy: how the row's work is spread.
        expected: what its speed is compared with; None where nothing is.
    """

    def __init__(self, strategy: Strategy, expected: Expected | None) -> None:
        self._strategy = strategy
        self._expected = expected
        self._recording: Recording | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._found: list[Profile] = []
        self.steps = 0
        """How many steps there have to be."""

    def begin(self, samples_per_s: float | None, step_ms: float | None, loader: Any = None) -> bool:
        """Record from here on, if the row is slower than expected; whether it is. Every rank calls it.

        Args:
            samples_per_s: what the timed steps have shown.
            step_ms: likewise.
            loader: what the steps' batches come from, where that is known.
        """
        if self._expected is None:
            return False
        if not self._strategy.peers.gather_objects(self._expected.is_missed(samples_per_s))[0]:
            return False
        fitting = int(1e3 * _SECONDS / step_ms) if step_ms else _MOST
        recorded: int = self._strategy.peers.gather_objects(max(_LEAST, min(fitting, _MOST)))[0]
        self._folder = tempfile.TemporaryDirectory(prefix="manycard-bench-profile-")
        settings = ProfileSettings(recorded, 0, self._folder.name)
        self._recording = start_recording(self._strategy, settings, self._found.append, loader)
        self.steps = recorded + 1  # the profiler warms up in one
        return True

    @property
    def done(self) -> bool:
        """Whether enough steps were recorded."""
        return bool(self._found)

    def end(self, row: Measurement) -> Measurement:
        """`row` with what was found; every rank calls it where `begin` said so."""
        self.close()
        everyone = self._strategy.peers.gather_objects(self._found[0] if self._found else None)
        profiles = [profile for profile in everyone if profile is not None and profile.cards]
        return replace(row, findings=findings_of(merged(profiles)) if profiles else None)

    def close(self) -> None:
        """Record no more."""
        if self._recording is not None:
            self._recording.end()
            self._recording = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def into(self, row: Measurement, step: Callable[[], object]) -> Measurement:
        """`row`, with what steps more have shown, where it is slower than expected."""
        if not self.begin(row.samples_per_s, row.step_ms):
            return row
        try:
            for _ in range(self.steps):
                step()
        finally:
            self.close()
        return self.end(row)


def findings_of(profile: Profile) -> tuple[dict[str, Any], ...]:
    """What a profile found, as rows have it: the biggest gain first."""
    found: Sequence[dict[str, Any]] = profile.as_dict()["findings"]
    return tuple(found)
