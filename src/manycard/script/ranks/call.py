"""One call of a module, spread over ranks, as one node of each rank's autograd graph.

Every rank makes the same call with the same whole inputs. The node is a *boundary*, as in
`manycard.engine.calls.boundary`: its inputs are the whole inputs and the module's parameters, its outputs the whole
outputs. Inside, each rank has a graph of its own, from its detached shard to the shard's outputs.

Forward: each rank runs the module on its shard; outputs are gathered, so that every rank's script sees all of them.
Backward: each rank takes its part of the outputs' gradients and runs the backward pass of its own graph; gradients of
    parameters and of whole inputs are summed over ranks, and the script's graph goes on with the sums.

Refused: ``create_graph=True`` through a call, since the other ranks' graphs can't be differentiated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manycard.engine.batches.batch import map_tensors, tensors_in
from manycard.engine.batches.joining import Join, join_values
from manycard.engine.batches.layout import Piece
from manycard.engine.calls.belonging import GraphCheck
from manycard.engine.calls.node_names import name_like
from manycard.engine.driving.local_backward import USED_TWICE, local_gradients
from manycard.errors import BatchError, ModelError
from manycard.script.comparison.layout import Joined, OtherOutputsError
from manycard.script.ranks.exchange import (
    Described,
    GradientExchange,
    Part,
    all_shapes,
    described,
    gather,
    restored,
    sum_sparse,
)
from manycard.strategies.peers import Peers

__all__ = ["RankCall", "RankModule"]


@dataclass(frozen=True)
class _Leaf:
    """One tensor of the joined output."""

    own: Tensor | None
    """This rank's part; None where another rank alone has one."""
    join: Join | None
    """None for a tensor that one rank alone has."""
    varies: bool
    """Whether any rank's part depends on a parameter or an input's gradient."""


class RankModule:
    """The module of one rank's script, and what is kept from call to call.

    Args:
        module: the module.
        device: this rank's card.
        peers: the ranks.
    """

    def __init__(self, module: nn.Module, device: torch.device, peers: Peers) -> None:
        self.module = module
        self.device = device
        self.peers = peers
        self.check = GraphCheck()
        parts = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
        self.sparse = {id(part.weight) for part in parts}
        """Parameters whose gradients may be sparse."""
        self._exchange: tuple[Any, GradientExchange | None] = (None, None)

    def exchange(self, tensors: Sequence[Tensor]) -> GradientExchange:
        """What sums gradients of `tensors`; the last one is kept."""
        key = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        known, exchange = self._exchange
        if exchange is None or known != key:
            exchange = GradientExchange(tensors)
            self._exchange = (key, exchange)
        return exchange


