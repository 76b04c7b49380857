"""The meter times what was planted: slow first steps are cut off, pauses left out, energy and ends as they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from manycard.benchmark.gauges import peak_memory_mib, reserved_memory_mib, reset_peak_memory
from manycard.benchmark.meter import Block, Goal, StepMeter, figures_of
from manycard.strategies.peers import Peers

CPU = [torch.device("cpu"), torch.device("cpu")]


def run(meter: StepMeter, seconds: Sequence[float], samples: int = 8) -> int:
    """Steps that take `seconds`, the last of them without end; how many there were until the meter was done."""
    for number in range(1000):
        time.sleep(seconds[min(number, len(seconds) - 1)])
        if meter.step(samples):
            return number + 1
    raise AssertionError("the meter is never done")


def made(goal: Goal) -> StepMeter:
    return StepMeter(CPU, Peers(), goal, time.time())


def test_slow_first_steps_are_cut_off_and_the_rest_is_timed() -> None:
    meter = made(Goal(steps=20, seconds=0.2))
    steps = run(meter, [0.1, *[0.04] * 4, 0.01])
    figures = meter.figures()
    assert figures is not None
    assert figures.steady
    assert figures.warm_up_steps >= 5
    assert figures.warm_up_steps + figures.steps == steps
    assert figures.steps >= 20
    assert figures.step_ms == pytest.approx(10.3, rel=0.15)
    assert figures.samples_per_s == pytest.approx(8e3 / figures.step_ms, rel=0.02)
    assert figures.quartiles[0] <= figures.samples_per_s <= figures.quartiles[1]
    assert figures.first_step_s >= 0.1


def test_the_steps_asked_for_are_enough() -> None:
    meter = made(Goal(steps=5, seconds=0.0))
    assert 6 <= run(meter, [0.002]) <= 40


def test_impatience_gives_what_there_is_and_says_so() -> None:
    meter = made(Goal(steps=10_000, patience=0.2))
    run(meter, [0.01])
    figures = meter.figures()
    assert figures is not None
    assert figures.steps < 10_000
    falling = figures_of([Block(1, 8, 1.0 / (1 + place)) for place in range(10)], 1.0)
    assert not falling.steady


def test_what_happens_in_a_pause_is_not_timed() -> None:
    meter = made(Goal(steps=1000, seconds=9.0))
    for _ in range(4):
        for _ in range(5):
            meter.resume()
            time.sleep(0.005)
            meter.step(8)
        meter.pause()
        time.sleep(0.1)
    figures = meter.figures()
    assert figures is not None
    assert sum(block.seconds for block in meter.blocks) < 0.2
    assert figures.step_ms == pytest.approx(5.2, rel=0.25)


def test_a_step_that_began_in_a_pause_is_not_timed() -> None:
    meter = made(Goal(steps=1000, seconds=9.0))
    for _ in range(3):
        time.sleep(0.02)
        meter.step(8)
        meter.pause()
    assert all(block.seconds > 0.01 for block in meter.blocks)


def test_a_single_step_gives_no_figures() -> None:
    meter = made(Goal())
    meter.step(8)
    assert meter.figures() is None


def test_energy_and_memory_are_those_of_the_steady_blocks() -> None:
    warm = Block(1, 8, 5.0, joules=1e6, peaks=(900.0, 900.0), reserved=(2000.0, 2000.0))
    steady = [
        Block(10, 80, 0.25, joules=40.0, peaks=(100.0, 50.0 + place), reserved=(300.0, 300.0)) for place in range(8)
    ]
    figures = figures_of([warm, *steady], 3.0)
    assert figures.joules_per_sample == 0.5
    assert figures.peaks == (100.0, 57.0)
    assert figures.reserved == (300.0, 300.0)
    assert (figures.warm_up_steps, figures.steps, figures.samples_per_s) == (2, 80, 320.0)
    unknown = figures_of([*steady, replace(steady[0], joules=None)], 3.0)
    assert unknown.joules_per_sample is None


class Ranks(Peers):
    """Two ranks: this one is rank 1, and rank 0 has decided."""

    def gather_objects(self, value: object) -> list[object]:
        if isinstance(value, int):
            return [0, value]  # rank 0 has seen enough
        return [value, value]


def test_rank_0_decides_for_all() -> None:
    meter = StepMeter(CPU[:1], Ranks(), Goal(steps=1000), time.time())
    assert not meter.step(4) or meter.steps_done == 1
    assert meter.step(4)


def test_a_simulated_card_has_no_memory_of_its_own() -> None:
    reset_peak_memory(CPU)
    assert peak_memory_mib(CPU) == reserved_memory_mib(CPU) == [None, None]
