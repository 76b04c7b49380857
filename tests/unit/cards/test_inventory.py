"""What the inventory says of cards that are there, half there and not there."""

from __future__ import annotations

import os

import pynvml
import pytest

from manycard.cards.inventory import read_machine
from tests.unit.cards.fake_nvml import GIB, FakeCard, FakeNvml, on_card

# Every question about one card; the inventory must live without the answer to any of them.
QUESTIONS = {
    "nvmlDeviceGetMemoryInfo": ("memory_total", "memory_free"),
    "nvmlDeviceGetUtilizationRates": ("utilisation",),
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetPowerUsage": ("power",),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit",),
    "nvmlDeviceGetMigMode": ("mig",),
    "nvmlDeviceGetCudaComputeCapability": ("capability",),
    "nvmlDeviceGetNumGpuCores": ("cores",),
    "nvmlDeviceGetMaxClockInfo": ("clock",),
}


def test_a_card_is_read_whole():
    nvml = FakeNvml([FakeCard(uuid="GPU-1", bus="00000000:1B:00.0", processes=[on_card(os.getpid(), 3 * GIB)])])
    machine = read_machine(nvml)
    (card,) = machine.cards
    assert (card.index, card.name, card.uuid, card.pci_bus_id) == (0, "NVIDIA H200", "GPU-1", "00000000:1B:00.0")
    assert (card.memory_total, card.memory_free) == (141 * GIB, 140 * GIB)
    assert (card.utilisation, card.temperature, card.power, card.power_limit) == (37, 41, 117.25, 700.0)
    assert (card.mig, card.slices, card.capability) == (False, (), (9, 0))
    assert machine.driver == "580.95.05"
    assert machine.driver_cuda == (13, 0)
    assert machine.why_none == ""
    assert nvml.started == 0, "NVML was left running"


def test_a_process_gets_its_user_and_command():
    import psutil

    nvml = FakeNvml([FakeCard(processes=[on_card(os.getpid(), 3 * GIB)])])
    (process,) = read_machine(nvml).cards[0].processes or ()
    assert process.user == psutil.Process().username()
    assert "python" in (process.command or "") or "pytest" in (process.command or "")
    assert process.memory == 3 * GIB
    assert process.computes


def test_a_process_that_is_gone_or_elsewhere_keeps_its_pid():
    nvml = FakeNvml([FakeCard(processes=[on_card(2**22 + 7, None)])])  # above any pid that Linux gives
    (process,) = read_machine(nvml).cards[0].processes or ()
    assert (process.pid, process.user, process.command, process.memory) == (2**22 + 7, None, None, None)
    assert process.computes, "unknown memory must count as busy"


def test_a_desktop_does_not_compute_and_a_process_that_does_both_does():
    nvml = FakeNvml([FakeCard(drawing=[on_card(1, GIB), on_card(2**22 + 1, GIB)], processes=[on_card(1, GIB)])])
    first, second = read_machine(nvml).cards[0].processes or ()
    assert (first.pid, first.computes) == (1, True)
    assert (second.pid, second.computes) == (2**22 + 1, False)


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_unsupported_question_costs_its_own_fields_only(question: str):
    whole = read_machine(FakeNvml([FakeCard()])).cards[0]
    partial = read_machine(FakeNvml([FakeCard(unsupported={question})])).cards[0]
    for name, value in whole.__dict__.items():
        expected = None if name in QUESTIONS[question] else value
        assert getattr(partial, name) == expected, name


def test_a_card_that_answers_nothing_is_still_there():
    names = {name for name in dir(pynvml) if name.startswith("nvmlDeviceGet")}
    (card,) = read_machine(FakeNvml([FakeCard(unsupported=names)])).cards
    assert card.name == "unknown card"
    assert (card.memory_free, card.processes, card.mig) == (None, None, None)


def test_a_lost_card_leaves_the_others():
    nvml = FakeNvml([FakeCard(uuid="GPU-1"), FakeCard(broken=True), FakeCard(uuid="GPU-3")])
    machine = read_machine(nvml)
    assert [(card.index, card.uuid) for card in machine.cards] == [(0, "GPU-1"), (2, "GPU-3")]
    assert machine.lost == ("card 1: GPU is lost",)
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "not restarted"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
    ],
)
def test_without_a_driver_there_are_no_cards_and_a_reason(code: int, words: str):
    machine = read_machine(FakeNvml([FakeCard()], init_error=code))
    assert machine.cards == ()
    assert words in machine.why_none
    assert machine.host.cores >= 1


def test_a_driver_without_cards_says_so():
    machine = read_machine(FakeNvml([]))
    assert machine.cards == ()
    assert "finds no card" in machine.why_none
    assert machine.driver == "580.95.05"


def test_slices_of_a_card_in_mig_mode():
    part = FakeCard(name="NVIDIA A100 MIG 1g.10gb", uuid="MIG-5", total=10 * GIB, free=9 * GIB, instance=7)
    whole = FakeCard(
        uuid="GPU-1", slices=[None, part], processes=[on_card(1, GIB, instance=7), on_card(2**22 + 1, GIB, instance=8)]
    )
    (card,) = read_machine(FakeNvml([whole])).cards
    assert card.mig is True
    (found,) = card.slices
    assert (found.uuid, found.memory_total, found.memory_free, found.gpu_instance) == ("MIG-5", 10 * GIB, 9 * GIB, 7)
    shown = card.as_slice(found)
    assert (shown.uuid, shown.slice_of, shown.pci_bus_id) == ("MIG-5", "GPU-1", card.pci_bus_id)
    assert shown.memory_free == 9 * GIB
    assert [process.pid for process in shown.processes or ()] == [1], "another slice's process is none of its own"


def test_nvml_is_shut_down_when_reading_fails():
    class Crash(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise RuntimeError("a fault of our own")

    nvml = Crash([FakeCard()])
    with pytest.raises(RuntimeError, match="of our own"):
        read_machine(nvml)
    assert nvml.started == 0
