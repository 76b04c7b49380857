"""A bar a row while a benchmark runs.

On a terminal the bars move; anywhere else (a log of CI, a pipe) every finished row is one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from manycard.report import figures

__all__ = ["BenchmarkProgress"]


class BenchmarkProgress:
    """Bars on `console`; a context manager.

    Args:
        console: where to draw; standard error, so that standard output holds results alone.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[found]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._label = ""

    def __enter__(self) -> BenchmarkProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def started(self, label: str, round_number: int, rounds: int) -> None:
        """Draw a new bar."""
        self._label = label if rounds == 1 else f"{label}, round {round_number} of {rounds}"
        self._task = self._bars.add_task(self._label, total=None, found="starting")
        if not self._console.is_terminal:
            self._say(f"{self._label} ...")

    def progressed(self, done: int, total: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total, found="")

    def finished(self, row: Mapping[str, Any]) -> None:
        """Fill the bar and say what the row found."""
        found = f"{figures.speed(row['samples_per_s'])} {row['unit']}/s"
        if row["error"] is not None:
            found = f"failed: {row['error']}"
        if self._task is not None:
            self._bars.update(self._task, found=_plain(found))
            self._bars.stop_task(self._task)
        if not self._console.is_terminal:
            self._say(f"{self._label}: {found}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    """`text` with nothing in it that rich reads as markup."""
    return text.replace("[", r"\[")
