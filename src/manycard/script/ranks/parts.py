"""Trials in ranks: every part of a call on this rank's own card, one after another, on one graph.

What the other ranks would compute is computed here, so that each rank can compare by itself and no trial has to be
run by several ranks together. Parts share the parameters of the module that is tried, so that autograd adds up their
gradients; each has buffers and attributes of its own, as each rank has.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.engine.batches.batch import tensors_in
from manycard.engine.batches.joining import join_values
from manycard.engine.batches.layout import Layout, Piece
from manycard.engine.calls.belonging import GraphCheck
from manycard.engine.replicas.copying import ModuleCopier

__all__ = ["InTurn"]


class InTurn:
    """Runs one module's calls in parts on one card (a `manycard.script.means.RunsParts`).

    Args:
        module: what is tried; the first part runs on it, the others on copies.
        cards: the first is this rank's.
    """

    def __init__(self, module: nn.Module, cards: Sequence[Card]) -> None:
        self._module = module
        self._device = cards[0].device
        self._check = GraphCheck()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout) -> Any:
        """The joined output, of which gradients reach parameters and inputs."""
        batch = (args, kwargs)
        active = [position for position, size in enumerate(sizes) if size]
        copies = [ModuleCopier(self._module, self._device, share_parameters=True).replica for _ in active[1:]]
        values = []
        for position, module in zip(active, [self._module, *copies], strict=True):
            kept = contextlib.nullcontext() if module is self._module else contextlib.redirect_stdout(io.StringIO())
            with kept:
                values.append(self._part(module, batch, sizes, position, layout))
        self._check.compare(shared={id(tensor) for tensor in (*self._module.parameters(), *tensors_in(batch))})
        return self._joined(values, batch, [sizes[position] for position in active], layout)

    def _part(self, module: nn.Module, batch: Any, sizes: Sequence[int], position: int, layout: Layout) -> Any:
        def take(tensor: Tensor, piece: Piece | None) -> Tensor:
            return tensor if piece is None else piece.of(tensor)

        args, kwargs = layout.take_shard(batch, sizes, position, take)
        nodes = torch._C._autograd._get_sequence_nr()
        value = module(*args, **kwargs)
        self._check.look(position, self._device, torch._C._autograd._get_sequence_nr() - nodes, value)
        return value

    def _joined(self, values: Sequence[Any], batch: Any, sizes: Sequence[int], layout: Layout) -> Any:
        leaves = iter(range(1 << 30))

        def join_leaf(name: str, pairs: list[tuple[int, Tensor]]) -> Tensor:
            leaf, parts = next(leaves), [tensor for _, tensor in pairs]
            return layout.plan_join(leaf, parts, sizes, name).join(parts) if len(parts) == len(sizes) else parts[0]

        listed = layout.lists_samples(batch, sum(sizes))
        values = [layout.to_join(value) for value in values]
        return join_values(values, sizes, layout.dim, join_leaf, listed=listed)

    def close(self) -> None:
        """There is nothing to let go of."""
