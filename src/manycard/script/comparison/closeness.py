"""When two results count as the same: what another order of summation may change, and no more."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["differ", "tolerance_of"]

_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_ON_GPU = 1e-3
"""Relative, for fp32 on GPUs, whose convolutions may pick another algorithm (and TF32) for another batch size."""
_COARSE = 4e-2
"""Relative, for bf16 and fp16."""


def tolerance_of(tensor: Tensor) -> float:
    """How far a result of this dtype, on this device, may move when sums are taken in another order; relative."""
    if torch.is_autocast_enabled(tensor.device.type):
        return _COARSE
    tolerance = _TOLERANCES.get(tensor.dtype, _COARSE)
    return max(tolerance, _ON_GPU) if tensor.is_cuda and tensor.dtype is torch.float32 else tolerance


def differ(one: Tensor, other: Tensor, tolerance: float, *, scale: float = 0.0) -> str | None:
    """Describe how two tensors differ; None where they don't.

    Args:
        tolerance: relative to the largest absolute value of `one`.
        scale: the least value to take the difference relative to.
    """
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"dtypes {one.dtype} and {other.dtype}"
    first, second = (_dense(tensor).to(one.device) for tensor in (one, other))
    if not (first.is_floating_point() or first.is_complex()):
        return None if torch.equal(first, second) else "other whole numbers"
    if first.numel() == 0:
        return None
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return "inf or NaN in one of them only"
    first, second = first[finite], second[finite]
    if first.numel() == 0:
        return None
    gap = float((first - second).abs().max())
    size = max(float(first.abs().max()), scale, 1e-12)
    return f"by {gap:.3g}, where the largest value is {size:.3g}" if gap > tolerance * size else None


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
