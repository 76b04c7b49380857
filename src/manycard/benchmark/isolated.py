"""Running one row in a process of its own.

Behaviour:
    * Nothing of one row reaches the next: memory, threads, CUDA contexts and crashes end with the process.
    * The row's process sees none of the caller's MANYCARD_* settings, which would win over the row's.
    * What it prints is kept from the caller's screen; its end is kept in the row when it fails without a result.
    * A row that has no result within its time limit is ended, with everything it started, and is a row that says so;
      its trace shows where it stood.
    * When the caller is interrupted, the process and everything it started are ended before the interrupt goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from manycard.benchmark.failures import describe_exit
from manycard.benchmark.measurement import Measurement
from manycard.benchmark.progress_file import last_progress
from manycard.launch import end_family

__all__ = ["Spec", "run_row"]

OnProgress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""
_SETTINGS = ("MANYCARD_STRATEGY", "MANYCARD_CARDS", "MANYCARD_PRECISION")
_TAIL = 20_000
"""Characters of a row's output that are kept when it fails without a result."""
_NOTICE = 2.0
"""Seconds before the time limit at which the row's processes write where they stand."""


class Spec(Protocol):
    """What can be run as a row."""

    @property
    def worker(self) -> str:
        """The module that runs it: ``python -m worker FOLDER``."""

    @property
    def simulated(self) -> bool:
        """Whether the CPU plays the cards."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its process gets."""

    def to_json(self) -> str:
        """The row as text."""

    def measurement(self, **found: Any) -> Measurement:
        """A row of results with `found` in it."""


def run_row(
    spec: Spec,
    on_progress: OnProgress | None = None,
    time_limit: float = float("inf"),
    expected: dict[str, Any] | None = None,
) -> Measurement:
    """Run `spec` and return its row; a failure is a row with ``error``.

    Args:
        time_limit: seconds that it may take.
        expected: what its process is told of the speed that is expected of it (`profiled.Expected`).
    """
    with tempfile.TemporaryDirectory(prefix="manycard-bench-") as name:
        folder = Path(name)
        (folder / "row.json").write_text(spec.to_json(), encoding="utf-8")
        limit = min(time_limit, 1e6)
        began = time.time()
        stacks_at = began + max(limit - _NOTICE, limit / 2)
        request = {"began": began, "stacks_at": stacks_at, "expected": expected}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        log_path = folder / "log"
        with log_path.open("wb") as log:
            code = _run_to_its_end(spec, folder, log.fileno(), on_progress, limit)
        result = folder / "result.json"
        if result.exists():
            return Measurement.from_row(json.loads(result.read_text(encoding="utf-8")))
        written = log_path.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        if code is None:
            return spec.measurement(error=_too_late(folder, time_limit), trace=_stacks(folder) or written)
        return spec.measurement(error=describe_exit(code, written), trace=written)


def _start(spec: Spec, folder: Path, log: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS} | spec.environment
    if spec.simulated:
        # As ranks have it; so rows differ in how they spread work over cards, not over cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.Popen(
        [sys.executable, "-m", spec.worker, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends the row in order
    )


def _run_to_its_end(
    spec: Spec, folder: Path, log: int, on_progress: OnProgress | None, time_limit: float
) -> int | None:
    """The exit status; None where the process had to be ended because its time was over."""
    process = None
    try:
        with _interrupts_held_back():
            process = _start(spec, folder, log)
        return _wait_for(process, folder / "progress", on_progress, time_limit)
    except BaseException:
        if process is not None:
            end_family(process)
        raise


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM arrive at the end: in the middle of a start, they would leave a process nobody knows."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in before.items() if handler is not None}
    for number in held:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    for arrived in came[:1]:
        signal.raise_signal(arrived)


def _wait_for(
    process: subprocess.Popen[bytes], progress: Path, on_progress: OnProgress | None, time_limit: float
) -> int | None:
    end = time.monotonic() + time_limit
    while True:
        try:
            code = process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            _report(progress, on_progress)
            if time.monotonic() < end:
                continue
            end_family(process)
            return None
        _report(progress, on_progress)
        return code


def _report(progress: Path, on_progress: OnProgress | None) -> None:
    newest = last_progress(progress) if on_progress is not None else None
    if on_progress is not None and newest is not None:
        on_progress(*newest)


def _too_late(folder: Path, time_limit: float) -> str:
    newest = last_progress(folder / "progress")
    if newest is None:
        return f"no step within {time_limit:g} s: it hangs, or its start takes longer (see --time-limit)"
    silent = time.time() - (folder / "progress").stat().st_mtime
    return (
        f"no result within {time_limit:g} s: {newest[0]} steps were done, the last {silent:.0f} s before the end "
        "(see --time-limit)"
    )


def _stacks(folder: Path) -> str:
    """Where the threads of the row's processes stood just before its time was over."""
    found = [(path.name, path.read_text(errors="replace")) for path in sorted(folder.glob("stacks*"))]
    return "\n".join(f"{name}:\n{text}" for name, text in found if text)[-_TAIL:]
