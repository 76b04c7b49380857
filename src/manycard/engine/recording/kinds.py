"""What tells one kind of work from another, for those who record CUDA graphs of it.

A graph repeats what it recorded, so work is of one kind where shapes, strides, dtypes and plain values are equal, and
as long as what it was made for (replicas, addresses, attributes) stays as it is. There are graphs for at most
`MOST_KINDS` kinds of a module; others run eager. A script that changes the module again and again has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from manycard.engine.batches.batch import children

__all__ = ["MOST_KINDS", "WARM_UP", "Kinds", "UnrepeatableError", "output_signature", "signature"]

WARM_UP = 3
"""Passes before the first recording: kernels are chosen and optimizer states made in them."""
MOST_KINDS = 8
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class UnrepeatableError(Exception):
    """A graph can't be given this anew, or can't give it anew."""


class _HasRecorded(Protocol):
    @property
    def recorded(self) -> Any:
        """The graphs of the kind, true where there are any."""


K = TypeVar("K", bound=_HasRecorded)


class Kinds(Generic[K]):
    """The kinds of work that have come so far.

    Args:
        make: makes what is kept of a kind.
        give_up: called with the reason where there will be no more graphs.
    """

    def __init__(self, make: Callable[[], K], give_up: Callable[[str], None]) -> None:
        self._make = make
        self._give_up = give_up
        self._known: dict[Any, K] = {}
        self._made_for: Any = None
        self._restless = 0

    def find(self, made_for: Any, key: Any) -> K | None:
        """The kind with this key; None where it is one too many, or `give_up` was called.

        Args:
            made_for: what every graph depends on; all kinds are forgotten when it changes.
        """
        if made_for != self._made_for:
            self._restless += not any(kind.recorded for kind in self._known.values())
            self._known.clear()
            self._made_for = made_for
            if self._restless > MOST_KINDS:
                self._give_up("the script changes the module between steps, again and again")
                return None
        kind = self._known.get(key)
        if kind is None and len(self._known) < MOST_KINDS:
            kind = self._known[key] = self._make()
        return kind

    def clear(self) -> None:
        """Forget all kinds and their graphs."""
        self._known.clear()


def signature(value: Any) -> Any:
    """What must be equal for a recorded graph to take a part of a batch.

    Raises:
        UnrepeatableError: it holds what can't be written into a graph's tensors.
    """
    return _signature(value, "the batch", _input)


def output_signature(value: Any) -> Any:
    """What must be equal for outputs to be of one kind.

    Raises:
        UnrepeatableError: they hold what a graph can't give anew.
    """
    return _signature(value, "the output", _output)


def _signature(value: Any, what: str, of_tensor: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise UnrepeatableError(f"{what} holds a sparse tensor")
        return of_tensor(value)
    parts = children(value)
    if parts is not None:
        return type(value), tuple((name, _signature(part, what, of_tensor)) for name, part in parts)
    if not isinstance(value, _PLAIN):
        raise UnrepeatableError(f"{what} holds a {type(value).__name__}")
    return type(value), value


def _input(tensor: Tensor) -> Any:
    if tensor.requires_grad:
        raise UnrepeatableError("the batch holds a tensor that requires gradients")
    return tensor.shape, tensor.dtype, tensor.stride()


def _output(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.requires_grad
