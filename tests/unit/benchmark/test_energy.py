"""Energy from NVML's counter, or from power where there is none."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from manycard.benchmark.energy import EnergyMeter
from manycard.cards import Card

CARDS = [Card(place, torch.device("cuda", place), "NVIDIA H200", f"GPU-{place}") for place in range(2)]


class Nvml:
    """Two cards that draw 100 and 300 W; with `counts`, they count their energy."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *, counts: bool, driver: bool = True) -> None:
        self.counts, self.driver, self.open = counts, driver, 0
        self.millijoules = {"GPU-0": 5_000.0, "GPU-1": 7_000.0}

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        return SimpleNamespace(uuid=uuid)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> float:  # noqa: N802
        if not self.counts:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.millijoules[handle.uuid]

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> float:  # noqa: N802
        return {"GPU-0": 100_000.0, "GPU-1": 300_000.0}[handle.uuid]


def test_counters_of_all_cards_are_added_up() -> None:
    api = Nvml(counts=True)
    with EnergyMeter(CARDS, api) as meter:
        assert meter.joules() == 12.0
        api.millijoules["GPU-1"] += 3_500
        assert meter.joules() == 15.5
    assert api.open == 0


def test_power_is_added_up_where_nothing_counts() -> None:
    api = Nvml(counts=False)
    with EnergyMeter(CARDS, api) as meter:
        begin, before = time.perf_counter(), meter.joules()
        time.sleep(0.55)
        after, seconds = meter.joules(), time.perf_counter() - begin
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(400 * seconds, rel=0.3)
    assert api.open == 0


@pytest.mark.parametrize(
    ("cards", "api"),
    [
        (CARDS, Nvml(counts=True, driver=False)),
        ([Card(0, torch.device("cpu"))], Nvml(counts=True)),
        ([Card(0, torch.device("cuda", 0), "slice", "MIG-1")], Nvml(counts=True)),
        ([], Nvml(counts=True)),
    ],
    ids=["no driver", "simulated", "MIG", "no cards"],
)
def test_where_nothing_tells_there_is_none(cards: list[Card], api: Nvml) -> None:
    with EnergyMeter(cards, api) as meter:
        assert meter.joules() is None
    assert api.open == 0
