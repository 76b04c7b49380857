"""Feeding an unmodified script's cards: loaders that read in the script's own process get workers.

A ``DataLoader`` made without workers reads while the cards wait. `FedLoaders` gives such loaders worker processes,
pinned memory where the cards are GPUs, and batches read ahead. Order and shuffling stay; random augmentation is drawn
in the workers, and so differs from a run without. Workers are made anew for each epoch: what the script changes in its
dataset between epochs reaches them.

Left alone: loaders with workers of their own, and loaders in a process that may use one core only.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["FedLoaders"]

_MOST_WORKERS = 8
_AHEAD = 4
"""Batches that each worker reads ahead."""


class FedLoaders:
    """While entered, loaders that are made without workers get some.

    Args:
        pin_memory: whether batches go to GPUs.

    Attributes:
        fed: how many loaders were given workers.
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self.fed = 0
        self.workers = min(_MOST_WORKERS, _cores())
        self._pin_memory = pin_memory
        self._original: Any = None

    def __enter__(self) -> FedLoaders:
        self._original = original = DataLoader.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def make_fed(loader: DataLoader[Any], *args: Any, **settings: Any) -> None:
            given = signature.bind(loader, *args, **settings)
            if self.workers > 1 and not given.arguments.get("num_workers"):
                self.fed += 1
                given.arguments["num_workers"] = self.workers
                given.arguments.setdefault("pin_memory", self._pin_memory)
                given.arguments.setdefault("prefetch_factor", _AHEAD)
            original(*given.args, **given.kwargs)

        DataLoader.__init__ = make_fed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *raised: object) -> None:
        DataLoader.__init__ = self._original  # type: ignore[method-assign]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
