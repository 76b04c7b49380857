"""Limits that follow the measured step, and causes from reports of ranks that were made up."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from manycard.engine.driving.threads import CardThreads
from manycard.errors import SettingError
from manycard.hangs.collectives import Collective
from manycard.hangs.pulse import AUTO, SLACK, HangSettings, Pulse, hang_settings
from manycard.hangs.report import ProcessReport
from manycard.hangs.stacks import Frame, ThreadStack
from manycard.hangs.verdict import judge


def report(
    rank: int, *frames: tuple[str, str], collective: Collective | None = None, debugged: bool = False
) -> ProcessReport:
    made = tuple(Frame(file, line, function, "") for line, (file, function) in enumerate(frames, start=10))
    return ProcessReport(f"rank {rank}", 7, "", 400.0, debugged, (ThreadStack("MainThread", True, made),), collective)


SCRIPT = ("/home/me/train.py", "main")
REDUCE = ("/lib/torch/distributed/distributed_c10d.py", "all_reduce")
START = ("/lib/torch/distributed/distributed_c10d.py", "init_process_group")
LOADER = ("/lib/torch/utils/data/dataloader.py", "__next__")


def cause(*reports: ProcessReport, **more: list[str]) -> str:
    found = judge(reports, 400, 300, **more)
    return found.cause if found is not None else ""


def test_a_rank_that_never_came() -> None:
    text = cause(report(0, SCRIPT, REDUCE), report(1, SCRIPT, ("/home/me/train.py", "log")))
    assert text.startswith(
        "rank 1 never came to the collective that rank 0 waits in: it is at /home/me/train.py:11 in log"
    )
    assert "it waits for its loader" in cause(report(0, SCRIPT, REDUCE), report(1, SCRIPT, LOADER))


def test_a_rank_that_has_ended() -> None:
    assert "rank 0 waits for rank 1, whose script has ended" in cause(report(0, SCRIPT, REDUCE), ended=["rank 1"])


def test_a_rank_that_has_not_started() -> None:
    assert "never came to init_process_group" in cause(report(0, SCRIPT, START), report(1, SCRIPT))
    assert "can't find one another" in cause(report(0, SCRIPT, START), report(1, SCRIPT, START))


def test_different_collectives_and_the_same_one() -> None:
    one = Collective(8, "all_reduce", "4 float numbers", False)
    reports = [report(rank, SCRIPT, REDUCE, collective=one) for rank in range(2)]
    assert "the connection between the cards gives no answer" in cause(*reports)
    reports[1] = replace(reports[1], collective=replace(one, number=7, name="broadcast"))
    assert "rank 1 in broadcast number 7" in cause(*reports)


def test_a_rank_that_gives_no_answer() -> None:
    assert "for rank 1, which is busy outside Python" in cause(report(0, SCRIPT, REDUCE), mute=["rank 1"])


def test_ranks_that_wait_in_different_places() -> None:
    text = cause(report(0, SCRIPT, REDUCE), report(1, SCRIPT, ("/home/me/train.py", "log"), REDUCE))
    assert text.startswith("ranks wait for one another in different places: rank 0 at ")


def alone(*frames: tuple[str, str]) -> ProcessReport:
    return replace(report(0, *frames), place="", activity="step")


def test_one_process_whose_cards_do_not_answer() -> None:
    waits = ("/lib/manycard/engine/driving/threads.py", "run")
    assert cause(alone(SCRIPT, waits), late=["cuda:1"]).startswith("cuda:1 has not finished what the last step gave")
    text = cause(alone(SCRIPT))
    assert text.startswith("the step has not ended: it is at /home/me/train.py:10 in main")
    assert cause(replace(alone(SCRIPT), activity="")) == "", "the script's own code may take as long as it likes"


def test_what_the_threads_of_cards_wait_for_is_read_from_files_that_there_are() -> None:
    """The words for their states go by the path of the module that drives them."""
    file = inspect.getsourcefile(CardThreads)
    assert file is not None
    states = {"meet": "in a layer that needs all cards", "begin": "for its turn", "wait": "for another stage"}
    for function, words in states.items():
        job = ThreadStack("manycard-cuda:1", False, (Frame(file, 1, "_run_job", ""), Frame(file, 2, function, "")))
        process = alone(SCRIPT, (file, "_wait"))
        assert process.waits_for == "cards"
        assert f"waits {words}" in "".join(judge([replace(process, threads=(*process.threads, job))], 400, 300).text)  # type: ignore[union-attr]


def test_nobody_waits_or_somebody_debugs() -> None:
    assert judge([report(0, SCRIPT), report(1, SCRIPT)], 400, 300) is None
    assert judge([report(0, SCRIPT, REDUCE), report(1, SCRIPT, debugged=True)], 400, 300) is None


def test_limits_follow_the_measured_step() -> None:
    auto = HangSettings()
    assert auto.limit([0.1] * 9, 9, "step") == AUTO
    assert auto.limit([0.1, 60.0], 9, "step") == 20 * 60
    assert auto.limit([], 0, "step") == SLACK * AUTO
    assert auto.limit([0.1], 9, "evaluation") == auto.limit([0.1], 9, "checkpoint") == SLACK * AUTO
    assert HangSettings(10.0).limit([1.0], 9, "step") == 10
    assert HangSettings(10.0).limit([8.0], 9, "step") == 24
    assert hang_settings("off").limit([1.0], 9, "step") == float("inf")


def test_what_is_told_of_progress() -> None:
    pulse = Pulse()
    with pulse.busy("evaluation"):
        assert [pulse.activity for _ in pulse.each("loader", range(2))] == ["evaluation"] * 2
        assert pulse.silent < 1
    assert pulse.activity == ""
    for _ in range(3):
        pulse.beat()
    assert pulse.steps == 3
    assert 0 < pulse.step_seconds < 1


@pytest.mark.parametrize("value", ["soon", 0, -1, True, "nan", None])
def test_wrong_settings(value: object) -> None:
    with pytest.raises(SettingError, match=r"hang_timeout=.*give seconds"):
        hang_settings(value)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="choose one of end, raise, say"):
        hang_settings(5, "stop")
