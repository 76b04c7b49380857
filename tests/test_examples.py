"""Every example runs and does what it says."""

from __future__ import annotations

import json
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


def test_length_buckets_saves_padding_and_trains_the_same() -> None:
    command = [sys.executable, str(EXAMPLES / "length_buckets.py"), "--cards", "cpu:3", "--batches", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cards"] == 3
    assert found["places_saved"] > 0.4
    assert found["largest_loss_difference"] < 1e-5
    assert found["losses"][1] < found["losses"][0]


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
