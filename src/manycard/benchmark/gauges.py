"""Reading the memory of cards, and waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["peak_memory_mib", "reserved_memory_mib", "reset_peak_memory", "synchronize"]


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every GPU among `devices` has done what it was given."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Forget the most that was held on each GPU so far."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mib(devices: Sequence[torch.device]) -> list[float | None]:
    """The most that torch's allocator held on each device since the reset, in MiB; None for the CPU."""
    return [torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None for device in devices]


def reserved_memory_mib(devices: Sequence[torch.device]) -> list[float | None]:
    """The most that torch's allocator took from each device since the reset, in MiB; None for the CPU.

    Unlike what is allocated, it holds the activations of CUDA graphs.
    """
    return [torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else None for device in devices]
