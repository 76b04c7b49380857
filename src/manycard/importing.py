"""Importing while Python's garbage collector rests.

PyTorch's modules make some hundred thousand objects, all of which stay. The collector walks them again and again while
they are made, which took 0.4 s of the 2.2 s in which a process imports manycard, and every rank and every measuring
process imports it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collector"]


@contextmanager
def without_collector() -> Iterator[None]:
    """Let no collection begin; afterwards it is as it was, also when an import fails."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
