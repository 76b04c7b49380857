"""Copies compared bit by bit: does what one card sends arrive at the other as it was?

A pattern goes from the host to the first card, from there to the second, whose memory holds the pattern's complement
before, and back to the host, which compares. The first card's own way to the host and back is compared too, so that a
difference is the fault of the copy between the cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["SIZES", "compare_copies", "copy_over"]

SIZES = (1, 4099, (1 << 20) + 13, 16 << 20, 64 << 20)
"""Bytes of each comparison: odd ones, a page and a bit, and large ones that take other ways through the driver."""


def copy_over(target: Tensor, source: Tensor) -> None:
    """Copy between cards as a script does."""
    target.copy_(source)


def compare_copies(
    source: torch.device,
    target: torch.device,
    sizes: Sequence[int] = SIZES,
    copy: Callable[[Tensor, Tensor], None] = copy_over,
) -> tuple[int, int]:
    """Copy patterns from one card to another and compare.

    Args:
        source: the card that sends.
        target: the card that receives.
        sizes: bytes of each pattern.
        copy: ``copy(target, source)`` of two flat tensors of bytes; a test hands in one that is broken.

    Returns:
        the number of bytes that arrived as others, and of bytes compared.

    Raises:
        RuntimeError: the way from the host to the first card and back is damaged already.
    """
    wrong = compared = 0
    for size in sizes:
        for pattern in _patterns(size):
            sent = pattern.to(source)
            received = torch.bitwise_not(pattern).to(target)
            if not torch.equal(sent.cpu(), pattern):
                raise RuntimeError(f"what the host sends to {source} comes back changed")
            copy(received, sent)
            wrong += int((received.cpu() != pattern).sum())
            compared += size
    return wrong, compared


_LARGE = 4 << 20


def _patterns(size: int) -> Iterator[Tensor]:
    """Bits without any order; for small sizes also ones, and alternating bits."""
    drawn = _drawn(size)
    yield drawn
    if size < _LARGE:
        yield torch.full_like(drawn, 0xFF)
        yield torch.full_like(drawn, 0xAA)


@lru_cache(maxsize=8)  # drawn once, not once a pair of cards
def _drawn(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
