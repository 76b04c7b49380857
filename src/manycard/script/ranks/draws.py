"""Random draws of one rank inside spread calls, apart from those of the script.

Outside of spread calls every rank draws what every other rank draws: the script is in lockstep. Inside, each rank has
a shard of its own and needs draws of its own.

Behaviour:
    * Inside, PyTorch's generators (the CPU's and the card's), and ``random`` and NumPy where forward uses them,
      continue from the call before; rank r starts from the script's seed + 1 + r.
    * Afterwards all of them are as they were before, so the script's draws don't depend on the rank.
    * A new seed that the script sets for PyTorch gives new draws inside, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["RankDraws"]


class RankDraws:
    """The random states of one rank's shards.

    Args:
        rank: which rank this is.
        device: its card.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._seed: int | None = None
        self._torch: list[Any] = []
        self._host: list[Any] = []

    @contextmanager
    def apart(self, *, host: bool) -> Iterator[None]:
        """Draw from this rank's own states meanwhile.

        Args:
            host: whether ``random`` and NumPy may be drawn from, too; they take longer to swap.
        """
        self._follow_seed()
        before = self._read_torch(), self._read_host() if host else []
        self._write_torch(self._torch)
        if host:
            self._write_host(self._host)
        try:
            yield
        finally:
            self._torch = self._read_torch()
            self._write_torch(before[0])
            if host:
                self._host = self._read_host()
                self._write_host(before[1])

    def _follow_seed(self) -> None:
        if torch.initial_seed() == self._seed:
            return
        self._seed = torch.initial_seed()
        own = (self._seed + 1 + self._rank) % 2**63
        self._torch = [torch.Generator(device).manual_seed(own).get_state() for device in self._devices()]
        self._host = [random.Random(own).getstate(), np.random.RandomState(own % 2**32).get_state()]

    def _devices(self) -> list[torch.device]:
        return [torch.device("cpu"), *([self._device] if self._device.type == "cuda" else [])]

    def _read_torch(self) -> list[Any]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _write_torch(self, states: list[Any]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

    @staticmethod
    def _read_host() -> list[Any]:
        return [random.getstate(), np.random.get_state()]

    @staticmethod
    def _write_host(states: list[Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
