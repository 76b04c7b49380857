"""The line that keeps something is found by name, in code of every usual form, and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from manycard.diagnosis.memory_use.lines import keeping_line

SCRIPT = """kept = []
kept.append("the first")

class Run:
    def step(self, x):
        self.cache[x] = x
        self.seen.add(x)
        self.log = x

def train(total):
    for x in range(3):
        kept.append(x)
        total += x
        other[x].append(x)
        mean = mean * 0.9 + x
        kept = sorted(x for x in other)
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kept", "train.py:12: kept.append(x)"),
        ("total", "train.py:13: total += x"),
        ("cache", "train.py:6: self.cache[x] = x"),
        ("seen", "train.py:7: self.seen.add(x)"),
        ("mean", "train.py:15: mean = mean * 0.9 + x"),
        ("log", ""),
        ("other", "train.py:14: other[x].append(x)"),
        ("nowhere", ""),
    ],
)
def test_the_line_that_adds_to_a_name(tmp_path: Path, name: str, line: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert keeping_line(str(script), name) == line


@pytest.mark.parametrize("text", [None, "def (", "x = '\0'"])
def test_source_that_can_not_be_read_has_no_line(tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert keeping_line(str(script), "x") == ""
