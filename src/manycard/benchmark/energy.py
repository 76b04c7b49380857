"""What cards draw, as NVML tells it.

Behaviour:
    * Cards that count their energy themselves (Volta and newer) are read at both ends; for others, power is sampled
      ten times a second in a thread and added up.
    * It is all that the card draws, other processes' work included.
    * Simulated cards, MIG slices and machines without NVML give None; nothing is raised.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import pynvml

from manycard.cards import Card
from manycard.cards.nvml import ask

__all__ = ["EnergyMeter"]

_EVERY = 0.1
"""Seconds between samples of power."""


class EnergyMeter:
    """Reads the energy that cards have drawn; a context manager.

    Args:
        cards: whose energy is added up.
        api: NVML's module; a test hands in its own.

    Example:
        >>> with EnergyMeter([]) as meter:
        ...     meter.joules() is None
        True
    """

    def __init__(self, cards: Sequence[Card], api: Any = pynvml) -> None:
        self._api = api
        self._uuids = [card.uuid for card in cards]
        self._handles: list[Any] = []
        self._opened = False
        self._counts = False
        self._sampled: float | None = None
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> EnergyMeter:
        if not self._uuids or not all(uuid.startswith("GPU-") for uuid in self._uuids):
            return self
        try:
            self._api.nvmlInit()
        except (self._api.NVMLError, OSError):
            return self
        self._opened = True
        handles = [ask(self._api, "nvmlDeviceGetHandleByUUID", uuid) for uuid in self._uuids]
        if any(handle is None for handle in handles):
            return self
        self._handles = handles
        self._counts = self._counted() is not None
        if not self._counts and self._watts() is not None:
            self._sampled = 0.0
            self._sampler = threading.Thread(target=self._sample, name="manycard power", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        if self._sampler is not None:
            self._sampler.join()
        if self._opened:
            with contextlib.suppress(self._api.NVMLError):
                self._api.nvmlShutdown()

    def joules(self) -> float | None:
        """The energy drawn up to now by all cards, from some beginning; None where it isn't known."""
        return self._counted() if self._counts else self._sampled

    def _counted(self) -> float | None:
        counts = [ask(self._api, "nvmlDeviceGetTotalEnergyConsumption", handle) for handle in self._handles]
        return None if not counts or None in counts else sum(counts) / 1e3

    def _watts(self) -> float | None:
        powers = [ask(self._api, "nvmlDeviceGetPowerUsage", handle) for handle in self._handles]
        return None if not powers or None in powers else sum(powers) / 1e3

    def _sample(self) -> None:
        before, then = self._watts() or 0.0, time.perf_counter()
        while not self._ended.wait(_EVERY):
            now, watts = time.perf_counter(), self._watts()
            if watts is not None and self._sampled is not None:
                self._sampled += (watts + before) / 2 * (now - then)
                before = watts
            then = now
