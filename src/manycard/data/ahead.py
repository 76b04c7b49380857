"""Batches that are still being made when they are collated.

Behaviour:
    * A dataset that makes whole batches in threads of its own (`manycard.data.image_files`) may collate one to a
      `Pending`, where `allowed` says so: in a loader of ours that loads in the script's process with PyTorch's own
      collating. The loader then keeps `DEPTH` of them in the making while the script works on the batch before.
    * What went wrong with a batch is raised where that batch would have been handed out.
    * Samples are drawn and seeded in the order of the epoch, before anything is made, so the batches are the same.
    * An iteration that is left early drops what was begun.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextvars import ContextVar
from typing import Any

from torch.utils.data import default_collate

__all__ = ["DEPTH", "Pending", "allowed", "collate_pending", "finished_ahead"]

DEPTH = 2
"""Batches in the making beside the one that was handed out: one that is decoded, and one whose files are read."""

_ALLOWED: ContextVar[bool] = ContextVar("manycard_pending_batches", default=False)


class Pending(ABC):
    """Part of a batch, or all of it, that is not there yet."""

    @abstractmethod
    def result(self) -> Any:
        """What it became, ready for the current stream; waits for it."""

    @abstractmethod
    def drop(self) -> None:
        """Nobody will ask for it."""


def allowed() -> bool:
    """Whether collating may give a `Pending`."""
    return _ALLOWED.get()


def collate_pending(samples: list[Any]) -> Any:
    """PyTorch's own collating, which may give a `Pending` here."""
    token = _ALLOWED.set(True)
    try:
        return default_collate(samples)
    finally:
        _ALLOWED.reset(token)


def finished_ahead(batches: Generator[tuple[Any, Any], None, None]) -> Generator[tuple[Any, Any], None, None]:
    """The same batches in the same order, whole; further ones are begun before each is waited for."""
    begun: deque[tuple[Any, Any]] = deque()
    try:
        for batch, info in batches:
            begun.append((batch, info))
            if not any(True for _ in _pending_in(batch)):
                # Nothing would be gained by fetching more of these before they are used.
                while begun:
                    yield _next_of(begun)
            elif len(begun) > DEPTH:
                yield _next_of(begun)
        while begun:
            yield _next_of(begun)
    finally:
        for batch, _ in begun:
            for pending in _pending_in(batch):
                pending.drop()


def _next_of(begun: deque[tuple[Any, Any]]) -> tuple[Any, Any]:
    batch, info = begun.popleft()
    return _finished(batch), info


def _finished(batch: Any) -> Any:
    """`batch` with every `Pending` in it replaced; what holds none is the object that it was.

    Lists, tuples and dicts are what PyTorch's collating gives.
    """
    if isinstance(batch, Pending):
        return batch.result()
    if not any(True for _ in _pending_in(batch)):
        return batch
    if isinstance(batch, dict):
        return {key: _finished(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_finished(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_finished(value) for value in batch)
    return batch


def _pending_in(batch: Any) -> Iterator[Pending]:
    if isinstance(batch, Pending):
        yield batch
    elif isinstance(batch, list | tuple | dict):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from _pending_in(value)
