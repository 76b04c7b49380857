"""Finding the rules by which the outputs of a call in parts join to what one card gave, while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from manycard.engine.batches.joining import Join
from manycard.engine.batches.layout import Layout, TakePiece
from manycard.script.comparison.closeness import differ, tolerance_of
from manycard.script.comparison.different import DifferentError
from manycard.script.comparison.layout import JoinRule
from manycard.script.comparison.pinned import PinnedDraws
from manycard.script.comparison.plain import alike, whole_values
from manycard.script.comparison.rules import rules_for

__all__ = ["Probing", "cotangent"]


class Probing(Layout):
    """Cuts by `cut`, and finds for each output the rule that joins it to what one card gave."""

    def __init__(
        self,
        cut: Layout,
        outputs: Sequence[Tensor],
        batch: Any,
        sizes: Sequence[int],
        known: Sequence[JoinRule],
        draws: PinnedDraws,
    ) -> None:
        self.dim = cut.dim
        self._known = known
        self._batch = batch
        self._sizes = sizes
        self._cut = cut
        self._outputs = outputs
        self._draws = draws
        self._parts: list[tuple[Sequence[Tensor], Sequence[int]]] = []
        self._given: list[dict[str, Any]] = []
        self.rules: list[JoinRule] = []

    def count(self, batch: Any) -> int:
        return self._cut.count(batch)

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        self._draws.begin_part(sum(sizes[:position]), sizes[position], sum(sizes), position)
        return self._cut.take_shard(batch, sizes, position, take)

    def lists_samples(self, batch: Any, total: int) -> bool:
        return self._cut.lists_samples(batch, total)

    def to_join(self, output: Any) -> Any:
        self._given.append(whole_values(output))
        return output

    @property
    def counts(self) -> bool:
        """Whether outputs hold whole numbers or words, the same on every card."""
        return any(self._given) and all(alike(self._given[0], given) for given in self._given)

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        if leaf >= len(self._outputs):
            raise DifferentError("cutting it changes how many tensors it returns")
        self._parts.append(([part.detach() for part in parts], samples))
        whole = self._outputs[leaf].detach()
        found = "its shape doesn't follow the batch"
        for rule, join in self._joins(leaf):
            joined = self._joined(leaf, join)
            difference = differ(whole, joined, tolerance_of(whole))
            if difference is None:
                self.rules.append(rule)
                return join
            if joined.shape == whole.shape and found.startswith("its shape"):
                found = difference
        raise DifferentError(f"cutting the batch changes output {name} ({found})")

    def fitting(self, leaf: int) -> list[JoinRule]:
        """The rule that was found for an output, and those that give the same whole but pass back other gradients."""
        whole = self._outputs[leaf].detach()
        rules: list[JoinRule] = []
        passed_back: list[list[Tensor]] = []
        for rule, join in self._joins(leaf):
            joined = self._joined(leaf, join)
            if differ(whole, joined, tolerance_of(whole)) is not None:
                continue
            sent = cotangent(0, joined) if joined.is_floating_point() else torch.ones_like(joined)
            gradients = [join.gradient(sent, index) for index in range(len(self._parts[leaf][0]))]
            if not any(all(map(_alike, gradients, others)) for others in passed_back):
                rules.append(rule)
                passed_back.append(gradients)
        return rules

    def _joins(self, leaf: int) -> Iterator[tuple[JoinRule, Join]]:
        """The rules whose shapes fit an output."""
        parts, samples = self._parts[leaf]
        known = self._known[leaf : leaf + 1]  # another rule may hold by coincidence in this call
        for rule in (*known, *rules_for(parts[0].dim(), self._batch)):
            join = rule.bind(self._batch, self._cut, self._sizes).plan(parts, samples)
            if join is not None:
                yield rule, join

    def _joined(self, leaf: int, join: Join) -> Tensor:
        device = self._outputs[leaf].device
        return join.join([part.to(device) for part in self._parts[leaf][0]])


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other)


def cotangent(number: int, output: Tensor) -> Tensor:
    """A gradient to send back from an output; the same for outputs of equal shape."""
    if output.dim() == 0:
        return torch.ones_like(output)
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(number))
    return drawn.to(device=output.device, dtype=output.dtype)
