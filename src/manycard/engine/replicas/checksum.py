"""Checksums of tensors, bit for bit, without waiting for the card that they are on.

``checksum(x) = sum over i of bits(x[i]) * w[i]``, modulo 2**64, with odd pseudo-random weights ``w``.

Behaviour:
    * Two tensors that differ in one element always have different sums, since an odd weight can be divided by modulo
      2**64. Tensors that differ in several have equal ones with a chance of about 2**-64.
    * Signs of zeros and the payloads of NaN count.
    * Tensors are joined to chunks of 2**22 elements (2**16 on a CPU, whose cache holds them), so that many small ones
      cost few kernels, and the largest needs 80 MiB of the card's memory. Sums of cards of two kinds are not equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["checksums", "nonfinite"]

_CHUNK = {"cpu": 1 << 16}
_LARGE_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_weights: dict[torch.device, Tensor] = {}


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """The sums of `tensors`, which are on one device: [n], int64, there. Sparse ones count as their values."""
    device = tensors[0].device if tensors else torch.device("cpu")
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    with torch.no_grad():
        for owners, factors, pieces in _chunks(tensors):
            joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            bits = joined * _weights_on(device)[: len(joined)]  # int64 by promotion, in one pass
            if len(pieces) == 1:
                sums[owners[0]] += bits.sum() * factors[0]
                continue
            ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
            upto = bits.cumsum(0)[ends.to(device, non_blocking=True)]
            parts = torch.diff(upto, prepend=upto.new_zeros(1))
            places = torch.tensor([owners, factors]).to(device, non_blocking=True)
            sums.index_add_(0, places[0], parts * places[1])
    return sums


def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Which of `tensors`, on one device, hold inf or NaN: [n], bool, there."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = torch.zeros(len(tensors), dtype=torch.bool, device=device)
    looked_at = [
        (index, _flat(tensor))
        for index, tensor in enumerate(tensors)
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())
    ]
    if looked_at:
        with torch.no_grad():
            largest = torch.stack([norm.double() for norm in _largest([flat for _, flat in looked_at])])
        indices = torch.tensor([index for index, _ in looked_at]).to(device, non_blocking=True)
        found[indices] = ~largest.isfinite()
    return found


def _largest(flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """A number of each that is finite where all of its elements are."""
    if flats[0].device.type == "cpu":  # where the fused norm is 25 times slower than this
        reals = [torch.view_as_real(flat) if flat.is_complex() else flat for flat in flats]
        return [high.double() - low.double() for low, high in map(torch.aminmax, reals)]
    return torch._foreach_norm(list(flats), float("inf"))


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().reshape(-1)


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bits as whole numbers: [n]."""
    flat = _flat(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8)
    return flat.contiguous().view(_INTEGERS[flat.element_size()])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], list[int], list[Tensor]]]:
    """Pieces of tensors, together at most a chunk: whose they are, what to multiply their sums by, and their bits."""
    owners: list[int] = []
    factors: list[int] = []
    pieces: list[Tensor] = []
    chunk = _CHUNK.get(tensors[0].device.type, _LARGE_CHUNK) if tensors else 0
    room = chunk
    for index, tensor in enumerate(tensors):
        for number, piece in enumerate(torch.split(_bits(tensor), chunk) if tensor.numel() else ()):
            if pieces and (len(piece) > room or piece.dtype is not pieces[0].dtype):
                yield owners, factors, pieces
                owners, factors, pieces, room = [], [], [], chunk
            # Weights depend on where in a chunk an element lies, which is the same on every card: chunks are cut
            # by shapes and dtypes. A factor of its own keeps equal chunks of one tensor apart.
            owners.append(index)
            factors.append(_mixed(number))
            pieces.append(piece)
            room -= len(piece)
    if pieces:
        yield owners, factors, pieces


def _mixed(number: int) -> int:
    """An odd number drawn from `number`, as a signed 64-bit one (the mixing function of SplitMix64)."""
    value = (number + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ value >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    value = (value ^ value >> 31) | 1
    return value - 2**64 if value >= 2**63 else value


def _weights_on(device: torch.device) -> Tensor:
    """Odd weights, the same on every device and in every process: [chunk], int64."""
    if device not in _weights:
        count = _CHUNK.get(device.type, _LARGE_CHUNK)
        drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(20), device="cpu")
        _weights[device] = (drawn | 1).to(device)
    return _weights[device]
