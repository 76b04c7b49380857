"""How fast cards copy, compute and add up. Wall-clock times around work that is awaited; medians of several rounds.

Works on simulated cards too, where the figures say nothing and the tests see that the work is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manycard.engine.replicas.collective import Collective

__all__ = [
    "AllReduceTime",
    "time_all_reduce",
    "time_call",
    "time_copies",
    "time_host_copies",
    "time_products",
    "wait_for",
]

_ROUNDS = 5


@dataclass(frozen=True)
class AllReduceTime:
    """One size of all-reduce."""

    seconds: float
    right: bool
    """Whether every card had the true sum."""


def wait_for(devices: Sequence[torch.device]) -> None:
    """Wait until everything given to the cards is done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def time_call(
    work: Callable[[], object], devices: Sequence[torch.device], repeats: int, rounds: int = _ROUNDS
) -> float:
    """Seconds of one call of `work`, the median over rounds of `repeats` calls that are awaited together."""
    work()
    wait_for(devices)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait_for(devices)
        seconds.append((time.perf_counter() - start) / repeats)
    return statistics.median(seconds)


def time_copies(source: torch.device, target: torch.device, size: int) -> tuple[float, float]:
    """Bandwidth of copies of `size` bytes, bytes a second, and seconds of a copy of 4 bytes that is awaited."""
    both = [source, target]
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for device in both)
    seconds = time_call(lambda: received.copy_(sent, non_blocking=True), both, 4)
    small = torch.zeros(1, device=source), torch.zeros(1, device=target)

    def copy_and_wait() -> None:
        small[1].copy_(small[0], non_blocking=True)
        wait_for(both)

    return size / seconds, time_call(copy_and_wait, both, 20)


def time_host_copies(
    device: torch.device, size: int, while_busy: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    """Bytes a second from pinned memory to the card, back to pinned memory, and from ordinary memory to the card.

    Args:
        device: the card.
        size: bytes of a copy.
        while_busy: called while copies run, to look at the link.
    """
    ordinary = torch.zeros(size, dtype=torch.uint8)
    pinned = ordinary.pin_memory() if device.type == "cuda" else ordinary.clone()
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    to_card = time_call(lambda: there.copy_(pinned, non_blocking=True), [device], 4)
    for _ in range(16):
        there.copy_(pinned, non_blocking=True)
    while_busy()
    wait_for([device])
    from_card = time_call(lambda: pinned.copy_(there, non_blocking=True), [device], 4)
    pageable = time_call(lambda: there.copy_(ordinary), [device], 1, rounds=3)
    return size / to_card, size / from_card, size / pageable


def time_products(
    devices: Sequence[torch.device], side: int, seconds: float, while_busy: Callable[[], None] = lambda: None
) -> list[float]:
    """Floating-point operations a second of each card, all multiplying matrices at once.

    Args:
        devices: the cards.
        side: rows and columns of the matrices.
        seconds: how long to compute, about.
        while_busy: called near the end, while all compute, to look at the clocks.
    """
    matrices = [torch.randn(side, side, device=device).to(_product_dtype(device)) for device in devices]
    repeats = 40
    until = time.perf_counter() + seconds
    rounds: list[list[float]] = []
    looked = False
    while not (looked and rounds):
        marks = [_timed(matrix, repeats) for matrix in matrices]
        if time.perf_counter() > until:
            while_busy()
            looked = True
        wait_for(devices)
        rounds.append([mark() for mark in marks])
    # The median: the first round also loads the kernels, and a card that is held back later shows.
    return [2 * side**3 * repeats / statistics.median(each) for each in zip(*rounds, strict=True)]


def _product_dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _timed(matrix: Tensor, repeats: int) -> Callable[[], float]:
    """Queue products on the matrix's card; calling the result after they are done gives their seconds."""
    if matrix.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(matrix, matrix)
        seconds = time.perf_counter() - start
        return lambda: seconds
    with torch.cuda.device(matrix.device):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            torch.mm(matrix, matrix)
        end.record()
    return lambda: begin.elapsed_time(end) / 1000


def time_all_reduce(collective: Collective, devices: Sequence[torch.device], size: int) -> AllReduceTime:
    """Time one all-reduce of `size` bytes on each card, and compare one with the true sum.

    Args:
        collective: how the cards add up.
        devices: the cards, one tensor each.
        size: bytes; at least 4.
    """
    numbers = max(size // 4, 1)
    tensors = [_ramp(numbers, device) * (place + 1) for place, device in enumerate(devices)]
    collective.all_reduce(tensors)
    wait_for(devices)
    times = sum(range(1, len(devices) + 1))
    right = all(torch.equal(tensor, _ramp(numbers, tensor.device).mul_(times)) for tensor in tensors)
    for tensor in tensors:
        tensor.zero_()
    repeats = 20 if size <= 4 << 20 else 5
    return AllReduceTime(time_call(lambda: collective.all_reduce(tensors), devices, repeats), right)


def _ramp(numbers: int, device: torch.device) -> Tensor:
    """[numbers] small whole numbers that differ from place to place; fp32 holds their sums exactly."""
    return (torch.arange(numbers, dtype=torch.int32, device=device) % 251).to(torch.float32)
