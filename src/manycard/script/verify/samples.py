"""Telling the samples of two runs apart: a few numbers for each row of a call's inputs.

A row's hash says whether two rows are bit for bit equal. Inputs that another module has computed (a generator's
images, an encoder's features) differ in their last bits between one card and several, so each row keeps two random
projections and its norm beside the hash: rows are *close* when their whole numbers are equal and these agree within
`_CLOSE`.

All of it is on the host and of a dtype of its own, whatever the script's defaults are. The rows of a call are taken
along dimension 0 of its first tensor, from every tensor as long as that.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import tensors_in

__all__ = ["Rows", "join_rows", "rows_of", "same_rows"]

_CLOSE = 1e-3


@dataclass(frozen=True)
class Rows:
    """n samples."""

    exact: Tensor
    """Hashes of all that a row holds, int64 [n]."""
    whole: Tensor
    """Hashes of its whole numbers alone, int64 [n]."""
    floats: Tensor
    """Norm and two projections of its other numbers, float64 [n, 3]."""

    def __len__(self) -> int:
        return len(self.exact)

    def ids(self) -> list[int]:
        """The hashes."""
        ids: list[int] = self.exact.tolist()
        return ids


def rows_of(batch: Any) -> Rows:
    """What tells the rows of `batch` apart."""
    tensors = [_plain(tensor) for tensor in tensors_in(batch) if tensor.dim() > 0]
    length = len(tensors[0]) if tensors else 0
    exact = [hashlib.blake2b(digest_size=8) for _ in range(length)]
    whole = [hashlib.blake2b(digest_size=8) for _ in range(length)]
    floats = torch.zeros(length, 3, dtype=torch.float64, device="cpu")
    for tensor in tensors:
        if len(tensor) != length or tensor.numel() == 0:
            continue
        flat = tensor.reshape(length, -1)
        fractional = flat.is_floating_point()
        for number, row in enumerate(flat.contiguous().view(torch.uint8).numpy()):
            exact[number].update(row)
            if not fractional:
                whole[number].update(row)
        if fractional:
            floats += _projected(flat.float()).double()
    return Rows(_digests(exact), _digests(whole), floats)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several ranks, one rank's after another's."""
    return Rows(
        torch.cat([part.exact for part in parts]),
        torch.cat([part.whole for part in parts]),
        torch.cat([part.floats for part in parts]),
    )


def same_rows(one: Rows, other: Rows, *, ordered: bool) -> bool:
    """Whether two calls had the same samples; in the same order, where `ordered`."""
    if len(one) != len(other):
        return False
    if not ordered:
        one, other = _sorted(one), _sorted(other)
    if torch.equal(one.exact, other.exact):
        return True
    if not torch.equal(one.whole, other.whole):
        return False
    size = one.floats[:, :1].maximum(other.floats[:, :1]).clamp_min(1e-12)
    gap = (one.floats - other.floats).abs() / size
    return bool(((gap <= _CLOSE) | ~one.floats.isfinite()).all())


def _sorted(rows: Rows) -> Rows:
    """In an order that depends on the rows alone, and that the last bits of numbers rarely change."""
    places = sorted(range(len(rows)), key=lambda place: (int(rows.whole[place]), *rows.floats[place].tolist()))
    order = torch.tensor(places, dtype=torch.int64)
    return Rows(rows.exact[order], rows.whole[order], rows.floats[order])


def _plain(tensor: Tensor) -> Tensor:
    """On the host, dense, real."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@functools.lru_cache(maxsize=8)
def _directions(length: int) -> Tensor:
    return torch.randn(length, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _projected(flat: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return torch.cat([norms, flat @ _directions(flat.shape[1])], dim=1)


def _digests(hashes: Sequence[Any]) -> Tensor:
    numbers = [int.from_bytes(each.digest(), "little", signed=True) for each in hashes]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
