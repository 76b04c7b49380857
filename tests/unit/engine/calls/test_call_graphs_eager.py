"""Calls of a module that a graph can't repeat: named once, and right."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import manycard as mc
from manycard.engine.calls.call_graphs import CallGraphs
from manycard.engine.graphs import Reasons
from manycard.errors import GraphError, SettingError
from tests.unit.engine.calls.graphed import (
    Net,
    batches,
    compare,
    losses_of,
    make,
    sgd,
)


class Drawing(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 + random.random())


class Writing(Net):
    def forward(self, x: Tensor) -> Any:
        self.newest = super().forward(x)
        return self.newest


class Replacing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen = self.seen + 1
        return super().forward(x)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_hook(lambda *_: None)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 6, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.embedding(x.argmax(1) % 4))


class InPlace(Net):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x * 2)
        x.add_(1)
        return y


class Recomputing(Net):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x + self.first.bias.sum(), use_reentrant=True)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 + 0.1 * next(self.count))


class CountingInBackward(Counting):
    def forward(self, x: Tensor) -> Any:
        y, factor = Net.forward(self, x), 1.0 + 0.1 * next(self.count)
        return y * factor + y.detach() * (1.0 - factor)


class Telling(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), object()


REASONS = [
    (Drawing, "draws at random on the host"),
    (Writing, "forward writes Writing.newest"),
    (Replacing, "forward replaces buffer seen"),
    (Hooked, "a hook of last would not run"),
    (Sparse, "the gradient of embedding.weight is sparse"),
    (InPlace, "forward writes into its input in place"),
    (Recomputing, "a checkpoint with use_reentrant=True"),
    (Counting, "a replay gives outputs that lie"),
    (CountingInBackward, "a replay gives gradients that lie"),
    (Telling, "the output holds a object"),
]


@pytest.mark.parametrize(("kind", "words"), REASONS)
def test_what_a_graph_cannot_repeat_is_named_once_and_runs_eager(kind: type[nn.Module], words: str) -> None:
    def loop(model: Any) -> list[Tensor]:
        own, losses = torch.optim.SGD(model.parameters(), 0.01), []
        for x, labels in batches():
            own.zero_grad()
            y = model(x)
            loss = F.cross_entropy(y if isinstance(y, Tensor) else y[0], labels)
            loss.backward()
            own.step()
            losses.append(loss.detach())
        return losses

    model, graphed = make(kind, 2, graphs=True)
    assert graphed is not None
    loop(model)
    assert [words in reason for reason in graphed.reasons] == [True]
    if kind not in (Drawing, Counting, CountingInBackward):  # they draw, or count what is not the script's
        compare(kind, loop, 2, alone=False)


def test_a_call_with_what_cannot_be_written_anew_is_named() -> None:
    class Taking(Net):
        def forward(self, x: Tensor, other: Any = None) -> Any:
            return super().forward(x)

    model, graphed = make(Taking, 2, graphs=True)
    assert graphed is not None
    model(next(batches())[0], other=object())
    assert graphed.reasons == ["the batch holds a object"]


def test_more_kinds_of_calls_than_graphs_are_said_once_and_run_eager() -> None:
    def loop(model: Any) -> list[Tensor]:
        own, losses = sgd(model), []
        for (x, labels), size in zip(batches(30), itertools.cycle(range(4, 15)), strict=False):
            own.zero_grad()
            loss = F.cross_entropy(model(x.repeat(2, 1)[:size]), labels.repeat(2)[:size])
            loss.backward()
            own.step()
            losses.append(loss.detach())
        return losses

    graphed = compare(Net, loop, 2)
    assert graphed.recorders[0].recordings > 8
    assert graphed.reasons == ["there are more than 8 kinds of them, which is all that is recorded"]


def test_calls_inside_other_machinery_run_eager() -> None:
    def loop(model: Any) -> list[Any]:
        kept = []
        for x, labels in batches(12):
            packed: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, packed=packed: packed.append(1) or t, lambda t: t):
                loss = F.cross_entropy(model(x), labels)
            loss.backward()
            kept.append(len(packed) > 2)
        return kept

    assert compare(Net, loop, 2).replays == 0


def test_reasons_are_warnings_and_errors_where_graphs_must_be() -> None:
    for required in (False, True):
        model, graphed = make(Writing, 2, graphs=True)
        assert graphed is not None
        reasons = Reasons(required=required)
        model._spreader.graphs = CallGraphs(graphed.recorders, lambda text, to=reasons: to.give("calls run", text))
        if required:
            with pytest.raises(GraphError, match=r"forward writes Writing\.newest"):
                losses_of(model, sgd(model))
        else:
            with pytest.warns(UserWarning, match=r"calls run without CUDA graphs: forward writes Writing\.newest"):
                losses_of(model, sgd(model))


def test_simulated_cards_have_no_graphs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses_of(model := mc.DataParallel(Net().double(), device_ids="cpu:2", graphs="auto"), sgd(model))
    with pytest.raises(SettingError, match="simulated cards have no CUDA graphs"):
        mc.DataParallel(Net(), device_ids="cpu:2", graphs="on")
    with pytest.raises(SettingError, match="there is no such mode"):
        mc.DataParallel(Net(), device_ids="cpu:2", graphs="yes")
