"""What NVML tells of a card's state, and that nothing which it answers or doesn't ends in a traceback."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pynvml
import pytest

from manycard.cards import CardHealth, Ecc, read_health, read_machine
from manycard.cards.links import links
from tests.unit.cards.fake_nvml import FakeCard, FakeNvml

FIELDS = {
    "nvmlDeviceGetCurrentClocksEventReasons": 0x24,
    "nvmlDeviceGetClockInfo": 1200,
    "nvmlDeviceGetApplicationsClock": 1500,
    "nvmlDeviceGetDefaultApplicationsClock": 1980,
    "nvmlDeviceGetPowerManagementLimit": 350_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetTemperatureThreshold": 87,
    "nvmlDeviceGetEccMode": [1, 0],
    "nvmlDeviceGetTotalEccErrors": 3,
    "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
    "nvmlDeviceGetRetiredPagesPendingStatus": 0,
    "nvmlDeviceGetPersistenceMode": 0,
    "nvmlDeviceGetDisplayActive": 1,
    "nvmlDeviceGetComputeMode": 3,
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPcieReplayCounter": 12,
    "nvmlDeviceGetNvLinkErrorCounter": 7,
}


class Answering(FakeNvml):
    """The fake driver with answers from `FIELDS` as well."""

    def __getattr__(self, name: str):
        if name in FIELDS:
            return lambda *args: FIELDS[name]
        if name == "nvmlDeviceGetRetiredPages":
            return lambda handle, cause: [1, 2] if cause else []
        if name == "nvmlDeviceGetGpuFabricInfo":
            return _fabric
        return super().__getattr__(name)


def _fabric(handle: object, reference: object) -> int:
    info = ctypes.cast(reference, ctypes.POINTER(pynvml.c_nvmlGpuFabricInfo_t)).contents
    info.state, info.status = pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, 0
    return 0


def test_every_figure_is_read():
    card = FakeCard(nvlinks=dict.fromkeys(range(18), ("", 0)))
    health = read_health(Answering([card]))[0]
    assert health.reasons == ("power cap", "heat (software)")
    assert (health.sm_clock, health.sm_clock_max) == (1200, 1980)
    assert (health.application_clock, health.application_clock_default) == (1500, 1980)
    assert (health.power_cap, health.power_default) == (350.0, 700.0)
    assert health.slows_at == 87
    assert health.ecc == Ecc(True, False, 3, 3, 3, True, False, 2, 2, False)
    assert (health.persistence, health.display, health.compute_mode) == (False, True, "exclusive process")
    assert (health.pcie.generation, health.pcie.width, health.pcie.generation_max) == (1, 8, 5)
    assert health.pcie.replays == 12
    assert len(health.nvlinks) == 18
    assert health.nvlinks[0].active
    assert health.nvlinks[0].errors["replays"] == 7
    assert (health.fabric, health.fabric_status) == ("in progress", 0)


def test_an_old_driver_tells_reasons_under_their_old_name():
    nvml = FakeNvml([FakeCard()])
    old = SimpleNamespace(value=0x41)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: old.value
    assert read_health(nvml)[0].reasons == ("idle", "heat (hardware)")


def test_what_is_not_answered_is_none():
    assert read_health(FakeNvml([FakeCard()]))[0].ecc == Ecc()
    assert read_health(FakeNvml([FakeCard()]))[0].persistence is None


def test_without_a_driver_and_with_a_lost_card():
    assert read_health(FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)) == {}
    assert set(read_health(FakeNvml([FakeCard(broken=True), FakeCard()]))) == {1}


class Broken(FakeNvml):
    """A driver whose every question but the first ones ends in `error`."""

    error: Exception

    def __getattr__(self, name: str):
        if name.startswith("nvml") and name not in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):

            def fail(*args: object) -> None:
                raise self.error

            return fail
        return super().__getattr__(name)


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN),
        pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
        pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text"),
        OSError("library gone"),
        ctypes.ArgumentError("argument 1"),
        AttributeError("no such function"),
        ValueError("no such value"),
        TypeError("too few arguments"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_nvml_ends_no_reading(error: Exception):
    nvml = Broken([FakeCard(), FakeCard(uuid="GPU-2")])
    nvml.error = error
    assert read_health(nvml) == {0: CardHealth(), 1: CardHealth()}
    machine = read_machine(nvml)
    assert [info.name for info in machine.cards] == ["unknown card", "unknown card"]
    assert links(machine.cards, nvml).between(*machine.cards).kind == "unknown"
