"""Every example runs and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_digits_learns_the_digits() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "digits.py"), "cpu:2"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"epoch \d+: loss ([\d.]+), test accuracy ([\d.]+)%", done.stdout)
    assert len(lines) == 12
    assert float(lines[-1][0]) < float(lines[0][0])
    assert float(lines[-1][1]) > 95


def test_pipeline_learns_and_shows_where_the_time_goes() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "pipeline.py"), "cpu:2"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]
    assert re.search(r"stage 1 on cpu:1: blocks\.\d.* to head", done.stdout)
    assert re.search(r"bubble [\d.]+ % \(stages of equal time: 11\.1 %\), balance 0\.\d+", done.stdout)
