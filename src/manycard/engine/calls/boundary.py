"""One call of a module, spread over the cards, as one node of the script's autograd graph.

The node is a *boundary*: its inputs are the call's whole inputs and the primary's parameters, its outputs the whole
outputs. Inside, each card has a graph of its own, from detached shards to the shard's outputs, and autograd never
sees a graph that spans cards. So backward runs on all cards at once, and hooks, ``autograd.grad``,
``retain_graph`` and input gradients act on the script's own parameters exactly as on one card.

Forward: each card's thread runs its replica on its shard; the primary's runs in the calling thread.
Backward: each card's thread runs the backward pass of its own graph. The card whose autograd thread called runs
    its own right there: from another thread it would wait for itself. Gradients are added up on the primary.
With CUDA graphs (`manycard.engine.calls.call_graphs`), both are replays where they can be.
With ``create_graph=True``: the forward pass is repeated on one graph that spans the cards, with the same random
    draws, and differentiated there; slower, and differentiable any number of times.

Refused, because a backward pass would lose gradients or wait for itself: a graph of one card that holds a tensor of
another, such as a parameter caught in a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manycard.engine.batches.batch import map_tensors, tensors_in
from manycard.engine.batches.input_copies import InputCopies
from manycard.engine.batches.joining import join_values
from manycard.engine.batches.layout import Layout, Piece
from manycard.engine.calls.belonging import GraphCheck
from manycard.engine.calls.call_graphs import CallGraphs
from manycard.engine.calls.differentiated import backward_with_graph
from manycard.engine.calls.node_names import name_like
from manycard.engine.calls.output_leaf import OutputLeaf
from manycard.engine.calls.spread_inputs import piece_of, spread_gradient
from manycard.engine.calls.ways import Way
from manycard.engine.driving.context import ThreadContext
from manycard.engine.driving.local_backward import USED_TWICE, local_gradients
from manycard.engine.driving.spans import span
from manycard.engine.engine import Engine
from manycard.engine.recording.comparing import Moment
from manycard.engine.replicas.gradient_sum import GradientSum
from manycard.engine.spread_tensor import Home, SpreadTensor, plain, sent

__all__ = ["SpreadCall"]


@dataclass
class _Shard:
    """One card's side of the call."""

    inputs: list[tuple[int, Piece | None, Tensor]] = field(default_factory=list)
    """Of each tensor that requires a gradient: index among those of the whole, which part, and the card's leaf."""


