"""Many tensors in a few flat buffers, so that one call moves or adds them all.

Shapes below: a *layout* of tensors t_1 .. t_n has one buffer per dtype, [sum of padded numel]. Each tensor's place
starts at a multiple of 128 bytes and keeps the tensor's own strides where it is dense, so that a channels-last
weight's gradient is copied without a transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FlatLayout"]

_ALIGNMENT = 128


@dataclass(frozen=True)
class _Spot:
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class FlatLayout:
    """Where each of some tensors lies in flat buffers.

    Args:
        tensors: they give shapes, strides and dtypes, and are not kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lengths: dict[torch.dtype, int] = {}
        self._spots: list[_Spot] = []
        self.groups: dict[torch.dtype, list[int]] = {}
        """Indices of the tensors of each dtype."""
        for index, tensor in enumerate(tensors):
            self._place(index, tensor.detach())

    def _place(self, index: int, tensor: Tensor) -> None:
        dtype, offset = tensor.dtype, self._lengths.get(tensor.dtype, 0)
        # empty_like keeps the strides of a dense tensor and gives any other a contiguous layout.
        stride = torch.empty_like(tensor, device="meta").stride()
        self._spots.append(_Spot(dtype, offset, tensor.shape, stride))
        step = max(1, _ALIGNMENT // tensor.element_size())
        self._lengths[dtype] = offset + -(-tensor.numel() // step) * step
        self.groups.setdefault(dtype, []).append(index)

    def allocate(self, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Buffers for all of it on `device`; what they hold is undefined."""
        return {dtype: torch.empty(length, dtype=dtype, device=device) for dtype, length in self._lengths.items()}

    def length(self, dtype: torch.dtype) -> int:
        """Numbers in the buffer of a dtype."""
        return self._lengths.get(dtype, 0)

    def views(self, buffers: dict[torch.dtype, Tensor]) -> list[Tensor]:
        """Each tensor's place in `buffers`, in order."""
        found = []
        for spot in self._spots:
            buffer = buffers[spot.dtype]  # which may begin within its storage
            found.append(buffer.as_strided(spot.shape, spot.stride, buffer.storage_offset() + spot.offset))
        return found


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor], groups: dict[torch.dtype, list[int]]) -> None:
    """Copy each source into its target, one fused call a dtype."""
    for indices in groups.values():
        chosen = [targets[index] for index in indices]
        if chosen:
            torch._foreach_copy_(chosen, [sources[index] for index in indices], non_blocking=True)
