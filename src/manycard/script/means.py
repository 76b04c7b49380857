"""What `manycard.script` asks of whatever spreads a module's calls: the cards of this process, or ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from manycard.cards.card import Card
from manycard.engine.batches.layout import Layout

__all__ = ["InParts", "RunsParts", "SpreadsCalls"]


class RunsParts(Protocol):
    """Runs one module's trial calls in parts, as `Spreader` does on the cards of this process."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout) -> Any:
        """The joined output of a call cut into `sizes`."""

    def close(self) -> None:
        """Let go of what it holds."""


InParts = Callable[[nn.Module, Sequence[Card]], RunsParts]
"""How trials are run in parts: `Spreader`, or what else makes a `RunsParts` of a module and its cards."""


class SpreadsCalls(Protocol):
    """Spreads one module's calls, as `Spreader` does on the cards of this process."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held around `prepare` and `run`."""

    @property
    def parts(self) -> int:
        """Into how many shards a call is cut."""

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """Get ready for `run`; gives the names of the attributes that the script changed since the last call."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout) -> Any:
        """The joined output of the call cut into `sizes`."""

    def close(self) -> None:
        """Let go of what it holds."""
