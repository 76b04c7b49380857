"""Rounds over rows: every row once, then every row again, so that a slow minute of the machine falls on all of them.

Behaviour:
    * A row that fails isn't run in later rounds, and the others go on.
    * What the journal holds already isn't run again.
    * The watcher hears of every finished round with the whole document so far, and can save it: an interrupt loses the
      row that was running and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from manycard.benchmark.isolated import Spec, run_row
from manycard.benchmark.journal import Journal

__all__ = ["Watcher", "run_rounds"]


class Watcher(Protocol):
    """Hears what a running matrix does."""

    def started(self, label: str, round_number: int, rounds: int) -> None:
        """A row begins."""

    def progressed(self, done: int, total: int) -> None:
        """The running row has handed `done` of about `total` steps to its cards."""

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        """A row ended; `document` holds all rows so far."""


class _Labelled(Spec, Protocol):
    @property
    def label(self) -> str: ...


Row = TypeVar("Row", bound=_Labelled)


def run_rounds(
    specs: Sequence[Row],
    repeats: int,
    time_limit: float,
    journal: Journal,
    watcher: Watcher,
    document: Callable[[], dict[str, Any]],
    expected: Callable[[Row, int], dict[str, Any] | None] = lambda spec, number: None,
) -> None:
    """Run what is missing of `repeats` rounds over `specs`.

    Args:
        time_limit: seconds that one row may take.
        document: the results so far, for the watcher.
        expected: what a row's process is told of the speed that is expected of it, in a round.

    Raises:
        KeyboardInterrupt: the caller was interrupted; the journal has what was measured.
    """
    for number in range(1, repeats + 1):
        for spec in specs:
            known = journal.rounds(spec)
            if len(known) >= number or any(row.error is not None for row in known):
                continue
            watcher.started(spec.label, number, repeats)
            row = run_row(spec, watcher.progressed, time_limit, expected(spec, number))
            journal.add(spec, row)
            watcher.finished(row.to_row(), document())
