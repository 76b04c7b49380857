"""Every example runs and does what it says."""

from __future__ import annotations

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
