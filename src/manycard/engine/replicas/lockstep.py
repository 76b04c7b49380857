"""Watching, while training runs, that replicas are still equal.

A script can write parameters in ways that leave no trace, such as ``p.data.clamp_(...)`` between steps; on the
replicas that write is missing. The guard compares the norms of all parameters between cards: in each of the first
steps, waiting for the answer, so that what a loop does in every step is found before it harms; then now and then,
reading the answer later, so that no step waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manycard.engine.replicas.replicas import same_bits

__all__ = ["LockstepGuard"]

_WAITED_FOR = 8
"""Steps at the start that are all compared."""
_EVERY = 32
"""Of later steps, one in so many is compared; two passes over the parameters' norms cost about 0.2 ms of host time."""
_RELATIVE = 1e-5
"""How far norms may lie apart: cards of different models add in different orders."""


class LockstepGuard:
    """Compares one module's replicas now and then."""

    def __init__(self) -> None:
        self._steps = 0
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    def drifted(self, parameters: Sequence[Sequence[nn.Parameter]]) -> bool:
        """Whether replicas have been found to differ. Call it before each step.

        Args:
            parameters: each card's parameters, the primary's first, in the same order.
        """
        if len(parameters) < 2 or not parameters[0]:
            return False
        self._steps += 1
        if parameters[0][0].device.type == "cpu":
            pairs = [pair for card in parameters[1:] for pair in zip(parameters[0], card, strict=True)]
            return not all(same_bits(primary, own) for primary, own in pairs)
        if self._steps <= _WAITED_FOR:
            return bool(_differ(parameters))
        found = self._answer()
        if self._steps % _EVERY == 0 and self._asked is None:
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag.copy_(_differ(parameters), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(parameters[0][0].device))
            self._asked = flag, event
        return found

    def _answer(self) -> bool:
        if self._asked is None or not self._asked[1].query():  # type: ignore[no-untyped-call]
            return False
        flag, self._asked = self._asked[0], None
        return bool(flag)


def _differ(parameters: Sequence[Sequence[nn.Parameter]]) -> Tensor:
    """Whether any replica's norms differ from the primary's; 0-dim, on the primary."""
    with torch.no_grad():
        primary, *others = [torch.stack([n.float() for n in torch._foreach_norm(list(card))]) for card in parameters]
        differs = torch.zeros((), dtype=torch.bool, device=primary.device)
        for norms in others:
            there = norms.to(primary.device)
            near = torch.isclose(there, primary, rtol=_RELATIVE, atol=0.0, equal_nan=True)
            differs = differs | ~near.all()
    return differs
