"""A process that is interrupted in the middle of a step ends as any script that is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kind", ["dp", "pipeline"])
def test_ctrl_c_in_a_step_ends_the_process_without_aborting_it(kind: str) -> None:
    done = interrupted(kind, presses=1)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.returncode == -signal.SIGINT


def test_whoever_presses_ctrl_c_again_does_not_wait_for_the_cards() -> None:
    assert interrupted("dp", presses=3).returncode == 130


def interrupted(kind: str, presses: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(Path(__file__).parent / "interrupted.py"), kind, str(presses)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert "terminate called" not in done.stderr
    return done
