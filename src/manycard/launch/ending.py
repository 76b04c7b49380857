"""Ending a process that this one has started, with everything that it started in turn.

Behaviour:
    * The process alone is asked (SIGTERM): one that has started ranks stops them itself, in order.
    * What is left of its family after some seconds is killed. Ctrl-C meanwhile ends the patience, and goes no further.
    * Nothing of the family runs when `end_family` returns, and the process has been waited for.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from typing import Any

import psutil

__all__ = ["PATIENCE", "end_family"]

PATIENCE = 10.0
"""Seconds that processes get to end by themselves."""


def end_family(process: subprocess.Popen[Any], patience: float = PATIENCE) -> None:
    """End `process` and all its descendants.

    Args:
        patience: seconds that they get to end by themselves.
    """
    try:
        head = psutil.Process(process.pid)
        family = [head, *head.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        _, left = psutil.wait_procs(family, timeout=patience)
    except KeyboardInterrupt:  # asked twice: no more patience
        left = [member for member in family if member.is_running()]
    for survivor in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    psutil.wait_procs(left, timeout=patience)
    process.wait()