class SpreadCall:
    """One call of `engine`'s module.

    Args:
        engine: its replicas are up to date.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        sizes: samples of each card; at least two cards have some.
        layout: where the samples are in inputs and outputs.
        output: position of the card on which outputs are joined.
        check: remembers which graphs have been looked at.
        graphs: what runs it as CUDA graphs where it can.
        least: bytes from which on an output stays spread; None where all are joined at once.
    """

    def __init__(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Sequence[int],
        layout: Layout,
        output: int,
        check: GraphCheck,
        graphs: CallGraphs | None = None,
        least: int | None = None,
    ) -> None:
        self.engine = engine
        self.batch: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
        self.sizes = list(sizes)
        self.leaves: list[OutputLeaf] = []
        self.way = Way()
        """How it runs on the cards."""
        self._graphs = graphs
        self.layout = layout
        self._output = output
        self._home = None if least is None else Home(engine.threads, engine.input_copies, output, least)
        self._check = check
        self.active = [position for position, size in enumerate(sizes) if size]
        self._shards = {position: _Shard() for position in self.active}
        self._parts: dict[int, Any] = {}
        self._value: Any = None
        self.spent = False

    def run(self) -> Any:
        """Run forward and return the joined output, attached to the script's graph where gradients are enabled."""
        if not torch.is_grad_enabled():
            return self._run_without_graph()
        self.whole = [tensor for tensor in tensors_in(self.batch) if tensor.requires_grad]
        self._index = {id(tensor): index for index, tensor in enumerate(self.whole)}
        parameters = self.trainable(0)
        if not self.whole and not parameters:
            return self._run_without_graph()
        outputs = iter(_Boundary.apply(self, *self.whole, *parameters))
        # The outputs hold this call through their graph; it must not hold them.
        value, self._value = self._value, None
        return map_tensors(lambda _: next(outputs), value)

    def _run_without_graph(self) -> Any:
        self._cut(leaves=False)
        with span("forward"):
            return self.join(self.engine.threads.run(self._jobs(self._forward), here=0))

    def _jobs(self, job: Callable[[int], Any]) -> list[Callable[[], Any] | None]:
        return [partial(job, position) if size else None for position, size in enumerate(self.sizes)]

    def trainable(self, position: int) -> list[nn.Parameter]:
        """A card's parameters that require gradients."""
        return [parameter for parameter in self.engine.replicas.parameters[position] if parameter.requires_grad]

    # ---- forward -------------------------------------------------------------------------------------------

    def _cut(self, *, leaves: bool) -> None:
        """Cut the batch for every card, and queue the copies between cards before any card computes.

        Args:
            leaves: the parts begin graphs of the cards' own.
        """
        copies = self.engine.input_copies
        if any(isinstance(tensor, SpreadTensor) for tensor in tensors_in(self.batch)):
            self.shards()  # puts together what can't be cut as it lies: done apart, the primary wouldn't wait for it
        with copies.apart():
            for position in self.active:
                self._parts[position] = self._cut_for(position, copies, leaves)

    def _cut_for(self, position: int, copies: InputCopies, leaves: bool) -> Any:
        device, shard = self.engine.cards[position].device, self._shards[position]

        def take(tensor: Tensor, piece: Piece | None) -> Tensor:
            part = copies.ahead(piece_of(tensor, piece, detach=leaves), device)
            if leaves and tensor.requires_grad:
                part = copies.at_once(part, device).requires_grad_()
                shard.inputs.append((self._index[id(tensor)], piece, part))
            return part

        return self.layout.take_shard(self.batch, self.sizes, position, take)

    def shards(self) -> list[Any]:
        """Each card's part of the batch where the batch is, in views."""

        def take(tensor: Tensor, piece: Piece | None) -> Tensor:
            return piece_of(tensor, piece, detach=True)

        return [self.layout.take_shard(self.batch, self.sizes, position, take) for position in self.active]

    @property
    def recomputes(self) -> bool:
        """Whether a graph holds a reentrant checkpoint."""
        return self._check.recomputes

    def _shard_on(self, position: int) -> Any:
        """A card's part of the batch, all of it there. Runs in the card's thread."""
        device = self.engine.cards[position].device
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), self._parts.pop(position))

    def _forward(self, position: int) -> Any:
        """Run one card's replica on its shard, without a graph."""
        args, kwargs = self._shard_on(position)
        return self.engine.replicas.modules[position](*args, **kwargs)

    def _forward_with_graph(self, position: int) -> Any:
        """Run one card's replica on its shard, building the card's own graph from detached leaves."""
        device = self.engine.cards[position].device
        with torch.enable_grad():
            args, kwargs = self._shard_on(position)
            nodes = torch._C._autograd._get_sequence_nr()
            value = self.engine.replicas.modules[position](*args, **kwargs)
            self._check.look(position, device, torch._C._autograd._get_sequence_nr() - nodes, value)
        return value

    def forward_with_graph(self) -> list[Tensor]:
        """Run all cards and return the joined output tensors, detached."""
        self.context = ThreadContext.capture(self.engine.threads.devices)
        self.engine.generators.follow_seed()
        self.draws = (self.engine.generators.state_dict(), torch.get_rng_state())
        self.parameters = {position: self.trainable(position) for position in self.active}
        if self._graphs is not None:
            self.way = self._graphs.way(self)
        self._value = self.join(self.way.forward(self))
        return list(tensors_in(self._value))

    def forward_eager(self) -> list[Any]:
        """Run every card's replica, each building its own graph; their outputs, by card."""
        self._cut(leaves=True)
        with span("forward"):
            values = self.engine.threads.run(self._jobs(self._forward_with_graph), here=0)
        self._check.compare()
        return values

    def forward_again(self) -> None:
        """Run forward once more in a backward pass, eager and with the same draws: cards have their own graphs then."""

        def job(position: int) -> Any:
            with self.context.entered(self.engine.cards[position].device):
                return self._forward_with_graph(position)

        before = Moment(self.engine.replicas.modules, self.engine.generators)
        self.engine.generators.load_state_dict(self.draws[0])
        torch.set_rng_state(self.draws[1])
        self._cut(leaves=True)
        try:
            values = self.engine.threads.run(self._jobs(job), here=self._here)
        finally:
            before.restore()
        self.join(values)

    @property
    def differentiable(self) -> list[bool]:
        """Of each output tensor, whether any card's part depends on a parameter or an input's gradient."""
        return [any(part.requires_grad for part in leaf.parts) for leaf in self.leaves]

    @property
    def own_outputs(self) -> list[Tensor]:
        """Of each output tensor, the part of the first card that has one, with its graph."""
        return [leaf.parts[0] for leaf in self.leaves]

    def join(self, values: Sequence[Any]) -> Any:
        """Join what the cards gave, and remember how."""
        device = self.engine.cards[self._output].device
        sizes = [self.sizes[position] for position in self.active]
        self.leaves = []

        def join_leaf(name: str, pairs: list[tuple[int, Tensor]]) -> Tensor:
            parts = tuple(tensor for _, tensor in pairs)
            leaf = len(self.leaves)
            join = self.layout.plan_join(leaf, parts, sizes, name) if len(pairs) == len(sizes) else None
            self.leaves.append(OutputLeaf(tuple(self.active[index] for index, _ in pairs), parts, join))
            spread = None if self._home is None else self.leaves[-1].left_spread(self._home, self.way.lends)
            return self.leaves[-1].joined(device) if spread is None else spread

        chosen = [self.layout.to_join(values[position]) for position in self.active]
        listed = self.layout.lists_samples(self.batch, sum(self.sizes))
        return join_values(chosen, sizes, self.layout.dim, join_leaf, listed=listed)

    # ---- backward ------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the whole inputs and of the primary's parameters, given those of the outputs."""
        if self.spent:
            raise RuntimeError(USED_TWICE)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = [leaf.accept(gradient) for leaf, gradient in zip(self.leaves, gradients, strict=True)]
        found = self.way.backward(self, gradients, keep=keep)
        if not keep:
            self._release()
        return found

    def backward_with_graph(self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As `backward`, so that the result can be differentiated again."""
        self.way.differentiated()
        return backward_with_graph(self, list(map(plain, saved)), list(map(plain, gradients)))

    @property
    def _here(self) -> int | None:
        """The card whose autograd thread a backward pass of the script's is in, if it has samples."""
        return self._output if self._output in self.active else None

    def backward_eager(self, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """Run every card's backward pass; gradients of the whole inputs and of the primary's parameters."""
        total = GradientSum(self.engine.cards, self.parameters[0], self.engine.collective)
        jobs = self._jobs(lambda position: self._backward_shard(position, gradients, keep, total))
        with span("backward"):
            pieces = self.engine.threads.run(jobs, here=self._here)
        inputs = [self._input_gradient(index, pieces) for index in range(len(self.whole))]
        return [*inputs, *total.on_primary()]

    def _backward_shard(
        self, position: int, gradients: Sequence[Tensor | None], keep: bool, total: GradientSum
    ) -> list[tuple[int, Piece | None, Tensor | None]]:
        """Run one card's backward pass; gives its parts of the input gradients."""
        roots, of_roots = [], []
        for part, whole, leaf, index in self.parts_of(position, gradients):
            roots.append(part)
            of_roots.append(sent(leaf.gradient(whole, index), part.device))
        inputs = self._shards[position].inputs
        leaves = [*self.parameters[position], *(leaf for _, _, leaf in inputs)]
        hooked = self.parameters[position] if position == 0 else []
        gradients_found = local_gradients(
            roots, of_roots, leaves, keep=keep, accumulate=self._check.recomputes, hooked=hooked
        )
        count = len(self.parameters[position])
        total.collect(position, gradients_found[:count])
        return [
            (index, piece, gradient)
            for (index, piece, _), gradient in zip(inputs, gradients_found[count:], strict=True)
        ]

    def parts_of(
        self, position: int, gradients: Sequence[Tensor | None], own: Sequence[Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor, OutputLeaf, int]]:
        """A card's output tensors that take part in backward, with the whole's gradient and how to cut it.

        Args:
            own: the card's output tensors; those of the forward pass where None.
        """
        number = 0
        for leaf, whole in zip(self.leaves, gradients, strict=True):
            if position not in leaf.positions:
                continue
            index = leaf.positions.index(position)
            part = leaf.parts[index] if own is None else own[number]
            number += 1
            if whole is not None and part.requires_grad:
                yield part, whole, leaf, index

    def _input_gradient(self, index: int, pieces: Sequence[Any]) -> Tensor | None:
        """Join the cards' parts of one whole input's gradient."""
        whole = self.whole[index]
        spread = spread_gradient(whole, [part[1:] for of in pieces for part in of or () if part[0] == index])
        if spread is not None:
            return spread
        total: Tensor | None = None
        for of_card in pieces:
            for of, piece, gradient in of_card or ():
                if of != index or gradient is None:
                    continue
                gradient = gradient.to(whole.device, non_blocking=whole.is_cuda)  # the host would add it at once
                if total is None:
                    total = torch.zeros_like(whole)
                (total if piece is None else piece.of(total)).add_(gradient)
        return total

    def _release(self) -> None:
        """Let go of the cards' graphs after their only backward pass."""
        self.spent = True
        self.leaves = []
        self._shards = {}
        self.way = Way()
        self.batch = ((), {})


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: SpreadCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = call.forward_with_graph()
        name_like(ctx, call.own_outputs)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(output for output, varies in zip(outputs, call.differentiable, strict=True) if not varies)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, *ctx.call.backward_with_graph(ctx.saved_tensors, gradients)
        return None, *ctx.call.backward(gradients)
