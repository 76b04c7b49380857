"""What forward changes outside its module is seen, and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manycard.script.comparison.outside import Outside

count = 0
seen: list[int] = []
notes: dict[str, Any] = {"by": [1]}


class Log:
    """An object that a global holds."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total = 0.0


log = Log()


class Counts(nn.Module):
    """Changes everything that it can reach."""

    calls = 0

    def forward(self, x: Any) -> Any:
        global count, fresh
        count += 1
        fresh = count
        Counts.calls += 1
        seen.append(len(x))
        notes["by"].append(len(x))
        log.lines.append("called")
        log.total += 1.5
        return x


def test_changes_are_named_and_put_back() -> None:
    global count
    outside = Outside(Counts())
    before = outside.look()
    assert Outside.difference(before, outside.look()) == ""
    Counts()(torch.ones(3))
    once = outside.look()
    assert Outside.difference(before, once) != ""
    changed = {name for name in once if Outside.difference({name: before.get(name)}, {name: once[name]})}
    assert changed == {"Counts.calls", "count", "fresh", "seen", "notes", "log"}
    outside.restore()
    assert Outside.difference(before, outside.look()) == ""
    assert (count, Counts.calls, seen, notes, log.lines, log.total) == (0, 0, [], {"by": [1]}, [], 0.0)
    assert "fresh" not in globals()


def test_what_others_hold_stays_the_same_object() -> None:
    held = seen
    outside = Outside(Counts())
    Counts()(torch.ones(3))
    outside.restore()
    assert seen is held


def test_libraries_are_left_alone() -> None:
    assert Outside(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).look() == {}
