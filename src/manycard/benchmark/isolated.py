"""Running one row in a process of its own.

Behaviour:
    * Nothing of one row reaches the next: memory, threads, CUDA contexts and crashes end with the process.
    * The row's process sees none of the caller's MANYCARD_* settings, which would win over the row's.
    * What it prints is kept from the caller's screen; its end is kept in the row when it fails without a result.
    * When the caller is interrupted, the process and everything it started are ended before the interrupt goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from manycard.benchmark.failures import describe_exit
from manycard.benchmark.measurement import Measurement
from manycard.benchmark.row import RowSpec
from manycard.launch import end_family

__all__ = ["run_row"]

OnProgress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""
_SETTINGS = ("MANYCARD_STRATEGY", "MANYCARD_CARDS", "MANYCARD_PRECISION")
_TAIL = 20_000
"""Characters of a row's output that are kept when it fails without a result."""


def run_row(spec: RowSpec, on_progress: OnProgress | None = None) -> Measurement:
    """Run `spec` and return its row; a failure is a row with ``error``."""
    with tempfile.TemporaryDirectory(prefix="manycard-bench-") as name:
        folder = Path(name)
        (folder / "row.json").write_text(spec.to_json(), encoding="utf-8")
        log_path = folder / "log"
        with log_path.open("wb") as log:
            code = _wait_for(_start(spec, folder, log.fileno()), folder / "progress", on_progress)
        result = folder / "result.json"
        if result.exists():
            return Measurement.from_row(json.loads(result.read_text(encoding="utf-8")))
        written = log_path.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        return spec.measurement(error=describe_exit(code, written), trace=written)


def _start(spec: RowSpec, folder: Path, log: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    if spec.simulated:
        # As ranks have it; so rows differ in how they spread work over cards, not over cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.Popen(
        [sys.executable, "-m", "manycard.benchmark.worker", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends the row in order
    )


def _wait_for(process: subprocess.Popen[bytes], progress: Path, on_progress: OnProgress | None) -> int:
    try:
        while True:
            try:
                code = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                _report(progress, on_progress)
                continue
            _report(progress, on_progress)
            return code
    except BaseException:
        end_family(process)
        raise


def _report(progress: Path, on_progress: OnProgress | None) -> None:
    if on_progress is None or not progress.exists():
        return
    lines = progress.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is unfinished
    if lines:
        done, total = lines[-1].split()
        on_progress(int(done), int(total))
