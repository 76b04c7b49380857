"""The CUDA graphs of one kind of call of a module: a forward and a backward one a card.

Recording keeps two things static: the tensors that a shard is written to and read from, and the outputs. The backward
graph differentiates the very graph that the forward recording built, writes what it finds into flat buffers, one a card
and dtype, and leaves the activations' memory to whatever is recorded next. So between the two replays of one call no
other graph of the pool may be replayed; `manycard.engine.calls.call_graphs` sees to that.

Replays run from one thread, on each card's current stream. Gradients are added up in a fresh buffer on the primary:
they become the script's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from manycard.engine.batches.batch import map_tensors, tensors_in
from manycard.engine.calls.belonging import saved_storages
from manycard.engine.driving.local_backward import local_gradients
from manycard.engine.recording.kinds import UnrepeatableError, output_signature
from manycard.engine.recording.recorder import Recorder, make_room, own_inputs, without_autocast_cache
from manycard.engine.recording.stand_ins import StandIns
from manycard.engine.replicas.flat import FlatLayout, copy_all

if TYPE_CHECKING:
    from manycard.engine.calls.boundary import SpreadCall
    from manycard.engine.engine import Engine

__all__ = ["RecordedCall"]

T = TypeVar("T")


class RecordedCall:
    """Records a kind of call. Nothing runs on the cards meanwhile.

    Args:
        recorders: one a card.
        call: a call of the kind, none of which has run yet.
        shards: each card's part of its batch.
        pattern: which of the joined outputs backward gets a gradient of.

    Raises:
        Exception: it can't be recorded.
    """

    def __init__(
        self, recorders: Sequence[Recorder], call: SpreadCall, shards: Sequence[Any], pattern: tuple[bool, ...]
    ) -> None:
        engine = call.engine
        self.pattern = pattern
        self._recorders = recorders
        self._parameters = call.trainable(0)
        self._count = 0
        make_room(engine.cards)
        self._layout = FlatLayout(self._parameters)
        self._flats = [
            {dtype: flat.zero_() for dtype, flat in self._layout.allocate(card.device).items()} for card in engine.cards
        ]
        self._held = [tensor for module in engine.replicas.modules for tensor in _memory_of(module)]
        """Graphs know addresses only: what lies there stays for as long as they do."""
        self._inputs, own = own_inputs(engine.cards, shards)
        graphed: list[list[Tensor]] = [[] for _ in engine.cards]
        stand_ins = [StandIns(module) for module in engine.replicas.modules]
        self._forwards, self._values = self._record(
            engine,
            [partial(_forward, *each) for each in zip(engine.replicas.modules, stand_ins, own, graphed, strict=True)],
        )
        self.outputs = [output_signature(value) for value in self._values]
        """What tells the outputs of one kind of call from those of another."""
        saved = saved_storages(graphed[0])
        self._saved = [index for index, own in enumerate(self._parameters) if own.untyped_storage().data_ptr() in saved]
        call.join(self._values)
        roots = [_roots(call, position, value, pattern) for position, value in enumerate(self._values)]
        self._gradients = [
            [torch.zeros_like(outputs[index]) for index in of_card]
            for of_card, outputs in zip(roots, graphed, strict=True)
        ]
        self._backwards, found = self._record(
            engine,
            [
                partial(self._backward, position, stand_ins[position].of(call.trainable(position)), outputs, numbers)
                for position, (outputs, numbers) in enumerate(zip(graphed, roots, strict=True))
            ],
        )
        self._used = [any(of_card) for of_card in zip(*found, strict=True)]
        for outputs in graphed:
            outputs.clear()  # and with them the cards' graphs: their memory is the next recording's

    def _record(self, engine: Engine, works: Sequence[Callable[[], T]]) -> tuple[list[Callable[[], None]], list[T]]:
        """Record a piece of work on every card, one card at a time, each in the thread where it runs when eager.

        A thread's first use of a library of the card's can't be recorded.
        """
        replays, values = [], []
        for position, work in enumerate(works):

            def record(position: int = position, work: Callable[[], T] = work) -> tuple[Callable[[], None], T]:
                with without_autocast_cache():
                    return self._recorders[position].record(work)

            jobs: list[Callable[[], Any] | None] = [None] * len(works)
            jobs[position] = record
            replay, value = engine.threads.run(jobs, here=0)[position]
            replays.append(replay)
            values.append(value)
        return replays, values

    def _backward(
        self, position: int, parameters: Sequence[nn.Parameter], outputs: Sequence[Tensor], roots: Sequence[int]
    ) -> list[bool]:
        """One card's backward pass, into its flat buffers; gives which parameters it found gradients of."""
        found = local_gradients(
            [outputs[index] for index in roots],
            self._gradients[position],
            parameters,
            keep=False,
            accumulate=False,
        )
        if any(gradient is not None and gradient.is_sparse for gradient in found):
            raise UnrepeatableError("a gradient is sparse")
        views = self._layout.views(self._flats[position])
        groups = {
            dtype: [index for index in indices if found[index] is not None]
            for dtype, indices in self._layout.groups.items()
        }
        with torch.no_grad():  # the places of what is not used stay zero
            sources = [view if own is None else own for view, own in zip(views, found, strict=True)]
            copy_all(views, sources, groups)
        return [gradient is not None for gradient in found]

    # ---- replays -------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """How many forward replays there have been."""
        return self._count

    @property
    def versions(self) -> list[int]:
        """Of the primary's parameters that backward reads, how often they were written in place."""
        return [self._parameters[index]._version for index in self._saved]

    def check_unchanged(self, versions: Sequence[int]) -> None:
        """Raise what PyTorch raises for a graph whose saved tensors were written in place.

        Args:
            versions: `versions` at the time of the forward pass.
        """
        for index, before in zip(self._saved, versions, strict=True):
            parameter = self._parameters[index]
            if parameter._version != before:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" [{parameter.type()} {list(parameter.shape)}] is at version {parameter._version}; expected"
                    f" version {before} instead."
                )

    def forward(self, engine: Engine, shards: Sequence[Any]) -> list[Any]:
        """Run every card's replica on its shard; each card's outputs, which the next replay overwrites."""
        self._count += 1
        pairs = [
            pair
            for inputs, shard in zip(self._inputs, shards, strict=True)
            for pair in zip(inputs, tensors_in(shard), strict=True)
        ]
        self._replay(engine, pairs, self._forwards)
        return self._values

    def backward(self, call: SpreadCall, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sum over cards of the parameters' gradients, given those of the joined outputs."""
        pairs = [
            (target, leaf.gradient(whole, index))
            for position, targets in enumerate(self._gradients)
            for target, (_, whole, leaf, index) in zip(targets, call.parts_of(position, gradients), strict=True)
        ]
        engine = call.engine
        self._replay(engine, pairs, self._backwards)
        with torch.no_grad():
            buffers = self._layout.allocate(engine.device)
            for dtype, buffer in buffers.items():
                engine.collective.reduce([flats[dtype] for flats in self._flats], into=buffer)
        return [
            view if used and parameter.requires_grad else None
            for view, used, parameter in zip(self._layout.views(buffers), self._used, self._parameters, strict=True)
        ]

    def _replay(
        self, engine: Engine, pairs: Sequence[tuple[Tensor, Tensor]], replays: Sequence[Callable[[], None]]
    ) -> None:
        """Write the second of each pair into the first, and replay on every card."""
        for recorder in self._recorders:
            recorder.catch_up()
        with torch.no_grad():
            engine.input_copies.write(pairs)
        for position, replay in enumerate(replays):
            engine.generators.enter(position)
            try:
                replay()
            finally:
                engine.generators.leave(position)


def _forward(module: nn.Module, stand_ins: StandIns, shard: Any, graphed: list[Tensor]) -> Any:
    """Run a replica; its outputs without their graph, which stays behind `graphed`."""
    args, kwargs = shard
    with torch.enable_grad(), stand_ins.inside():
        value = module(*args, **kwargs)
    graphed[:] = tensors_in(value)
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _roots(call: SpreadCall, position: int, value: Any, pattern: Sequence[bool]) -> list[int]:
    """The card's outputs, by number, that take part in backward; `call` has joined them."""
    given = [leaf.parts[0] if has else None for leaf, has in zip(call.leaves, pattern, strict=True)]
    numbers = {id(part): number for number, part in enumerate(tensors_in(value))}
    return [numbers[id(part)] for part, _, _, _ in call.parts_of(position, given)]


def _memory_of(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a module holds, by another name."""
    for part in module.modules():
        tables = part._parameters, part._buffers, vars(part)
        yield from (held.detach() for table in tables for held in table.values() if isinstance(held, Tensor))
