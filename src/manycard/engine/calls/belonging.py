"""Looking at the graph that a card's forward pass built, for tensors that belong to another card.

Such a tensor makes a backward pass lose gradients, or wait for itself on real cards. A full look costs about a
microsecond a node, so a graph is looked at when its number of nodes is new for its card: a branch that brings in a
foreign tensor adds nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from manycard.engine.batches.batch import tensors_in
from manycard.errors import ModelError

__all__ = ["GraphCheck"]


class GraphCheck:
    """Remembers which graphs of one module's replicas have been looked at."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._leaves: dict[int, dict[int, Tensor]] = {}
        self.recomputes = False
        """Whether a graph holds a reentrant checkpoint, whose backward works only without ``inputs=``."""

    def look(self, position: int, device: torch.device, nodes: int, value: Any) -> None:
        """Look at the graph behind `value` if it is new. Runs in the card's thread.

        Args:
            nodes: how many nodes the forward pass made.

        Raises:
            ModelError: an operation of it ran on another GPU.
        """
        if (position, nodes) in self._known:
            return
        roots = [tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None]
        leaves: dict[int, Tensor] = {}
        for node in nodes_of(roots):
            self.recomputes = self.recomputes or is_reentrant_checkpoint(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                leaves[id(variable)] = variable
                _check_device(variable.device, device, f"a tensor of shape {tuple(variable.shape)}")
            for metadata in getattr(node, "_input_metadata", ()):
                _check_device(metadata.device, device, f"the operation {node.name()}")
        self._leaves[position] = leaves
        self._known.add((position, nodes))

    def compare(self, shared: Collection[int] = ()) -> None:
        """Compare what the cards' new graphs start from.

        Args:
            shared: identities of tensors that they may share, where they are parts of one graph.

        Raises:
            ModelError: two of them start from the same tensor.
        """
        seen: dict[int, int] = {}
        found, self._leaves = self._leaves, {}
        for position, leaves in found.items():
            for key, tensor in leaves.items():
                if key in shared:
                    continue
                if key in seen:
                    self._known.clear()
                    raise ModelError(
                        f"forward uses a tensor of shape {tuple(tensor.shape)} that requires gradients and is shared by"
                        f" cards {seen[key]} and {position}: a tensor caught in a closure or a global, of which cards"
                        " have no copies",
                        fix="reach it through the module (self.weight), or pass it to forward as an argument",
                    )
                seen[key] = position


def is_reentrant_checkpoint(node: Node) -> bool:
    """Whether `node` is ``torch.utils.checkpoint`` with ``use_reentrant=True``."""
    return node.name() == "CheckpointFunctionBackward"


def nodes_of(roots: list[Node]) -> Iterator[Node]:
    """Every node of the graph behind `roots`."""
    seen = set(roots)
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def saved_storages(outputs: Iterable[Tensor]) -> set[int]:
    """Where the memory begins of all that the graph behind `outputs` has saved for its backward pass."""
    found: set[int] = set()
    for node in nodes_of([output.grad_fn for output in outputs if output.grad_fn is not None]):
        for name in (*(name for name in dir(node) if name.startswith("_saved_")), "saved_tensors"):
            with contextlib.suppress(RuntimeError, AttributeError):
                held = getattr(node, name)
                found.update(
                    tensor.untyped_storage().data_ptr()
                    for tensor in (held if isinstance(held, tuple | list) else (held,))
                    if isinstance(tensor, Tensor)
                )
    return found


def _check_device(found: torch.device, device: torch.device, what: str) -> None:
    if found.type == "cuda" and found != device:
        raise ModelError(
            f"on {device}, forward uses {what} on {found}; its backward pass would wait for itself",
            fix="in forward, take devices from the input or the parameters (x.device), and never name a card",
        )
