"""Tensors that a forward pass leaves somewhere outside the module: in a global list, a closure, another object.

Spread over cards, such a place would hold parts of the batch with graphs of their own. A trial call finds that out:
once its module, inputs and outputs are gone, no tensor that it made may be left.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MadeTensors"]


class MadeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the tensors that operations make while it is active.

    Args:
        sizes: numbers of samples that the batch may have. A tensor without such a dimension, a cached table of
            positions say, doesn't count.
    """

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = sizes
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for tensor in _tensors((*args, *(kwargs or {}).values()))}
        for made in _tensors((result,)):
            # A view of something older is not made here.
            if self._sizes.intersection(made.shape) and _storage(made) not in given:
                self._made[_storage(made)] = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
        return result

    def left(self) -> bool:
        """Whether any is still there; what must not count has to be gone by now."""
        gc.collect()
        return any(not reference.expired() for reference in self._made.values())  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Take those that are still there out of the lists, sets and dicts that hold them."""
        left = [found for found in gc.get_objects() if type(found) is Tensor and self._is_made(found)]
        for tensor in left:
            for holder in gc.get_referrers(tensor):
                if holder is not left:
                    _take_out(holder, tensor)

    def _is_made(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and _storage(tensor) in self._made


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The dense tensors among an operation's arguments or results."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            yield value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _take_out(holder: Any, tensor: Tensor) -> None:
    if isinstance(holder, list | deque):
        kept = [item for item in holder if item is not tensor]
        if len(kept) < len(holder):
            holder.clear()
            holder.extend(kept)
    elif isinstance(holder, dict):
        for key in [key for key, value in holder.items() if value is tensor]:
            del holder[key]
