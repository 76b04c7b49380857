"""What cards this machine has, as NVML tells it, visible to CUDA or not.

Behaviour:
    * Nothing here starts CUDA or takes memory on a card.
    * Without a driver there are no cards, and `Machine.why_none` says why.
    * A query that one card doesn't support leaves that field None. A card whose handle can't be had (it fell
      off the bus) is left out and named in `Machine.lost`; the others are there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pynvml

from manycard.cards.host import Host, read_host
from manycard.cards.memory_size import MIB
from manycard.cards.nvml import Session, session
from manycard.cards.processes import CardProcess, look_up

__all__ = ["CardInfo", "Machine", "MigSlice", "inventory", "read_machine"]

_NO_INSTANCE = 0xFFFFFFFF
"""What NVML gives as a process's GPU instance outside MIG mode."""


@dataclass(frozen=True)
class MigSlice:
    """A part of a card in MIG mode, which CUDA shows as a device of its own."""

    uuid: str
    """``MIG-...``, as CUDA_VISIBLE_DEVICES takes it."""
    name: str
    """Such as ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``."""
    memory_total: int | None = None
    """Bytes."""
    memory_free: int | None = None
    """Bytes."""
    gpu_instance: int | None = None
    """The number of its GPU instance on the card."""
    compute_instance: int | None = None
    """The number of its compute instance within that."""


@dataclass(frozen=True)
class CardInfo:
    """What is known about a card of this machine; None is what could not be read."""

    index: int
    """NVML's (and nvidia-smi's) number, in the order of PCI bus ids. Not torch's."""
    name: str
    """The product name, such as ``NVIDIA H200``."""
    uuid: str
    """``GPU-...``; ``MIG-...`` for a slice."""
    pci_bus_id: str
    """Such as ``00000000:1B:00.0``; slices of one card share it."""
    memory_total: int | None = None
    """Bytes."""
    memory_free: int | None = None
    """Bytes."""
    utilisation: int | None = None
    """Percent of the last sample period in which a kernel ran."""
    processes: tuple[CardProcess, ...] | None = None
    """Who has memory on it."""
    temperature: int | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    """Watts."""
    mig: bool | None = None
    """Whether MIG mode is on, so that CUDA shows slices in place of the card."""
    slices: tuple[MigSlice, ...] = ()
    """Its MIG slices."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    cores: int | None = None
    """CUDA cores."""
    clock: int | None = None
    """Highest clock of its multiprocessors, MHz."""
    slice_of: str = ""
    """For a slice: the UUID of its card. Empty for a whole card."""

    def as_slice(self, part: MigSlice) -> CardInfo:
        """The slice as CUDA shows it: a device with its own UUID and memory on this card's bus id."""
        processes = self.processes
        if processes is not None:
            here = {None, part.gpu_instance}
            processes = tuple(process for process in processes if process.gpu_instance in here)
        return replace(
            self,
            name=part.name,
            uuid=part.uuid,
            memory_total=part.memory_total,
            memory_free=part.memory_free,
            utilisation=None,
            processes=processes,
            slices=(),
            cores=None,
            slice_of=self.uuid,
        )


@dataclass(frozen=True)
class Machine:
    """This machine's cards, driver and host."""

    cards: tuple[CardInfo, ...]
    """In NVML's order."""
    host: Host
    why_none: str = ""
    """Why there are no cards; empty when there are some."""
    driver: str | None = None
    """The NVIDIA driver's version."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA the driver supports."""
    lost: tuple[str, ...] = ()
    """Cards that the driver lists and can't open, with the reason."""


def inventory() -> list[CardInfo]:
    """List the cards of this machine, in NVML's order; empty where there is no driver.

    Example:
        >>> for card in inventory():
        ...     print(card.index, card.name, card.memory_free)
    """
    return list(read_machine().cards)


