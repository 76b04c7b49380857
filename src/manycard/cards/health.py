"""A card's state of health, as NVML tells it: clocks and what holds them back, errors, settings, links.

Behaviour:
    * Nothing here starts CUDA or takes memory on a card.
    * What the card, the driver or the container doesn't answer is None or empty; nothing is raised.
    * Cards are numbered as NVML numbers them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from manycard.cards.nvml import Session, session

__all__ = ["CLOCK_REASONS", "CardHealth", "Ecc", "NvLinkState", "Pcie", "read_clock_reasons", "read_health"]

CLOCK_REASONS: Mapping[int, str] = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat (software)",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}
"""NVML's bits of what holds a card's clocks back -> words."""

_MOST_NVLINKS_ASKED = 18
_LINK_ERRORS = {0: "replays", 1: "recoveries", 2: "CRC errors of flits", 3: "CRC errors of data"}
"""NVML_NVLINK_ERROR_DL_... -> words."""
_FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True)
class Ecc:
    """Errors of a card's memory."""

    on: bool | None = None
    """Whether memory errors are corrected (ECC)."""
    pending: bool | None = None
    """What that will be after the next reset."""
    uncorrected: int | None = None
    """Errors since the driver was loaded that could not be corrected."""
    corrected: int | None = None
    """Errors since the driver was loaded that were corrected."""
    uncorrected_ever: int | None = None
    """Errors in the card's life that could not be corrected."""
    remap_pending: bool | None = None
    """Whether a memory row waits for the next reset to be replaced."""
    remap_failed: bool | None = None
    """Whether a row could not be replaced: there are no spare ones left."""
    rows_remapped: int | None = None
    """Rows replaced because of uncorrectable errors."""
    pages_retired: int | None = None
    """Pages taken out of use, on cards before Ampere."""
    retire_pending: bool | None = None
    """Whether a page waits for the next reset to be taken out of use."""


@dataclass(frozen=True)
class Pcie:
    """The PCIe link to the host; an idle card lowers its generation to save power."""

    generation: int | None = None
    width: int | None = None
    generation_max: int | None = None
    """What card and slot can do together."""
    width_max: int | None = None
    replays: int | None = None
    """Packets sent again because they arrived damaged, since the driver was loaded."""


@dataclass(frozen=True)
class NvLinkState:
    """One NVLink of a card."""

    number: int
    active: bool
    errors: Mapping[str, int] = field(default_factory=dict)
    """Kind of error -> how often, of those that occurred."""


@dataclass(frozen=True)
class CardHealth:
    """What is known of one card's state; None is what could not be read."""

    reasons: tuple[str, ...] | None = None
    """What holds the clocks back now, as in `CLOCK_REASONS`."""
    sm_clock: int | None = None
    """Clock of the multiprocessors now, MHz."""
    sm_clock_max: int | None = None
    """The highest it can be, MHz."""
    application_clock: int | None = None
    """What the clock was set to, MHz."""
    application_clock_default: int | None = None
    power_cap: float | None = None
    """The limit that is set, watts."""
    power_default: float | None = None
    """The limit it came with, watts."""
    temperature: int | None = None
    """Degrees Celsius."""
    slows_at: int | None = None
    """Degrees Celsius at which the card lowers its clocks."""
    ecc: Ecc = field(default_factory=Ecc)
    persistence: bool | None = None
    """Whether the driver stays loaded while nobody uses the card."""
    display: bool | None = None
    """Whether a screen is attached and shows something."""
    compute_mode: str | None = None
    """``default``, ``exclusive process`` or ``prohibited``."""
    mig_pending: bool | None = None
    """Whether MIG mode will be on after the next reset."""
    pcie: Pcie = field(default_factory=Pcie)
    nvlinks: tuple[NvLinkState, ...] = ()
    fabric: str | None = None
    """Where the card's joining of the NVSwitches stands: ``not started``, ``in progress`` or ``completed``."""
    fabric_status: int | None = None
    """NVML's status of that; 0 is success."""
    numa_node: int | None = None
    """The NUMA node of the host that the card hangs on."""


def read_health(api: Any = pynvml) -> dict[int, CardHealth]:
    """Read all cards' health; by NVML's number, empty where there is no driver.

    Args:
        api: NVML's functions; a test hands in its own.
    """
    with session(api) as nvml:
        count = nvml.ask("nvmlDeviceGetCount") or 0
        handles = {index: nvml.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)}
        return {index: _read_card(nvml, handle) for index, handle in handles.items() if handle is not None}


def read_clock_reasons(nvml: Session, handle: Any) -> tuple[str, ...] | None:
    """What holds a card's clocks back now; None where the driver doesn't say."""
    bits = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # drivers before R535 have it under its old name
        bits = nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else tuple(words for bit, words in CLOCK_REASONS.items() if bits & bit)


