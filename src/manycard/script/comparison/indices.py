"""Indices that are out of bounds, found before a GPU finds them.

A call cut in a way that is wrong may index rows that a part doesn't have: nodes of a graph, classes, positions. On the
CPU that raises IndexError and the next way is tried. On a GPU it is an assertion inside a kernel, after which the
process can use no GPU any more. While `CheckedIndices` is active, indices are looked at first; that waits for the card,
which trials may.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CheckedIndices"]

_BY_DIM = ("gather", "scatter", "index_select", "index_add", "index_copy", "index_fill", "index_reduce")
_BY_NUMBER = ("take", "put")
_BY_PLACE = ("index", "_unsafe_index")
_IN_TABLES = ("embedding", "_embedding_bag")
_LOSSES = ("nll_loss",)
_MADE_OF_OTHERS = ("cross_entropy_loss", "take_along_dim", "one_hot")
Use = tuple[Tensor, int, int]
"""Indices, the lowest that there is, and the first that is too high."""


class CheckedIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises IndexError for an index out of bounds, on whatever device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        looked_at = (*_BY_DIM, *_BY_NUMBER, *_BY_PLACE, *_IN_TABLES, *_LOSSES, *_MADE_OF_OTHERS)
        if name.startswith(looked_at) and "backward" not in name:
            with self:  # in inference mode, operations that are made of others arrive whole
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
            given = {argument.name: argument.default_value for argument in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            for index, lowest, size in _uses(name, given):
                _check(index, lowest, size)
        return func(*args, **kwargs)


def _uses(name: str, given: dict[str, Any]) -> Iterator[Use]:
    """The indices that an operation uses."""
    if name.startswith(_IN_TABLES):
        table = given["weight" if "weight" in given else "self"]  # embedding_renorm_, for max_norm
        yield given["indices"], 0, table.size(0)
    elif name.startswith(_LOSSES):
        scores, target = given["self"], given["target"]
        yield target[target != given["ignore_index"]], 0, scores.size(1 if scores.dim() > 1 else 0)
    elif name.startswith(_BY_NUMBER):
        yield given["index"], -given["self"].numel(), given["self"].numel()
    elif name.startswith(_BY_DIM):
        if given["self"].dim():
            yield given["index"], 0, given["self"].size(given["dim"])
    else:
        yield from _places(given["self"], given["indices"])


def _places(tensor: Tensor, indices: Any) -> Iterator[Use]:
    """Of ``tensor[indices]``: one index a dimension, of which a mask takes as many as it has."""
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
            continue
        if index is not None and dim < tensor.dim():
            yield index, -tensor.size(dim), tensor.size(dim)
        dim += 1


def _check(index: Tensor, lowest: int, size: int) -> None:
    if index.numel() and bool(((index < lowest) | (index >= size)).any()):
        worst = int(index.max()) if int(index.max()) >= size else int(index.min())
        raise IndexError(f"index {worst} is out of bounds for {size} rows")
