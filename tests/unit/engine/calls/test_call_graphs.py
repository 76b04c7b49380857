"""Graphs of a module's calls in ordinary loops: the numbers of eager calls and of one card.

The recorder of these tests runs on the CPU (`Repeating`); tests/gpu shows the same with real graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.engine.calls.graphed import (
    STEPS,
    Net,
    Normed,
    adam,
    batches,
    compare,
    losses_of,
    sgd,
)


class Named(Net):
    """Gives a dict with tuples, a count and a name; `aux` goes by a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(6, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = super().forward(x) * scale
        pair = y.detach().argmax(1), self.aux(x)
        return {"y": y, "pair": pair, "count": torch.tensor(len(x)), "mean": y.square().mean(), "name": "named"}


class WithLoss(Net):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return F.cross_entropy(super().forward(x), labels)


SETTINGS = [{}, {"clip": 0.1}, {"accumulate": 2}, {"to_none": False, "accumulate": 3, "clip": 0.5}]


@pytest.mark.parametrize("cards", [2, 3])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_ordinary_loop_trains_as_without_graphs(cards: int, optimizer: Any, settings: dict[str, Any]) -> None:
    graphed = compare(Net, lambda model: losses_of(model, optimizer(model), **settings), cards)
    assert graphed.replays >= 2 * (STEPS - 3)
    assert not graphed.reasons
    normed = compare(Normed, lambda model: losses_of(model, optimizer(model), **settings), cards, alone=False)
    assert normed.replays > 2
    assert not normed.reasons


@pytest.mark.parametrize("cards", [2, 3])
def test_a_loss_inside_the_module_is_replayed(cards: int) -> None:
    def loop(model: Any) -> list[Tensor]:
        own, losses = sgd(model), []
        for x, labels in batches(size=6):
            own.zero_grad()
            loss = model(x, labels=labels)
            loss.backward()
            own.step()
            losses.append(loss.detach())
        return losses

    assert compare(WithLoss, loop, cards).replays >= 2 * (STEPS - 3)


@pytest.mark.parametrize("cards", [2, 3])
@pytest.mark.parametrize("used", ["y", "mean", "y and aux"])
def test_nested_outputs_and_the_outputs_that_no_loss_uses(cards: int, used: str) -> None:
    def loop(model: Any) -> list[Any]:
        own, kept = sgd(model), []
        for x, labels in batches(size=6):
            own.zero_grad()
            out = model(x, scale=0.5)
            loss = out["mean"] if used == "mean" else F.cross_entropy(out["y"], labels)
            if "aux" in used:
                loss = loss + out["pair"][1].square().mean()
            loss.backward()
            own.step()
            kept.append([out["y"].detach(), out["pair"][0], out["count"], out["mean"].detach(), out["name"] == "named"])
        return kept

    assert compare(Named, loop, cards).replays >= 2 * (STEPS - 3)


def test_a_loss_that_goes_from_one_output_to_another_leaves_what_it_does_not_use_without_gradients() -> None:
    def loop(model: Any) -> list[Any]:
        own, kept = sgd(model), []
        for number, (x, labels) in enumerate(batches(20)):
            own.zero_grad()
            out = model(x)
            use_aux = number % 3 == 2
            (out["pair"][1].square().mean() if use_aux else F.cross_entropy(out["y"], labels)).backward()
            kept.append([own.grad is None for own in model.parameters()])
            own.step()
        return kept

    graphed = compare(Named, loop, 2)
    assert graphed.replays
    assert ["now these outputs" in reason for reason in graphed.reasons] == [True]


def test_outputs_are_the_scripts_own() -> None:
    def loop(model: Any) -> list[Tensor]:
        kept = []
        for x, labels in batches():
            y = model(x)
            kept.append(y.detach())
            F.cross_entropy(y, labels).backward()
            y.detach().mul_(1.0)
        return [*kept, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    assert compare(Net, loop, 2).replays > 8
