"""Kinds of calls of one module: what is known of calls that are alike, and when to look again.

Two calls are of one kind when they have the same structure, dtypes and mode. What can't be cut alike in spite of that
is found out by comparing again: at calls 3, 5, 9, ..., when the script has changed the module, and at the first call
that weights its samples differently. A call whose outputs are means or sums over the batch is looked at more closely:
what they are weighted by may show late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from manycard.engine.batches.batch import children, tensors_in
from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import BatchError
from manycard.script.comparison.check import Verdict
from manycard.script.comparison.rules import REDUCTIONS, tells_means_apart
from manycard.script.novelty import Novelty

__all__ = ["Kind", "holds_nothing", "hook_in", "signature", "tensors_of"]

_LOOKED_AT = 256
"""Calls in which signs of another weighting are looked for; after that, in one of 16."""
_AT_FIRST = 5
"""Calls each of which is compared, where outputs are means or sums over the batch."""
_UNDECIDED = 32
"""The same, while those are nothing but zeros."""


@dataclass
class Kind:
    """What is known of one kind of call."""

    verdict: Verdict
    calls: int = 0
    """How often such a call was spread."""
    compared: int = 0
    """How often calls were compared because the script had changed the module."""
    even: bool = True
    """Whether no call so far has weighted its samples differently."""
    closely: int = _AT_FIRST
    """Calls up to which each is compared, where outputs are means or sums over the batch."""
    novelty: Novelty = field(default_factory=Novelty)
    """What calls have held."""

    def due(self, changed: set[str]) -> bool:
        """Whether the next call is to be compared with one card again.

        Args:
            changed: attributes that the script has changed since the last call. Where it does so all the time, one
                call in 32 is compared.
        """
        if not self.calls:
            return False
        if self._reduces and self.calls < (self.closely if self.verdict.decided else max(self.closely, _UNDECIDED)):
            return True
        if changed and self.calls >= 32 * (self.compared - 8):
            self.compared += 1
            return True
        return self.calls >= 2 and not self.calls & (self.calls - 1)

    def found(self, verdict: Verdict) -> None:
        """Go by another verdict from now on: what a call holds may tell two rules apart that were the same before.

        Other rules than before may fit this call alone, so that the next ones are looked at closely.
        """
        if verdict.layout != self.verdict.layout:
            self.closely = self.calls + 1 + _AT_FIRST
        self.verdict = verdict

    def tells_more(self, batch: Any, cards: int) -> bool:
        """Whether this call is the first to weight its samples differently (by padding, or another class, say).

        Until then a mean over tokens and one over samples are the same. Looking waits for the card, so after many
        such calls only some are looked at.
        """
        layout = self.verdict.layout
        if layout is None or not self._reduces or not self._looks:
            return False
        new = self.novelty.finds(batch)
        if self.even:
            self.even = not tells_means_apart(layout, batch, shard_sizes(layout.count(batch), cards))
            new = new or not self.even
        return new and self.calls > 0

    @property
    def _looks(self) -> bool:
        return self.calls <= _LOOKED_AT or not self.calls % 16

    @property
    def _reduces(self) -> bool:
        """Whether an output is a mean or a sum over the batch."""
        layout = self.verdict.layout
        return layout is not None and any(isinstance(rule, REDUCTIONS) for rule in layout.rules)

    def samples(self, batch: Any) -> int:
        """How many samples a call holds; 0 where it is not spread."""
        if self.verdict.layout is None:
            return 0
        try:
            return self.verdict.layout.count(batch)
        except BatchError:
            return 0


def signature(value: Any) -> Any:
    """What must be equal for two calls to be cut alike."""
    if isinstance(value, Tensor):
        # With one time step, rows by sample and rows by time are the same.
        return value.dtype, value.requires_grad, tuple(size == 1 for size in value.shape)
    parts = children(value)
    if type(value) is list and len(value) > 1:
        # As long as the batch is, it may be of any length.
        return list, frozenset(signature(part) for part in value)
    if parts is not None:
        return type(value), tuple((name, signature(part)) for name, part in parts)
    return value if isinstance(value, bool | str | type(None)) else type(value)


def hook_in(module: nn.Module) -> str:
    """The first hook of the script's own in a module, which would see one card's part; or nothing."""
    for name, part in module.named_modules():
        for table in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            for hook in table.values():
                if not getattr(hook, "__module__", type(hook).__module__).startswith("torch."):
                    where = f"{name or 'it'} has a hook"
                    called = getattr(hook, "__qualname__", type(hook).__qualname__)
                    return f"{where} ({called}), which would see one card's part"
    return ""


def holds_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has no tensor."""
    try:
        return next(tensors_in((args, kwargs)), None) is None
    except BatchError:
        return False


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors of a call, in which what can't be cut counts as none."""
    try:
        yield from tensors_in((args, kwargs))
    except BatchError:
        return
