"""What a spread call's node in the script's graph is called.

A printed tensor shows the name of the node that made it (``grad_fn=<AddmmBackward0>``), and logs should be those of
one card. `name_like` gives the node the name of the operation with which the primary's own graph ends.

A node of several outputs has one name: that of the first output without dimensions (a loss), or else of the first.
Where the primary has no graph of its own (a replayed CUDA graph), the name stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["name_like"]

_made: dict[tuple[type[Any], str], type[Any]] = {}


def name_like(node: Any, outputs: Iterable[Tensor]) -> None:
    """Name a node of ``torch.autograd.Function`` after what made `outputs`, the primary's own."""
    made = [output for output in outputs if output.grad_fn is not None]
    shown = next((output for output in made if output.dim() == 0), made[0] if made else None)
    if shown is not None:
        name = type(shown.grad_fn).__name__
        if name == "CppFunction" and shown.grad_fn is not None:  # of C++ extensions, which tensors print so
            name = shown.grad_fn.name().rsplit("::", 1)[-1]
        # Of Python's nodes the class is the name, and one without fields of its own may take the other's place.
        node.__class__ = _named(type(node), name)


def _named(kind: type[Any], name: str) -> type[Any]:
    key = (kind, name)
    if key not in _made:
        _made[key] = type(name, (kind,), {})
    return _made[key]
