"""Reading time and memory of cards.

A clock that waits for the cards at every step would measure its own waiting, so it waits only when it starts and
when it stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["StepClock", "peak_memory_mib", "reset_peak_memory", "synchronize"]


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


class StepClock:
    """Times a run of steps from end to end.

    Args:
        devices: what this process's steps run on.
        barrier: waits for the other ranks, so that all start together; does nothing where there are none.
    """

    def __init__(self, devices: Sequence[torch.device], barrier: Callable[[], None]) -> None:
        self._devices = devices
        self._barrier = barrier
        self._started: float | None = None
        self.seconds = 0.0
        self.steps = 0
        self.samples = 0

    def start(self) -> None:
        """Begin timing once the cards are idle."""
        synchronize(self._devices)
        self._barrier()
        synchronize(self._devices)  # a barrier of NCCL's is itself work that was given to the card
        self._started = time.perf_counter()

    def count(self, samples: int) -> None:
        """Note one step; steps before `start` are the warm-up and don't count."""
        if self._started is not None:
            self.steps += 1
            self.samples += samples

    def stop(self) -> None:
        """End timing once the cards have done the last step."""
        synchronize(self._devices)
        assert self._started is not None, "the clock was stopped and never started"
        self.seconds = time.perf_counter() - self._started

    @property
    def samples_per_s(self) -> float:
        """Samples of the counted steps over their time."""
        return self.samples / self.seconds

    @property
    def step_ms(self) -> float:
        """Mean time of a counted step."""
        return self.seconds / self.steps * 1e3
