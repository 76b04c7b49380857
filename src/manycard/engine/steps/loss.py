"""What a ``loss_fn`` returns, read once for all strategies.

A mean loss is a 0-dim tensor: the mean over the shard's samples. A ``(sum, count)`` loss is a sum over whatever it
counts (tokens, pixels, pairs) and that number; it stays exact however unevenly those are spread.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manycard.errors import LossError

__all__ = ["ShardLoss", "read_loss"]

_FIX = "return the mean over the batch as a 0-dim tensor, or (sum, count)"


@dataclass(frozen=True)
class ShardLoss:
    """A shard's loss."""

    value: Tensor
    """The mean over the shard, or the sum; 0-dim."""
    count: float | Tensor | None
    """What the sum is over; None for a mean."""


def read_loss(returned: Any) -> ShardLoss:
    """Read what ``loss_fn`` returned.

    Raises:
        LossError: it is neither a mean nor ``(sum, count)``.
    """
    if isinstance(returned, Tensor):
        _check_scalar(returned)
        return ShardLoss(returned.reshape(()), None)
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor):
        total, count = returned
        _check_scalar(total)
        if isinstance(count, Tensor):
            _check_scalar(count)
            # A whole count divided by PyTorch would come out in fp32.
            return ShardLoss(total.reshape(()), count.detach().reshape(()).double())
        if isinstance(count, numbers.Real):
            return ShardLoss(total.reshape(()), float(count))
    raise LossError(f"loss_fn returned a {type(returned).__name__}, which is no loss", fix=_FIX)


def _check_scalar(tensor: Tensor) -> None:
    if tensor.numel() != 1:
        raise LossError(f"loss_fn returned a tensor of shape {tuple(tensor.shape)}, not one number", fix=_FIX)
