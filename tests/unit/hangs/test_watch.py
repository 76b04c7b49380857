"""The watch of a process that is alone, looked at once, by hand."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from manycard.hangs import watch
from manycard.hangs.pulse import HangSettings, Pulse
from manycard.hangs.report import read_report
from manycard.hangs.verdict import Verdict


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """What the watch acts on."""
    verdicts: list[Verdict] = []
    monkeypatch.setattr(watch._Watcher, "_act", lambda self, verdict: verdicts.append(verdict))
    return verdicts


def silent_pulse() -> Pulse:
    """Of a process that has done work of the script's own for longer than its limit."""
    pulse = Pulse()
    for _ in range(4):
        pulse.stepped(pulse)
    pulse.ask_for(HangSettings(0.05))
    time.sleep(0.2)
    return pulse


def test_a_step_that_takes_too_long_is_found(found: list[Verdict]) -> None:
    pulse = silent_pulse()
    with pulse.busy("step"):
        time.sleep(0.2)
        watch._Watcher(pulse)._look()
    assert len(found) == 1


def test_work_of_the_scripts_own_may_take_as_long_as_it_likes(found: list[Verdict]) -> None:
    watch._Watcher(silent_pulse())._look()
    assert found == []


def test_what_begins_while_the_watch_looks_is_no_hang(found: list[Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work of the script's own, and a step that begins between two lines of the watch."""
    pulse, begun = silent_pulse(), ExitStack()

    def read_late(*given: object) -> object:
        begun.enter_context(pulse.busy("step"))
        return read_report(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(watch, "read_report", read_late)
    with begun:
        watch._Watcher(pulse)._look()
        assert pulse.activity == "step"
    assert found == []
