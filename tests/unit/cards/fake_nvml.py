"""NVML for cards that aren't here: pynvml's own structures, errors and signatures, with answers from a table.

Every call is bound to the real function's signature first, so that a call which pynvml would refuse fails here
too. What a fake card has no answer for raises "not supported", as the driver does.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1024**3


@dataclass
class FakeCard:
    """A card, or with `slices` a card in MIG mode."""

    name: str = "NVIDIA H200"
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    bus: str = "00000000:01:00.0"
    total: int = 141 * GIB
    free: int = 140 * GIB
    processes: list[SimpleNamespace] = field(default_factory=list)
    drawing: list[SimpleNamespace] = field(default_factory=list)
    slices: list[FakeCard | None] | None = None
    instance: int = 0
    nvlinks: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Number of a link -> (bus id at its other end, kind of device there)."""
    unsupported: set[str] = field(default_factory=set)
    broken: bool = False


def on_card(pid: int, memory: int | None, instance: int = 0xFFFFFFFF) -> SimpleNamespace:
    """A process as pynvml gives it."""
    return SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=instance, computeInstanceId=instance)


class FakeNvml:
    """Stands in for the module pynvml."""

    def __init__(self, cards: list[FakeCard] | None = None, *, init_error: int | None = None) -> None:
        self.cards = cards or []
        self.init_error = init_error
        self.started = 0
        self.levels: dict[frozenset[str], int] = {}
        self.p2p: dict[tuple[frozenset[str], int], int] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not name.startswith("nvml"):
            return real
        answer = _ANSWERS.get(name)

        def call(*args: Any) -> Any:
            inspect.signature(real).bind(*args)
            if not self.started:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            card = args[0] if args and isinstance(args[0], FakeCard) else None
            if answer is None or (card is not None and name in card.unsupported):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer(self, *args)

        return call

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        assert self.started > 0, "shut down more often than started"
        self.started -= 1


def _handle(nvml: FakeNvml, index: int) -> FakeCard:
    if nvml.cards[index].broken:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    return nvml.cards[index]


def _memory(_: FakeNvml, card: FakeCard) -> Any:
    return pynvml.c_nvmlMemory_t(total=card.total, free=card.free, used=card.total - card.free)


def _pci(_: FakeNvml, card: FakeCard) -> Any:
    return pynvml.nvmlPciInfo_t(busId=card.bus.encode())


def _slice(_: FakeNvml, card: FakeCard, index: int) -> FakeCard:
    part = (card.slices or [])[index]
    if part is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return part


def _far_end(_: FakeNvml, card: FakeCard, link: int) -> Any:
    if not card.nvlinks[link][0]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return pynvml.nvmlPciInfo_t(busId=card.nvlinks[link][0].encode())


def _level(nvml: FakeNvml, one: FakeCard, other: FakeCard) -> int:
    try:
        return nvml.levels[frozenset({one.uuid, other.uuid})]
    except KeyError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None


def _p2p(nvml: FakeNvml, one: FakeCard, other: FakeCard, which: int) -> int:
    assert isinstance(which, int), "ctypes takes a whole number here"
    try:
        return nvml.p2p[frozenset({one.uuid, other.uuid}), which]
    except KeyError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None


def _fields(_: FakeNvml, card: FakeCard, asked: list[Any]) -> Any:
    values = (pynvml.c_nvmlFieldValue_t * len(asked))()
    for value, what in zip(values, asked, strict=True):
        if isinstance(what, tuple):  # as Hopper does: only a link's own speed is answered
            value.value.uiVal = 26_562
        else:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
    return values


_ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetCount": lambda nvml: len(nvml.cards),
    "nvmlDeviceGetHandleByIndex": _handle,
    "nvmlSystemGetDriverVersion": lambda _: "580.95.05",
    "nvmlSystemGetCudaDriverVersion_v2": lambda _: 13000,
    "nvmlDeviceGetName": lambda _, card: card.name,
    "nvmlDeviceGetUUID": lambda _, card: card.uuid,
    "nvmlDeviceGetPciInfo": _pci,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetUtilizationRates": lambda _, card: pynvml.c_nvmlUtilization_t(gpu=37, memory=5),
    "nvmlDeviceGetTemperature": lambda _, card, sensor: 41,
    "nvmlDeviceGetPowerUsage": lambda _, card: 117_250,
    "nvmlDeviceGetEnforcedPowerLimit": lambda _, card: 700_000,
    "nvmlDeviceGetMigMode": lambda _, card: [int(card.slices is not None)] * 2,
    "nvmlDeviceGetCudaComputeCapability": lambda _, card: (9, 0),
    "nvmlDeviceGetNumGpuCores": lambda _, card: 16_896,
    "nvmlDeviceGetMaxClockInfo": lambda _, card, clock: 1980,
    "nvmlDeviceGetComputeRunningProcesses": lambda _, card: card.processes,
    "nvmlDeviceGetGraphicsRunningProcesses": lambda _, card: card.drawing,
    "nvmlDeviceGetMaxMigDeviceCount": lambda _, card: len(card.slices or []),
    "nvmlDeviceGetMigDeviceHandleByIndex": _slice,
    "nvmlDeviceGetGpuInstanceId": lambda _, card: card.instance,
    "nvmlDeviceGetComputeInstanceId": lambda _, card: 0,
    "nvmlDeviceGetNvLinkState": lambda _, card, link: int(link in card.nvlinks),
    "nvmlDeviceGetNvLinkRemotePciInfo": _far_end,
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda _, card, link: card.nvlinks[link][1],
    "nvmlDeviceGetTopologyCommonAncestor": _level,
    "nvmlDeviceGetP2PStatus": _p2p,
    "nvmlDeviceGetFieldValues": _fields,
}
