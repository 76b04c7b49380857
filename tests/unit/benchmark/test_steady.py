"""Where warm-up ends: planted warm-ups of several kinds, noise, and series that never settle."""

from __future__ import annotations

import random

import pytest

from manycard.benchmark.steady import find_steady, quartiles


def noisy(level: float, number: int, noise: float = 0.02, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * (1 + draw.uniform(-noise, noise)) for _ in range(number)]


@pytest.mark.parametrize(
    ("warm_up", "length"),
    [
        ([900.0], 1),  # compilation
        ([30.0] * 8, 8),  # recording of graphs, eager before
        ([20.0, 18.0, 16.0, 14.0, 12.0], 5),  # caches that fill
        ([], 0),
    ],
    ids=["first", "plateau", "slope", "none"],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_planted_warm_up_is_cut_off(warm_up: list[float], length: int, seed: int) -> None:
    start = find_steady([*warm_up, *noisy(10.0, 30, seed=seed)])
    assert start is not None
    assert length - 1 <= start <= length + 10


def test_what_still_falls_is_not_steady() -> None:
    assert find_steady([100.0 / (1 + step) for step in range(20)]) is None
    assert find_steady([10.0] * 6 + [5.0] * 6) in (None, 6), "the level of the first half must not count as steady"


def test_one_stray_time_is_no_change_of_state() -> None:
    times = noisy(10.0, 40)
    times[25] = 400.0
    start = find_steady(times)
    assert start is not None
    assert start < 20


def test_too_few_times_tell_nothing() -> None:
    assert find_steady([10.0] * 3) is None
    assert find_steady([10.0] * 4) == 0


def test_quartiles_of_few_are_their_ends() -> None:
    assert quartiles([3.0, 1.0]) == (1.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 100.0]) == (2.0, 4.0)
