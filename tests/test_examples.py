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
