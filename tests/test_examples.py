"""Every example runs and does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
PATTERNS = EXAMPLES / "patterns"
PYTHON = (sys.executable,)
CARDS = "all" if torch.cuda.is_available() else "cpu:2"
IN_RANKS = (sys.executable, "-m", "manycard.cli", "run", "--strategy", "ddp", "--cards", CARDS)
"""Not torchrun: with gloo, PyTorch now and then aborts when a rank's interpreter is taken down."""


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


def pattern_lines(name: str, start: tuple[str, ...] = PYTHON) -> list[tuple[float, float]]:
    """The loss and the accuracy of each epoch of a pattern."""
    words = [*start, str(PATTERNS / f"{name}.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"epoch \d+: loss ([\d.]+), test accuracy ([\d.]+)%, [\d,]+ images/s", done.stdout)
    return [(float(loss), float(accuracy)) for loss, accuracy in lines]


@pytest.mark.parametrize(
    ("name", "start"),
    [("ddp", IN_RANKS), ("with_manycard", PYTHON)],
    ids=["ddp", "with_manycard"],
)
def test_each_pattern_learns_and_prints_one_line_an_epoch(name: str, start: tuple[str, ...]) -> None:
    found = pattern_lines(name, start)
    assert len(found) == 8, "ranks must not print each for itself"
    assert found[-1][0] < found[0][0]
    assert found[-1][1] > 93


def test_patterns_that_read_the_same_order_print_the_same_losses() -> None:
    """By hand, the drop-in and nn.DataParallel are one card's training."""
    losses, accuracies = zip(*pattern_lines("one_card"), strict=True)
    assert accuracies[-1] > 93
    for name in ("data_parallel", "by_hand", "drop_in"):
        own_losses, own_accuracies = zip(*pattern_lines(name), strict=True)
        assert own_losses == pytest.approx(losses, abs=2e-3), name
        assert own_accuracies == pytest.approx(accuracies, abs=1), name
