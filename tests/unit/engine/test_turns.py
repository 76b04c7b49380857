"""Which way of running forward passes is kept, on recorded times; and what taking turns means for real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from manycard.cards.card import Card
from manycard.engine.random import CardGenerators
from manycard.engine.threads import CardThreads, current_place
from manycard.engine.turns import Turns

REAL = tuple(Card(place, torch.device("cuda", place), "NVIDIA H200") for place in range(3))
SIMULATED = tuple(Card(place, torch.device("cpu")) for place in range(2))


def ways(turns: Turns, seconds: Callable[[bool, int], float], passes: int) -> list[bool]:
    """The way of each pass, where each takes `seconds` by recorded time."""
    found = []
    for number in range(passes):
        with turns.timed() as in_turn:
            found.append(in_turn)
            time_taken = seconds(in_turn, number)
            clock.now += time_taken
    return found


class Clock:
    now = 0.0


clock = Clock()


@pytest.fixture(autouse=True)
def recorded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)


def test_the_quicker_way_is_kept() -> None:
    assert ways(Turns(REAL), lambda in_turn, _: 1.0 if in_turn else 2.0, 100)[-80:] == [True] * 80
    assert ways(Turns(REAL), lambda in_turn, _: 2.0 if in_turn else 1.0, 100)[-80:] == [False] * 80


def test_a_difference_within_noise_changes_nothing() -> None:
    assert not any(ways(Turns(REAL), lambda in_turn, _: 0.99 if in_turn else 1.0, 100)[-80:])


def test_slow_first_passes_and_single_slow_ones_do_not_count() -> None:
    def seconds(in_turn: bool, number: int) -> float:
        return 50.0 if number < 6 or number == 7 else 1.0 if in_turn else 2.0

    assert all(ways(Turns(REAL), seconds, 100)[-80:])


def test_it_is_tried_again_later() -> None:
    def seconds(in_turn: bool, number: int) -> float:
        quicker = in_turn if number < 300 else not in_turn
        return 1.0 if quicker else 2.0

    found = ways(Turns(REAL), seconds, 700)
    assert all(found[100:300])
    assert not any(found[-50:])


@pytest.mark.parametrize("cards", [REAL[:1], SIMULATED])
def test_there_is_nothing_to_choose(cards: tuple[Card, ...]) -> None:
    assert not any(ways(Turns(cards), lambda in_turn, _: 1.0, 100))


class Threads(CardThreads):
    """Threads for cards that take turns only if asked, as those of real cards do."""

    def __init__(self, cards: int) -> None:
        simulated = tuple(Card(place, torch.device("cpu")) for place in range(cards))
        super().__init__(simulated, CardGenerators(simulated))
        self._simulated = False


def test_in_turn_each_begins_when_the_one_before_lets_go() -> None:
    events: list[tuple[str, int]] = []
    gone = threading.Event()

    def job(position: int) -> None:
        events.append(("forward", position))
        place = current_place()
        assert place is not None
        place.let_go()
        if position == 2:
            gone.set()
        assert gone.wait(20), "the cards after this one run beside it"

    threads = Threads(3)
    threads.run([lambda position=position: job(position) for position in range(3)], in_turn=True)  # type: ignore[misc]
    threads.close()
    assert events == [("forward", 0), ("forward", 1), ("forward", 2)]


def test_cards_meet_before_and_after_they_let_go() -> None:
    def job(position: int) -> list[list[int]]:
        place = current_place()
        assert place is not None
        first = place.meet(position)
        place.let_go()
        return [first, place.meet(10 * position)]

    threads = Threads(3)
    for _ in range(3):
        found = threads.run([lambda position=position: job(position) for position in range(3)], in_turn=True)  # type: ignore[misc]
        assert found == [[[0, 1, 2], [0, 10, 20]]] * 3
    threads.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_in_turn_ends_the_others_wait(failing: int) -> None:
    def job(position: int) -> None:
        if position == failing:
            raise ValueError("broken")
        place = current_place()
        assert place is not None
        place.let_go()
        place.meet(position)

    threads = Threads(3)
    with pytest.raises(ValueError, match="broken"):
        threads.run([lambda position=position: job(position) for position in range(3)], in_turn=True)  # type: ignore[misc]
    assert threads.run([lambda: 1, lambda: 2, None]) == [1, 2, None]
    threads.close()