class RankCall:
    """One call of `of`.

    Args:
        of: the module.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        sizes: samples of each rank, none of them 0.
        layout: how inputs are cut and outputs joined.
        ask: tell one another what the outputs are, where it is not known yet that it follows from this rank's.
    """

    def __init__(
        self,
        of: RankModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Sequence[int],
        layout: Joined,
        *,
        ask: bool,
    ) -> None:
        self._of = of
        self._batch = (args, kwargs)
        self._sizes = list(sizes)
        self._layout = layout
        self._ask = ask
        self._rank = of.peers.rank
        self._inputs: list[tuple[int, Piece | None, Tensor]] = []
        self._leaves: list[_Leaf] = []
        self._value: Any = None
        self._spent = False

    def run(self) -> Any:
        """Run forward and return the joined output, attached to the script's graph where gradients are enabled."""
        whole = [tensor for tensor in tensors_in(self._batch) if tensor.requires_grad]
        parameters = [parameter for parameter in self._of.module.parameters() if parameter.requires_grad]
        if not torch.is_grad_enabled() or not (whole or parameters):
            args, kwargs = self._layout.take_shard(self._batch, self._sizes, self._rank, _part_of)
            return self._join(self._of.module(*args, **kwargs))
        self._whole = whole
        self._parameters = parameters
        outputs = iter(_RankBoundary.apply(self, *whole, *parameters))
        # The outputs hold this call through their graph; it must not hold them.
        value, self._value = self._value, None
        return map_tensors(lambda _: next(outputs), value)

    # ---- forward -------------------------------------------------------------------------------------------

    def forward_with_graph(self) -> list[Tensor]:
        """Run this rank's shard from detached leaves and return the joined output tensors, detached."""
        index = {id(tensor): number for number, tensor in enumerate(self._whole)}

        def take(tensor: Tensor, piece: Piece | None) -> Tensor:
            part = _part_of(tensor.detach(), piece)
            if tensor.requires_grad:
                self._inputs.append((index[id(tensor)], piece, part.requires_grad_()))
            return part

        with torch.enable_grad():
            args, kwargs = self._layout.take_shard(self._batch, self._sizes, self._rank, take)
            nodes = torch._C._autograd._get_sequence_nr()
            value = self._of.module(*args, **kwargs)
            self._of.check.look(0, self._of.device, torch._C._autograd._get_sequence_nr() - nodes, value)
            self._of.check.compare()
        self._value = self._join(value)
        return list(tensors_in(self._value))

    @property
    def differentiable(self) -> list[bool]:
        """Of each output tensor, whether any rank's part depends on a parameter or an input's gradient."""
        return [leaf.varies for leaf in self._leaves]

    @property
    def own_outputs(self) -> list[Tensor]:
        """This rank's part of each output tensor that it has one of, with its graph."""
        return [leaf.own for leaf in self._leaves if leaf.own is not None]

    def _join(self, value: Any) -> Any:
        own = described(value)
        of_ranks = self._descriptions(own)
        parts = [list(found.tensors()) for found in of_ranks]
        tensors = gather(list(tensors_in(value)), parts, self._rank, self._of.device)
        varies = {
            id(tensor): part.varies
            for of_rank, tensors_of in zip(parts, tensors, strict=True)
            for part, tensor in zip(of_rank, tensors_of, strict=True)
        }
        values = [
            value if rank == self._rank else restored(found, value, iter(tensors[rank]))
            for rank, found in enumerate(of_ranks)
        ]
        values = [self._layout.to_join(value) for value in values]
        self._leaves = []

        def join_leaf(name: str, pairs: list[tuple[int, Tensor]]) -> Tensor:
            found = [tensor for _, tensor in pairs]
            join = self._plan(found, name) if len(pairs) == len(self._sizes) else None
            mine = next((tensor for rank, tensor in pairs if rank == self._rank), None)
            self._leaves.append(_Leaf(mine, join, any(varies[id(tensor)] for tensor in found)))
            there = [tensor.detach().to(self._of.device) for tensor in found]
            return join.join(there) if join is not None else there[0].clone()

        listed = self._layout.lists_samples(self._batch, sum(self._sizes))
        return join_values(values, self._sizes, self._layout.dim, join_leaf, listed=listed)

    def _plan(self, parts: Sequence[Tensor], name: str) -> Join:
        try:
            return self._layout.plan_join(len(self._leaves), parts, self._sizes, name)
        except OtherOutputsError as error:  # which ranks don't all find, so that none can go on alone
            raise BatchError(str(error)) from None

    def _descriptions(self, own: Described) -> list[Described]:
        """What each rank returned."""
        if self._ask or not own.follows() or self._layout.lists_samples(self._batch, sum(self._sizes)):
            return self._of.peers.gather_objects(own)
        tensors = list(own.tensors())
        mine = self._sizes[self._rank]
        shapes = [
            [
                self._layout.rules[leaf].shape_of(part.shape, mine, size) if leaf < len(self._layout.rules) else None
                for leaf, part in enumerate(tensors)
            ]
            for size in self._sizes
        ]
        unknown = [leaf for leaf, shape in enumerate(shapes[0]) if shape is None]
        if unknown:
            asked = all_shapes([tensors[leaf].shape for leaf in unknown], len(self._sizes), self._of.device)
            for of_rank, answer in zip(shapes, asked, strict=True):
                for leaf, shape in zip(unknown, answer, strict=True):
                    of_rank[leaf] = shape
        return [own.like(iter(_parts(tensors, of_rank))) for of_rank in shapes]

    # ---- backward ------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the whole inputs and of the parameters, given those of the outputs."""
        if self._spent:
            raise RuntimeError(USED_TWICE)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        roots, of_roots = [], []
        for leaf, whole in zip(self._leaves, gradients, strict=True):
            if leaf.own is not None and whole is not None and leaf.own.requires_grad:
                part = whole if leaf.join is None else leaf.join.gradient(whole, self._rank)
                roots.append(leaf.own)
                of_roots.append(part.to(leaf.own.device))
        leaves = [*self._parameters, *(leaf for _, _, leaf in self._inputs)]
        accumulate = self._of.check.recomputes
        found = local_gradients(roots, of_roots, leaves, keep=keep, accumulate=accumulate, hooked=self._parameters)
        count = len(self._parameters)
        of_inputs = [[] for _ in self._whole]  # type: list[list[tuple[Any, Tensor]]]
        for (index, piece, _), gradient in zip(self._inputs, found[count:], strict=True):
            if gradient is not None:
                of_inputs[index].append((None if piece is None else piece.of, _dense(gradient)))
        summed = self._summed(found[:count], of_inputs)
        if not keep:
            self._release()
        return summed

    def _summed(
        self, of_parameters: Sequence[Tensor | None], of_inputs: Sequence[list[tuple[Any, Tensor]]]
    ) -> list[Tensor | None]:
        wholes = [*self._whole, *self._parameters]
        sparse = {index for index, tensor in enumerate(wholes) if id(tensor) in self._of.sparse}
        dense = [index for index in range(len(wholes)) if index not in sparse]
        pieces = [*of_inputs, *([] if found is None else [(None, found)] for found in of_parameters)]
        total: list[Tensor | None] = [None] * len(wholes)
        if dense:
            chosen = [[(place, _dense(gradient)) for place, gradient in pieces[index]] for index in dense]
            sums = self._of.exchange([wholes[index] for index in dense]).sum(chosen, self._of.device)
            for index, gradient in zip(dense, sums, strict=True):
                total[index] = gradient
        for index in sorted(sparse):
            found = pieces[index][0][1] if pieces[index] else None
            total[index] = sum_sparse(found, wholes[index].detach(), self._rank, len(self._sizes))
        return total

    def _release(self) -> None:
        """Let go of this rank's graph after its only backward pass."""
        self._spent = True
        self._leaves = []
        self._inputs = []
        self._batch = ((), {})


def _part_of(tensor: Tensor, piece: Piece | None) -> Tensor:
    return tensor if piece is None else piece.of(tensor)


def _parts(tensors: Sequence[Part], shapes: Sequence[tuple[int, ...] | None]) -> list[Part]:
    made = []
    for part, shape in zip(tensors, shapes, strict=True):
        assert shape is not None, "asked for"
        made.append(Part(shape, part.dtype, part.varies))
    return made


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


class _RankBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: RankCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = call.forward_with_graph()
        name_like(ctx, call.own_outputs)
        ctx.call = call
        ctx.mark_non_differentiable(
            *(output for output, varies in zip(outputs, call.differentiable, strict=True) if not varies)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "create_graph=True doesn't go through a call that is spread over ranks",
                fix="use --strategy dp, which can",
            )
        return None, *ctx.call.backward(gradients)
