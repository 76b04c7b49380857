"""Noticing that ranks make no progress, from their launcher, which sees all of them.

Behaviour:
    * Ranks write their pulse (steps, the time of the last, the limit) to memory that is read here twice a second.
    * When every rank that runs has been silent for longer than its limit, each is asked, twice, where it is. One that
      doesn't answer has its stacks written by the interpreter's fault handler.
    * It is a hang if a rank waits (for another, for its loader, for its cards) and has not moved between the answers.
      A rank that is stopped by a signal, debugged or compiling is none; the ranks are then given their time anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from manycard.errors import HangError
from manycard.hangs.pulse import SLACK, PulseFile
from manycard.hangs.report import ProcessReport
from manycard.hangs.verdict import judge
from manycard.hangs.watch import ANSWER, ASK, PULSE_FILE, RAW, raw_signal

__all__ = ["HangLook"]

_EVERY = 0.5
_PATIENCE = 4.0
"""Seconds that a rank has to answer."""
_BETWEEN = 0.5
"""Seconds between the two questions."""


@dataclass
class _Asking:
    """A question that is under way."""

    number: int
    since: float
    silent: float
    limit: float
    first: dict[int, ProcessReport] = field(default_factory=dict)
    """The answers to the question before."""


class HangLook:
    """Looks at a run's ranks.

    Args:
        folders: each rank's folder.
        running: whether a rank's script still runs.
        process: a rank's process, where it has one.
    """

    def __init__(
        self,
        folders: Mapping[int, Path],
        running: Callable[[int], bool],
        process: Callable[[int], psutil.Process | None],
    ) -> None:
        self._folders = folders
        self._running = running
        self._process = process
        self._files: dict[int, PulseFile] = {}
        self._next = 0.0
        self._forgiven = time.monotonic()
        self._patience = 1.0
        """By how much limits are stretched, after a false alarm."""
        self._asking: _Asking | None = None
        self._asked = 0
        self.found: HangError | None = None

    def look(self) -> HangError | None:
        """Look once; call it often. What is found is given once."""
        now = time.monotonic()
        if now < self._next or self.found is not None:
            return None
        self._next = now + _EVERY
        if self._asking is not None:
            self.found = self._listen(now)
            return self.found
        waiting = self._overdue(now)
        if waiting is not None:
            if any(self._is_stopped(rank) for rank in self._alive()):
                self._forgiven = now
            else:
                self._ask(now, *waiting)
        return None

    # ---- pulses --------------------------------------------------------------------------------------------

    def _alive(self) -> list[int]:
        return [rank for rank in self._folders if self._running(rank)]

    def _overdue(self, now: float) -> tuple[float, float] | None:
        """How long the ranks have been silent and their limit, if all that run are beyond it."""
        silences = []
        for rank in self._alive():
            pulse = self._pulse(rank)
            if pulse is None:
                return None
            _, last, _, limit, _ = pulse
            silence = now - max(last, self._forgiven)
            if silence <= limit * self._patience:
                return None
            silences.append((silence, limit * self._patience))
        return min(silences) if silences else None

    def _pulse(self, rank: int) -> tuple[int, float, float, float, str] | None:
        if rank not in self._files:
            path = self._folders[rank] / PULSE_FILE
            if not path.exists():
                return None
            self._files[rank] = PulseFile(path)
        return self._files[rank].read()

    def _is_stopped(self, rank: int) -> bool:
        process = self._process(rank)
        with contextlib.suppress(psutil.Error):
            return process is not None and process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    # ---- questions -----------------------------------------------------------------------------------------

    def _ask(self, now: float, silent: float, limit: float, first: dict[int, ProcessReport] | None = None) -> None:
        self._asked += 1
        for rank in self._alive():
            with contextlib.suppress(OSError):
                partial = self._folders[rank] / f"{ASK}.partial"
                partial.write_text(str(self._asked))
                partial.replace(self._folders[rank] / ASK)
        self._asking = _Asking(self._asked, now, silent, limit, first or {})

    def _listen(self, now: float) -> HangError | None:
        """Read the answers to a question, once all are there or the time is over."""
        asking = self._asking
        assert asking is not None, "a question comes first"
        alive = self._alive()
        answers = {rank: report for rank in alive if (report := self._answer(rank, asking.number)) is not None}
        mute = [rank for rank in alive if rank not in answers]
        if mute and now - asking.since < _PATIENCE:
            return None
        if not asking.first:
            if now - asking.since >= _BETWEEN:
                self._ask(now, asking.silent + now - asking.since, asking.limit, answers or {-1: _NOBODY})
            return None
        self._asking = None
        if self._overdue(now) is None:  # one of them has gone on meanwhile
            return None
        return self._judge(asking, answers, mute)

    def _answer(self, rank: int, number: int) -> ProcessReport | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            read: dict[str, Any] = json.loads((self._folders[rank] / ANSWER).read_text(encoding="utf-8"))
            if read["number"] == str(number):
                return ProcessReport.of(read["report"])
        return None

    def _judge(self, asking: _Asking, answers: dict[int, ProcessReport], mute: list[int]) -> HangError | None:
        reports = list(answers.values())
        stuck = any(
            report.waits_for and rank in asking.first and asking.first[rank].same_place(report)
            for rank, report in answers.items()
        )
        compiling = any(report.compiling for report in reports) and self._patience < SLACK
        verdict = None
        if (stuck or mute) and not compiling:
            ended = [f"rank {rank}" for rank in self._folders if not self._running(rank)]
            names = [f"rank {rank}" for rank in mute]
            verdict = judge(reports, asking.silent, asking.limit, ended=ended, mute=names)
        if verdict is None:
            self._forgiven = time.monotonic()
            self._patience = min(2 * self._patience, 16.0)
            return None
        raw = "".join(self._raw_stacks(rank) for rank in mute)
        return HangError(verdict.cause, fix=verdict.fix, report=verdict.text + raw)

    def _raw_stacks(self, rank: int) -> str:
        """The stacks of a rank that doesn't answer, as the fault handler writes them."""
        process = self._process(rank)
        if process is None:
            return ""
        with contextlib.suppress(OSError, psutil.Error):
            os.kill(process.pid, raw_signal())
            time.sleep(0.5)
            text = (self._folders[rank] / RAW).read_text(errors="replace").strip()
            return f"\nstack of rank {rank}, by Python's fault handler, innermost first:\n{text}" if text else ""
        return ""


_NOBODY = ProcessReport("", 0, "", 0.0, False, ())
