"""What a run is given, and how it lets go of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import manycard as mc

__all__ = ["Make", "Run", "closing"]

Make = Callable[..., "mc.Parallel"]
"""``make(**options)`` -> a `Parallel` of the strategy and cards under test."""
Run = Callable[[Make, Path], Any]


@contextmanager
def closing(parallel: mc.Parallel) -> Iterator[mc.Parallel]:
    """Close `parallel` at the end."""
    try:
        yield parallel
    finally:
        parallel.close()
