"""The process that measures: ``python -m manycard.diagnosis.measuring.worker REQUEST DESCRIPTOR``.

It alone touches the cards, so that a driver or an NCCL that hangs takes nothing else with it (`stages`). REQUEST is
a `Request` as JSON. Every figure is written as soon as it is known.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch

from manycard.cards import Card
from manycard.cards.health import read_clock_reasons
from manycard.cards.nvml import Session, session
from manycard.diagnosis.measuring.bits import compare_copies
from manycard.diagnosis.measuring.ranks import join_ranks
from manycard.diagnosis.measuring.request import Request
from manycard.diagnosis.measuring.timing import time_all_reduce, time_copies, time_host_copies, time_products, wait_for
from manycard.engine.replicas.collective import make_collective

__all__ = ["main"]

_ANSWER_LIMIT = 60.0
"""Seconds in which CUDA must have told of its cards; many of them after a restart take some."""
_RANKS_LIMIT = 60.0
"""Seconds in which ranks must have started, met and added up; the stage itself has longer, to say who is stuck."""


class _Reporter:
    """Writes stages and figures to the watcher's pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def stage(self, name: str, seconds: float) -> None:
        self._write({"stage": name, "seconds": seconds})

    def found(self, kind: str, **values: Any) -> None:
        self._write({"kind": kind, **values})

    def _write(self, record: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(record).encode() + b"\n")


def main(text: str, descriptor: int) -> None:
    """Measure what the request asks for."""
    request, report = Request.from_json(text), _Reporter(descriptor)
    devices = [torch.device(name) for name in request.devices]
    report.stage("asking CUDA for its cards", _ANSWER_LIMIT)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.get_device_properties(index)
    for device in dict.fromkeys(devices):
        report.stage(f"starting CUDA on {device}" if device.type == "cuda" else "starting", 90)
        torch.ones(2, device=device).sum().item()
    if "copies" in request.stages:
        for (source, one), (target, other) in permutations(zip(request.devices, devices, strict=True), 2):
            _measure_copies(report, request, (source, target), (one, other))
    with session() as nvml:
        handles = [nvml.ask("nvmlDeviceGetHandleByIndex", index) for index in request.nvml]
        if "host" in request.stages:
            for place, device in enumerate(devices):
                _measure_host(report, request, device, nvml, handles[place] if handles else None)
        if "load" in request.stages:
            _measure_load(report, request, devices, nvml, handles)
    if "nccl" in request.stages and len(devices) > 1:
        _measure_all_reduce(report, request, devices)
    if "ranks" in request.stages and len(devices) > 1:
        report.stage(f"joining {len(devices)} ranks over NCCL", 2 * _RANKS_LIMIT)
        report.found("ranks", count=len(devices), seconds=join_ranks(request.devices, _RANKS_LIMIT))


def _measure_copies(
    report: _Reporter, request: Request, names: tuple[str, str], devices: tuple[torch.device, torch.device]
) -> None:
    report.stage(f"copying from {names[0]} to {names[1]}", 90)
    wrong, compared = compare_copies(*devices, request.compared)
    speed, latency = time_copies(*devices, request.copy_size)
    peer = torch.cuda.can_device_access_peer(*devices) if devices[0].type == "cuda" else None
    report.found(
        "copy",
        source=names[0],
        target=names[1],
        gb_per_s=speed / 1e9,
        latency_us=latency * 1e6,
        wrong_bytes=wrong,
        compared_bytes=compared,
        peer=peer,
    )


def _measure_host(report: _Reporter, request: Request, device: torch.device, nvml: Session, handle: Any) -> None:
    report.stage(f"copying between the host and {device}", 60)
    link: dict[str, int | None] = {"generation": None, "width": None}

    def look() -> None:
        if handle is not None:
            time.sleep(0.005)  # until the link has woken up
            link["generation"] = nvml.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
            link["width"] = nvml.ask("nvmlDeviceGetCurrPcieLinkWidth", handle)

    to_card, from_card, pageable = time_host_copies(device, request.copy_size, look)
    report.found(
        "host",
        card=str(device),
        to_card=to_card / 1e9,
        from_card=from_card / 1e9,
        pageable_to_card=pageable / 1e9,
        **link,
    )


def _measure_load(
    report: _Reporter, request: Request, devices: Sequence[torch.device], nvml: Session, handles: Sequence[Any]
) -> None:
    report.stage("multiplying matrices on all cards at once", 60)
    seen: dict[int, dict[str, Any]] = {place: {"reasons": []} for place in range(len(devices))}

    def look() -> None:
        for place, handle in enumerate(handles):
            milliwatts = nvml.ask("nvmlDeviceGetPowerUsage", handle)
            seen[place] = {
                "reasons": list(read_clock_reasons(nvml, handle) or ()),
                "sm_clock": nvml.ask("nvmlDeviceGetClockInfo", handle, nvml.api.NVML_CLOCK_SM),
                "power": None if milliwatts is None else milliwatts / 1000,
                "temperature": nvml.ask("nvmlDeviceGetTemperature", handle, nvml.api.NVML_TEMPERATURE_GPU),
            }

    speeds = time_products(devices, request.matrix_side, request.load_seconds, look)
    for place, (name, speed) in enumerate(zip(request.devices, speeds, strict=True)):
        report.found("load", card=name, teraflops=speed / 1e12, **seen[place])


def _measure_all_reduce(report: _Reporter, request: Request, devices: Sequence[torch.device]) -> None:
    report.stage(f"starting NCCL on {', '.join(request.devices)}", 90)
    collective = make_collective([Card(place, device) for place, device in enumerate(devices)])
    tensors = [torch.ones(2, device=device) for device in devices]
    collective.all_reduce(tensors)
    wait_for(devices)
    for size in request.reduced:
        report.stage(f"an all-reduce of {size >> 10:,} KiB a card", 60)
        took = time_all_reduce(collective, devices, size)
        bus = 2 * (len(devices) - 1) / len(devices) * size / took.seconds
        report.found("all_reduce", size=size, us=took.seconds * 1e6, bus_gb_per_s=bus / 1e9, right=took.right)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
