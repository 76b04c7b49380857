"""A process that works in stages, watched from outside: a stage that hangs or fails is known by name.

Behaviour:
    * The process writes one JSON object a line to a pipe of its own, so that what libraries print can't disturb it:
      ``{"stage": NAME, "seconds": LIMIT}`` before each stage, and any other object as a result.
    * A stage that doesn't end within its limit ends the process and everything it started; what came before it
      is kept.
    * A process that raises, crashes or is killed by a signal failed in the stage it had named last.
    * When the watcher is interrupted, the process ends first.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

__all__ = ["StagedRun", "run_in_stages"]

FIRST_STAGE = "starting Python and torch"
_FIRST_LIMIT = 120.0
_LONGEST_FAILURE = 300
_PATIENCE = 3.0
"""Seconds in which a killed process should be gone."""


@dataclass
class StagedRun:
    """What a process in stages did."""

    records: list[dict[str, Any]] = field(default_factory=list)
    hung_at: str = ""
    failed_at: str = ""
    failure: str = ""
    """Why it failed, in a line."""


def run_in_stages(
    words: Sequence[str],
    environment: Mapping[str, str],
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    first_limit: float = _FIRST_LIMIT,
) -> StagedRun:
    """Run a process to its end, or to the stage that does not end.

    Args:
        words: the command; the number of the pipe's descriptor is added.
        environment: its variables.
        on_stage: called with each stage's name.
        first_limit: seconds until it must name its first stage.
    """
    found = StagedRun()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [*words, str(writing)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends the process
            )
        finally:
            os.close(writing)
        try:
            stage, ended = _follow(reading, found, on_stage, first_limit)
        except BaseException:
            _kill(process)
            raise
        finally:
            os.close(reading)
        if not ended:
            _kill(process)
            found.hung_at = stage
            return found
        code = process.wait()
        if code != 0:
            log.seek(0)
            found.failed_at = stage
            found.failure = _in_a_line(log.read().decode(errors="replace"), code)
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it started: it has nothing to save. One that hangs in the driver may stay for good."""
    try:
        head = psutil.Process(process.pid)
        family = [head, *head.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=_PATIENCE)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_PATIENCE)


def _follow(reading: int, found: StagedRun, on_stage: Callable[[str], None], limit: float) -> tuple[str, bool]:
    """Read until the process closes the pipe or a stage is over its limit; the last stage, and whether it ended."""
    stage, deadline, rest = FIRST_STAGE, time.monotonic() + limit, b""
    on_stage(stage)
    while True:
        ready, _, _ = select.select([reading], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return stage, False
        piece = os.read(reading, 65536)
        if not piece:
            return stage, True
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            record = json.loads(line)
            if "stage" in record:
                stage, deadline = record["stage"], time.monotonic() + record["seconds"]
                on_stage(stage)
            else:
                found.records.append(record)


def _in_a_line(log: str, code: int) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # Of a traceback the last line that begins with an error's name says it; hints follow it.
    named = [
        line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) and " " not in line.split(":")[0]
    ]
    words = named[-1] if named else lines[-1] if lines else ""
    if named:
        kind, _, said = words.partition(":")
        words = f"{kind.rsplit('.', 1)[-1]}:{said}"
    how = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
    return f"{words[:_LONGEST_FAILURE]} ({how})" if words else how
