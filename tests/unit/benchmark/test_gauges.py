"""The clock counts what runs between its two ends, and waits for the ranks before it starts."""

from __future__ import annotations

import time

import pytest
import torch

from manycard.benchmark.gauges import StepClock, peak_memory_mib, reset_peak_memory

CPU = [torch.device("cpu"), torch.device("cpu")]


def test_the_warm_up_is_not_counted() -> None:
    waited = []
    clock = StepClock(CPU, lambda: waited.append(time.perf_counter()))
    clock.count(1000)
    time.sleep(0.05)
    clock.start()
    for samples in (4, 4, 2):
        time.sleep(0.01)
        clock.count(samples)
    clock.stop()
    assert (clock.steps, clock.samples, len(waited)) == (3, 10, 1)
    assert clock.seconds >= 0.03
    assert clock.seconds <= time.perf_counter() - waited[0]
    assert clock.step_ms == pytest.approx(clock.seconds / 3 * 1e3)
    assert clock.samples_per_s == pytest.approx(10 / clock.seconds)


def test_a_simulated_card_has_no_memory_of_its_own() -> None:
    reset_peak_memory(CPU)
    assert peak_memory_mib(CPU) == [None, None]
