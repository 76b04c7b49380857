"""Tensors that are alive in this process, and the graphs that they keep.

Python's garbage collector knows every tensor that Python holds. What only a graph holds, as the activations of a loss
that was kept, is found by walking the graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_of", "graph_bytes", "live_tensors"]

_MOST_NODES = 20_000


def live_tensors() -> list[Tensor]:
    """Every tensor that Python holds, those of this call aside. What only cycles hold is collected first."""
    gc.collect()
    # By type: asking an object itself may run anything.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and _has_memory(thing)]


def _has_memory(tensor: Tensor) -> bool:
    with contextlib.suppress(Exception):
        return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0
    return False


def bytes_of(tensors: Iterable[Tensor], seen: set[tuple[str, int]] | None = None) -> int:
    """The memory of `tensors`, what several share counted once.

    Args:
        seen: memory that is counted already; what is counted here is added.
    """
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        with contextlib.suppress(Exception):
            storage = tensor.untyped_storage()
            place = str(tensor.device), storage.data_ptr()
            if place not in seen:
                seen.add(place)
                total += storage.nbytes()
    return total


def graph_bytes(
    roots: Iterable[Tensor], seen: set[tuple[str, int]], nodes: set[Any], saved: set[int] | None = None
) -> int:
    """The memory that only the graphs behind `roots` keep.

    Args:
        seen: memory that is counted already; what is counted here is added.
        nodes: nodes that have been walked already; those of this walk are added.
        saved: identities of the tensors that nodes have saved are added.
    """
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    total = 0
    while todo and len(nodes) < _MOST_NODES:
        node = todo.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        kept = list(_saved(node))
        if saved is not None:
            saved.update(map(id, kept))
        total += bytes_of(kept, seen)
        todo.extend(following for following, _ in node.next_functions)
    return total


def _saved(node: Any) -> Iterator[Tensor]:
    for name in dir(node):
        if name.startswith("_saved_"):
            with contextlib.suppress(Exception):  # a graph whose backward pass has run has let go of them
                value = getattr(node, name)
                if isinstance(value, Tensor):
                    yield value
                elif isinstance(value, (tuple, list)):
                    yield from (each for each in value if isinstance(each, Tensor))
