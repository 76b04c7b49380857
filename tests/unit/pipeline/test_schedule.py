"""The order of passes on each stage."""

from __future__ import annotations

import pytest

from manycard.errors import SettingError
from manycard.pipeline.schedule import Action, bubble, find_schedule, in_flight


def written(name: str, stage: int, stages: int, micro_batches: int) -> str:
    return " ".join(str(action) for action in find_schedule(name)(stage, stages, micro_batches))


def test_the_orders() -> None:
    assert written("gpipe", 1, 3, 3) == "F0 F1 F2 B0 B1 B2"
    assert written("1f1b", 0, 3, 5) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert written("1f1b", 1, 3, 5) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert written("1f1b", 2, 3, 5) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert written("1f1b", 0, 4, 2) == "F0 F1 B0 B1"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_every_micro_batch_goes_once_each_way_and_nothing_waits_for_ever(
    name: str, stages: int, micro_batches: int
) -> None:
    orders = [find_schedule(name)(stage, stages, micro_batches) for stage in range(stages)]
    for stage, order in enumerate(orders):
        assert sorted(order, key=str) == sorted(
            [Action(way, number) for way in (False, True) for number in range(micro_batches)], key=str
        )
        assert in_flight(order) == (micro_batches if name == "gpipe" else min(micro_batches, stages - stage))
    done: set[tuple[int, Action]] = set()
    left = [list(order) for order in orders]
    while any(left):
        ready = [stage for stage, order in enumerate(left) if order and _may_run(stage, order[0], stages, done)]
        assert ready, f"stuck before {[order[:1] for order in left]}"
        for stage in ready:
            done.add((stage, left[stage].pop(0)))


def _may_run(stage: int, action: Action, stages: int, done: set[tuple[int, Action]]) -> bool:
    if not action.backward:
        return stage == 0 or (stage - 1, action) in done
    if stage == stages - 1:
        return (stage, Action(False, action.micro_batch)) in done
    return (stage + 1, action) in done


def test_the_bubble_is_that_of_equal_stages() -> None:
    assert bubble(1, 4) == 0
    assert bubble(4, 1) == 0.75
    assert bubble(2, 8) == pytest.approx(1 / 9)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(SettingError, match=r"schedule='zigzag'.*choose one of gpipe, 1f1b"):
        find_schedule("zigzag")
