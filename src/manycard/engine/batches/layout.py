"""Where the samples are in what a module is called with and in what it returns.

`SpreadCall` asks a `Layout` how many samples a call has, for each card's part of its inputs, and how the cards'
outputs become one. `OnDimension` is the rule that `DataParallel` follows: one dimension counts samples, in inputs
and in outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manycard.engine.batches.batch import count_samples, holds_list_of_samples, take_shard
from manycard.engine.batches.joining import Join, plan_join

__all__ = ["Layout", "OnDimension", "Piece", "TakePiece"]


@dataclass(frozen=True)
class Piece:
    """Which part of a tensor is a shard's: `size` rows of dimension `dim` from `start` on."""

    dim: int
    start: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part, as a view."""
        return tensor.narrow(self.dim, self.start, self.size)


TakePiece = Callable[[Tensor, "Piece | None"], Tensor]
"""Takes a tensor of the call and gives the shard's: a piece of it, or all of it (None)."""


class Layout(ABC):
    """How a call is cut and joined."""

    dim: int = 0
    """The dimension that counts samples in tensors that stand in lists."""

    @abstractmethod
    def count(self, batch: Any) -> int:
        """How many samples the call's inputs hold.

        Raises:
            BatchError: they can't be counted.
        """

    @abstractmethod
    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        """The inputs of the card at `position`, with `take` choosing how each tensor is taken."""

    @abstractmethod
    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        """How output tensor number `leaf` of the cards that had samples becomes one; `name` is for the error.

        Raises:
            BatchError: the shapes follow no rule that keeps the meaning.
        """

    def to_join(self, output: Any) -> Any:
        """What is joined of a card's output."""
        return output

    def lists_samples(self, batch: Any, total: int) -> bool:
        """Whether the inputs have a list with one item a sample in them."""
        return holds_list_of_samples(batch, total, self.dim)


@dataclass(frozen=True)
class OnDimension(Layout):
    """Every tensor that has as many rows on `dim` as there are samples is cut there, and outputs join there."""

    dim: int = 0

    def count(self, batch: Any) -> int:
        return count_samples(batch, self.dim)

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        def take_rows(tensor: Tensor, start: int | None, size: int) -> Tensor:
            return take(tensor, None if start is None else Piece(self.dim, start, size))

        return take_shard(batch, sizes, position, self.dim, take_rows)

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        return plan_join(parts, samples, self.dim, name)
