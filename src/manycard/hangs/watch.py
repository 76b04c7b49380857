"""The thread that looks whether this process makes progress.

Behaviour:
    * One a process, begun by the first `Parallel` or by a rank's launcher; it ends with the process and keeps nothing.
    * It judges what manycard waits for itself: a step, its loader, an evaluation, a checkpoint; and a DataLoader of the
      script's that gives no batch. The script's own code may take as long as it likes.
    * A process that was stopped (Ctrl-Z, a closed laptop), that somebody debugs, or that compiles is given more time.
    * A hang is printed with the stacks of all threads. Then the process is ended, or HangError is raised in the main
      thread (by the way of Ctrl-C), or the run goes on, as `Pulse.settings` says.
    * In a rank of ``manycard run`` it judges nothing: it answers the launcher, which sees all ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO

from manycard.errors import HangError
from manycard.hangs.pulse import PULSE, SLACK, Pulse, PulseFile
from manycard.hangs.report import read_report
from manycard.hangs.verdict import Verdict, judge

__all__ = ["ANSWER", "ASK", "PULSE_FILE", "RAW", "answer_launcher", "raw_signal", "watch_this_process"]

PULSE_FILE, ASK, ANSWER, RAW = "pulse", "ask", "answer", "raw_stacks"
"""Names of files in a rank's folder: its pulse; a number that the launcher writes to ask for a report; the report; and
stacks that the interpreter's fault handler wrote, which answers even where Python can't."""
_PERIOD = 0.25
_STOPPED = 5.0
"""A tick that comes so much too late means that the process was stopped."""
_started = threading.Lock()
_threads: list[threading.Thread] = []


def watch_this_process() -> None:
    """Begin to watch, where nobody does yet."""
    with _started:
        if _threads or "MANYCARD_RANK_FOLDER" in os.environ:
            return
        PULSE.follow_optimizers()
        _begin(_Watcher(PULSE).run)


def answer_launcher(folder: Path, place: str) -> None:
    """In a rank: write its pulse and answer the launcher's questions in `folder`."""
    PULSE.file = PulseFile(folder / PULSE_FILE)
    PULSE.forgive()
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        # Kept open: the fault handler writes to its descriptor.
        _raw.append(open(folder / RAW, "w"))  # noqa: SIM115
        faulthandler.register(raw_signal(), file=_raw[-1], all_threads=True)
    with _started:
        _begin(_Answerer(PULSE, folder, place).run)


_raw: list[TextIO] = []


def raw_signal() -> int:
    """The signal at which a rank's fault handler writes its stacks; one that nothing else uses."""
    return int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)


def _begin(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, name="hang-watch", daemon=True)
    _threads.append(thread)
    thread.start()


def _forget_threads() -> None:
    """In a forked child, there is no thread."""
    _threads.clear()
    PULSE.file = None


os.register_at_fork(after_in_child=_forget_threads)


class _Watcher:
    """Judges a process that is alone."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._said: tuple[int, float] | None = None
        """The number of steps at the hang that was said, and when."""
        self._waiting: tuple[tuple[int, int], float] | None = None
        """The DataLoader's iterator that gives no batch, how many it has given, and when that was first seen. The
        iterator itself is not kept: whoever drops it last waits for its workers."""

    def run(self) -> None:
        """Look, until the process ends."""
        last = time.monotonic()
        while True:
            time.sleep(_PERIOD)
            now = time.monotonic()
            if now - last > _STOPPED + _PERIOD:
                self._pulse.forgive()
            last = now
            with contextlib.suppress(Exception):  # an interpreter that goes down
                self._look()

    def _look(self) -> None:
        pulse = self._pulse
        if self._said is not None:
            if pulse.steps == self._said[0]:
                return
            print(f"manycard: the run goes on, {time.monotonic() - self._said[1]:.0f} s later", file=sys.stderr)
            self._said = None
        silent, limit = pulse.silent, pulse.limit
        if silent <= limit:
            self._waiting = None
            return
        report = read_report(pulse)
        late = pulse.unfinished_cards()
        if not pulse.activity and not late and not self._loader_stands(limit):
            return  # the script's own code
        if report.debugged:
            pulse.forgive()
            return
        if report.compiling and silent <= limit * SLACK:
            return
        verdict = judge([report], silent, limit, late=late)
        # Looking takes a while: what runs now may have begun meanwhile, after long work of the script's own.
        if verdict is not None and pulse.silent > pulse.limit:
            self._act(verdict)

    def _loader_stands(self, limit: float) -> bool:
        """Whether the main thread has been in one wait for a DataLoader's batch for as long as `limit`."""
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        given: tuple[int, int] | None = None
        while frame is not None:
            asks = frame.f_code.co_name == "__next__"  # and not __del__, which waits for workers
            if asks and frame.f_code.co_filename.endswith(os.path.join("torch", "utils", "data", "dataloader.py")):
                loader = frame.f_locals.get("self")
                given = id(loader), getattr(loader, "_num_yielded", -1)
                del loader
            frame = frame.f_back
        now = time.monotonic()
        if given is None:
            self._waiting = None
        elif self._waiting is None or self._waiting[0] != given:
            self._waiting = given, now
        return self._waiting is not None and now - self._waiting[1] > limit

    def _act(self, verdict: Verdict) -> None:
        print("\n".join(f"manycard: {line}" for line in verdict.text.splitlines()), file=sys.stderr, flush=True)
        action = self._pulse.settings.action
        self._said = self._pulse.steps, time.monotonic()
        if action == "end":
            print("manycard: ended the run", file=sys.stderr, flush=True)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                for worker in multiprocessing.active_children():  # as Python's own exit does
                    worker.kill()
            os._exit(1)
        if action == "raise":
            self._pulse.fired = HangError(verdict.cause, fix=verdict.fix, report=verdict.text)
            self._said = None
            self._pulse.forgive()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class _Answerer:
    """Answers a rank's launcher."""

    def __init__(self, pulse: Pulse, folder: Path, place: str) -> None:
        self._pulse, self._folder, self._place = pulse, folder, place
        self._answered = ""

    def run(self) -> None:
        """Answer, until the process ends."""
        while True:
            time.sleep(_PERIOD)
            with contextlib.suppress(Exception):
                self._answer()

    def _answer(self) -> None:
        asked = self._folder / ASK
        if not asked.exists():
            return
        number = asked.read_text()
        if number == self._answered:
            return
        self._answered = number
        report = read_report(self._pulse, self._place)
        if report.debugged:
            self._pulse.forgive()
        partial = self._folder / f"{ANSWER}.partial"
        partial.write_text(json.dumps({"number": number, "report": report.as_dict()}), encoding="utf-8")
        partial.replace(self._folder / ANSWER)
