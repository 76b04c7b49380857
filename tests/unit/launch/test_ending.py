"""Ending a process and what it started."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from manycard.launch import end_family
from tests.unit.launch.processes import Playground, wait_until

FAMILY = """
    import pathlib, signal, subprocess, sys, time
    def stop(*_):
        pathlib.Path("asked").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else stop)
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"])
    pathlib.Path("ready").touch()
    time.sleep(300)
"""


@pytest.mark.parametrize("kind", ["polite", "deaf"])
def test_a_family_ends_asked_first_and_killed_then(place: Playground, kind: str) -> None:
    with place.start(place.write("family.py", FAMILY), kind) as process:
        assert wait_until(lambda: Path("ready").exists() and len(place.left()) == 2, 80)
        end_family(process, patience=0.5)
    assert place.left() == []
    assert Path("asked").exists() == (kind == "polite")
    assert process.poll() is not None


def test_one_that_has_ended_takes_no_time(place: Playground) -> None:
    with place.start("-c", "pass") as process:
        process.wait()
        start = time.monotonic()
        end_family(process)
    assert time.monotonic() - start < 1