def read_machine(api: Any = pynvml) -> Machine:
    """Read the cards, the driver and the host.

    Args:
        api: NVML's functions; a test hands in its own.
    """
    host = read_host()
    with session(api) as nvml:
        if nvml.api is None:
            return Machine((), host, why_none=nvml.why_not)
        count = nvml.ask("nvmlDeviceGetCount") or 0
        cards: list[CardInfo] = []
        lost: list[str] = []
        for index in range(count):
            try:
                handle = nvml.api.nvmlDeviceGetHandleByIndex(index)
            except nvml.api.NVMLError as failure:
                lost.append(f"card {index}: {failure}")
                continue
            cards.append(_read_card(nvml, index, handle))
        why = "" if cards else "the NVIDIA driver runs and finds no card"
        cuda = nvml.ask("nvmlSystemGetCudaDriverVersion_v2")
        return Machine(
            tuple(cards),
            host,
            why_none=why,
            driver=nvml.ask("nvmlSystemGetDriverVersion"),
            driver_cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
            lost=tuple(lost),
        )


def _read_card(nvml: Session, index: int, handle: Any) -> CardInfo:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    use = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)  # [now, after the next reset]
    in_mig_mode = None if mode is None else mode[0] == nvml.api.NVML_DEVICE_MIG_ENABLE
    return CardInfo(
        index=index,
        name=nvml.ask("nvmlDeviceGetName", handle) or "unknown card",
        uuid=nvml.ask("nvmlDeviceGetUUID", handle) or "",
        pci_bus_id=pci.busId if pci is not None else "",
        memory_total=None if memory is None else int(memory.total),
        memory_free=None if memory is None else int(memory.free),
        utilisation=None if use is None else int(use.gpu),
        processes=_read_processes(nvml, handle),
        temperature=nvml.ask("nvmlDeviceGetTemperature", handle, nvml.api.NVML_TEMPERATURE_GPU),
        power=_watts(nvml.ask("nvmlDeviceGetPowerUsage", handle)),
        power_limit=_watts(nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
        mig=in_mig_mode,
        slices=_read_slices(nvml, handle) if in_mig_mode else (),
        capability=nvml.ask("nvmlDeviceGetCudaComputeCapability", handle),
        cores=nvml.ask("nvmlDeviceGetNumGpuCores", handle),
        clock=nvml.ask("nvmlDeviceGetMaxClockInfo", handle, nvml.api.NVML_CLOCK_SM),
    )


def _read_processes(nvml: Session, handle: Any) -> tuple[CardProcess, ...] | None:
    computing = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
    drawing = nvml.ask("nvmlDeviceGetGraphicsRunningProcesses", handle)
    if computing is None and drawing is None:
        return None
    found = {}
    for process, graphics in [(p, True) for p in drawing or ()] + [(p, False) for p in computing or ()]:
        instance = process.gpuInstanceId if process.gpuInstanceId != _NO_INSTANCE else None
        # One that draws and computes stands in both lists, and computes: the later entry counts.
        found[process.pid, instance] = look_up(
            process.pid, process.usedGpuMemory, graphics=graphics, gpu_instance=instance
        )
    return tuple(sorted(found.values(), key=lambda process: process.pid))


def _read_slices(nvml: Session, handle: Any) -> tuple[MigSlice, ...]:
    slices = []
    for number in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        uuid = None if part is None else nvml.ask("nvmlDeviceGetUUID", part)
        if uuid is None:  # an empty place: the numbers have gaps
            continue
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", part)
        attributes = nvml.ask("nvmlDeviceGetAttributes", part)
        total = int(memory.total) if memory is not None else None
        if total is None and attributes is not None:
            total = int(attributes.memorySizeMB) * MIB
        slices.append(
            MigSlice(
                uuid,
                name=nvml.ask("nvmlDeviceGetName", part) or "MIG slice",
                memory_total=total,
                memory_free=int(memory.free) if memory is not None else None,
                gpu_instance=nvml.ask("nvmlDeviceGetGpuInstanceId", part),
                compute_instance=nvml.ask("nvmlDeviceGetComputeInstanceId", part),
            )
        )
    return tuple(slices)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