def _read_card(nvml: Session, handle: Any) -> CardHealth:
    api = nvml.api
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    fabric, fabric_status = _read_fabric(nvml, handle)
    return CardHealth(
        reasons=read_clock_reasons(nvml, handle),
        sm_clock=nvml.ask("nvmlDeviceGetClockInfo", handle, api.NVML_CLOCK_SM),
        sm_clock_max=nvml.ask("nvmlDeviceGetMaxClockInfo", handle, api.NVML_CLOCK_SM),
        application_clock=nvml.ask("nvmlDeviceGetApplicationsClock", handle, api.NVML_CLOCK_SM),
        application_clock_default=nvml.ask("nvmlDeviceGetDefaultApplicationsClock", handle, api.NVML_CLOCK_SM),
        power_cap=_watts(nvml.ask("nvmlDeviceGetPowerManagementLimit", handle)),
        power_default=_watts(nvml.ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        temperature=nvml.ask("nvmlDeviceGetTemperature", handle, api.NVML_TEMPERATURE_GPU),
        slows_at=nvml.ask("nvmlDeviceGetTemperatureThreshold", handle, api.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        ecc=_read_ecc(nvml, handle),
        persistence=_flag(nvml.ask("nvmlDeviceGetPersistenceMode", handle)),
        display=_flag(nvml.ask("nvmlDeviceGetDisplayActive", handle)),
        compute_mode=_COMPUTE_MODES.get(nvml.ask("nvmlDeviceGetComputeMode", handle)),
        mig_pending=None if mig is None else bool(mig[1]),
        pcie=Pcie(
            generation=nvml.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            width=nvml.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            generation_max=nvml.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            width_max=nvml.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            replays=nvml.ask("nvmlDeviceGetPcieReplayCounter", handle),
        ),
        nvlinks=_read_nvlinks(nvml, handle),
        fabric=fabric,
        fabric_status=fabric_status,
        numa_node=_read_node(nvml, handle),
    )


def _read_ecc(nvml: Session, handle: Any) -> Ecc:
    api = nvml.api
    mode = nvml.ask("nvmlDeviceGetEccMode", handle)  # [now, after the next reset]
    rows = nvml.ask("nvmlDeviceGetRemappedRows", handle)  # (corrected, uncorrected, pending, failed)
    pages = [
        nvml.ask("nvmlDeviceGetRetiredPages", handle, cause)
        for cause in (
            api.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
            api.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        )
    ]

    def errors(kind: int, since: int) -> int | None:
        answer: int | None = nvml.ask("nvmlDeviceGetTotalEccErrors", handle, kind, since)
        return answer

    return Ecc(
        on=None if mode is None else bool(mode[0]),
        pending=None if mode is None else bool(mode[1]),
        uncorrected=errors(api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_VOLATILE_ECC),
        corrected=errors(api.NVML_MEMORY_ERROR_TYPE_CORRECTED, api.NVML_VOLATILE_ECC),
        uncorrected_ever=errors(api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_AGGREGATE_ECC),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        rows_remapped=None if rows is None else int(rows[1]),
        pages_retired=None if all(page is None for page in pages) else sum(len(page or ()) for page in pages),
        retire_pending=_flag(nvml.ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
    )


def _read_nvlinks(nvml: Session, handle: Any) -> tuple[NvLinkState, ...]:
    links = []
    for number in range(_MOST_NVLINKS_ASKED):
        state = nvml.ask("nvmlDeviceGetNvLinkState", handle, number)
        if state is None:  # the card has no such link
            continue
        active = state == nvml.api.NVML_FEATURE_ENABLED
        counts = {
            words: nvml.ask("nvmlDeviceGetNvLinkErrorCounter", handle, number, counter)
            for counter, words in _LINK_ERRORS.items()
        }
        links.append(NvLinkState(number, active, {words: count for words, count in counts.items() if count}))
    return tuple(links)


def _read_fabric(nvml: Session, handle: Any) -> tuple[str | None, int | None]:
    kind = getattr(nvml.api, "c_nvmlGpuFabricInfo_t", None)  # older nvidia-ml-py don't have it
    if kind is None:
        return None, None
    info = kind()
    if nvml.ask("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
        return None, None
    state = _FABRIC_STATES.get(int(info.state))
    return state, int(info.status) if state else None


def _read_node(nvml: Session, handle: Any) -> int | None:
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
    if pci is None:
        return None
    bus = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
    try:
        # NVML writes eight digits of the domain, the kernel four.
        with open(f"/sys/bus/pci/devices/{bus[-12:].lower()}/numa_node", encoding="ascii") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware doesn't say


def _flag(answer: int | None) -> bool | None:
    return None if answer is None else bool(answer)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
