"""Busy times and bubbles, from spans of known lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manycard.pipeline.schedule import bubble, find_schedule
from manycard.pipeline.timeline import Span, Timeline, laid_out


def equal_stages(schedule: str, stages: int, micro_batches: int, slow: int | None = None) -> Timeline:
    """Forward passes of 1 s and backward passes of 2 s; `slow` a stage of thrice that."""
    spans = []
    for stage in range(stages):
        for action in find_schedule(schedule)(stage, stages, micro_batches):
            length = (2.0 if action.backward else 1.0) * (3 if stage == slow else 1)
            spans.append(Span(f"cpu:{stage}", stage, action.backward, action.micro_batch, 0.0, length))
    cards = tuple(f"cpu:{stage}" for stage in range(stages))
    placed = tuple(laid_out(spans, stages))
    return Timeline(schedule, micro_batches, cards, cards, placed, (1,) * stages, (None,) * stages, True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (2, 8), (4, 4), (4, 16)])
def test_equal_stages_have_the_bubble_of_theory(schedule: str, stages: int, micro_batches: int) -> None:
    timeline = equal_stages(schedule, stages, micro_batches)
    assert timeline.bubble == pytest.approx(bubble(stages, micro_batches)) == timeline.expected_bubble
    assert timeline.seconds == pytest.approx(3 * (micro_batches + stages - 1))
    assert timeline.balance == pytest.approx(1)
    assert timeline.busy("cpu:0") == pytest.approx(3 * micro_batches)


def test_what_copies_and_launches_cost_is_apart_from_what_the_schedule_leaves() -> None:
    """Passes of equal stages that begin half a second late each time: the schedule itself is not to blame."""
    known = equal_stages("1f1b", 3, 6)
    late = tuple(
        replace(span, start=1.5 * span.start + 0.5, end=1.5 * span.start + 0.5 + span.end - span.start)
        for span in known.spans
    )
    timeline = replace(known, spans=late)
    assert timeline.bubble > timeline.expected_bubble + 0.1
    assert timeline.scheduled_bubble == pytest.approx(timeline.expected_bubble)


def test_replicas_are_laid_out_side_by_side() -> None:
    one = equal_stages("1f1b", 2, 4)
    other = tuple(replace(span, card=f"cpu:{span.stage + 2}") for span in one.spans)
    both = replace(one, spans=(*one.spans, *other), cards=("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
    assert both.bubble == pytest.approx(both.expected_bubble)
    assert both.scheduled_bubble == pytest.approx(both.expected_bubble)


def test_a_slow_stage_shows_in_balance_and_bubble() -> None:
    timeline = equal_stages("1f1b", 2, 8, slow=1)
    assert timeline.balance == pytest.approx(2 / 3)
    assert timeline.bubble > 0.33
    described = timeline.as_dict()
    assert described["busy_seconds"] == [24.0, 72.0]
    assert described["spans"][0]["micro_batch"] == 0
