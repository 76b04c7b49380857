"""Where results of ``manycard bench`` go: one folder with JSON, CSV, Markdown and HTML, and the screen.

Behaviour:
    * ``bench.json`` and ``rounds.jsonl`` are written after every row, so that whatever ends the run loses one row.
      What is made of them is written at the end.
    * Without matplotlib and jinja2 there is no HTML page, which is said; everything else is as before.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from manycard.benchmark import Journal, compare, write_json
from manycard.benchmark.comparing import read_results
from manycard.cards import Card
from manycard.cli.options import print_json, say
from manycard.errors import MissingExtraError, SettingError
from manycard.report import BenchmarkProgress, rows_as_csv

__all__ = ["INTERRUPTED", "ResultFolder", "termination_as_interrupt"]

INTERRUPTED = 128 + signal.SIGINT


class ResultFolder:
    """The folder of one run.

    Args:
        out: where; made here, by the time where it is None.
        against: results of an earlier run to compare with, read at once.
        resume: go on with what the folder holds.

    Raises:
        SettingError: the folder can't be written, or `against` can't be read.
    """

    def __init__(self, out: Path | None, against: Path | None = None, *, resume: bool = False) -> None:
        if resume and out is None:
            raise SettingError("--resume", True, "no folder is named", fix="give the earlier run's folder with --out")
        self._earlier = read_results(against) if against is not None else None
        self._against = str(against)
        self._resume = resume
        self.path = _make_folder(out)

    def journal(self, cards: Sequence[Card]) -> Journal:
        """The rounds of this run, and of the earlier one that it goes on with."""
        return Journal(self.path / "rounds.jsonl", cards, resume=self._resume)

    def watch(self, bars: BenchmarkProgress) -> Watching:
        """Draws bars and saves every row as it comes."""
        return Watching(bars, self.path / "bench.json")

    def present(
        self,
        document: dict[str, Any],
        *,
        as_json: bool,
        show: Callable[[dict[str, Any], Console], None],
        markdown: Callable[[dict[str, Any]], str],
        write_page: Callable[[dict[str, Any], Path], None],
    ) -> int:
        """Print and save the results; the exit status."""
        if self._earlier is not None:
            document["comparison"] = compare(document, self._earlier, self._against)
        write_json(self.path / "bench.json", document)
        (self.path / "bench.csv").write_text(rows_as_csv(document["rows"]), encoding="utf-8")
        (self.path / "bench.md").write_text(markdown(document), encoding="utf-8")
        if as_json:
            print_json(document)
        else:
            show(document, Console())
        self._save_page(document, write_page)
        say(f"results: {self.path}")
        if document["interrupted"]:
            return INTERRUPTED
        comparison = document.get("comparison")
        # A comparison of nothing must not pass for one that found nothing.
        worse = comparison is not None and (comparison["worse"] > 0 or comparison["compared"] == 0)
        return 1 if worse or any(row["error"] is not None for row in document["rows"]) else 0

    def _save_page(self, document: dict[str, Any], write_page: Callable[[dict[str, Any], Path], None]) -> None:
        if not document["rows"]:
            return
        path = self.path / "bench.html"
        try:
            write_page(document, path)
        except MissingExtraError as missing:
            say(f"no HTML report: {missing}")
            return
        say(f"report: {path}")


class Watching:
    """Hears what a run does: draws it, and saves every row as it comes."""

    def __init__(self, bars: BenchmarkProgress, path: Path) -> None:
        self._bars = bars
        self._path = path
        self.started = bars.started
        self.progressed = bars.progressed

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        """Save the rows so far."""
        write_json(self._path, document)
        self._bars.finished(row)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: rows kept, nothing left running."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_folder(out: Path | None) -> Path:
    folder = out or Path("reports") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").touch()
    except OSError as error:
        raise SettingError(
            "--out", str(folder), f"results can't be written there ({error.strerror})", fix="name another folder"
        ) from error
    return folder.resolve()
