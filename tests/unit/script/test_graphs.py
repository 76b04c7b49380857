"""Graphs of an unmodified script's calls: the numbers of the script alone, with a recorder that runs on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manycard.cards import choose_cards
from manycard.engine.calls.call_graphs import CallGraphs
from manycard.script import Interception, ScriptSpreading, SpreadSettings
from tests.unit.engine.calls.graphed import Net, batches
from tests.unit.engine.repeating import Repeating

CARDS = choose_cards("cpu:2").cards


def graph(spreader: Any) -> list[Repeating]:
    """Give a spreader graphs."""

    def protected() -> list[Tensor]:
        return [t for module in spreader.engine.replicas.modules for t in (*module.parameters(), *module.buffers())]

    recorders = [Repeating(protected) for _ in CARDS]
    spreader.graphs = CallGraphs(recorders, pytest.fail)
    return recorders


def trained(spreading: ScriptSpreading | None) -> tuple[list[Tensor], int]:
    """A script's losses, and how often a card replayed."""
    torch.manual_seed(0)
    net = Net().double()
    own = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses: list[Tensor] = []
    recorders: list[Repeating] = []
    with Interception(spreading) if spreading is not None else nullcontext():
        for x, labels in batches(12):
            own.zero_grad()
            loss = F.cross_entropy(net(x), labels)
            loss.backward()
            own.step()
            net.eval()
            with torch.no_grad():
                losses += [loss.detach(), net(x)]
            net.train()
            if spreading is not None and not recorders:
                recorders = graph(net.__dict__["_manycard_spread"]._spreader)
    if spreading is not None:
        spreading.close()
    return losses, min((recorder.replays for recorder in recorders), default=0)


def test_a_script_trains_as_alone_when_its_calls_are_replayed() -> None:
    expected, _ = trained(None)
    actual, replays = trained(ScriptSpreading(SpreadSettings(choose=lambda: CARDS)))
    torch.testing.assert_close(actual, expected)
    assert replays >= 12


def test_simulated_cards_say_that_they_have_no_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    spreading = ScriptSpreading(SpreadSettings(choose=lambda: CARDS, graphs="auto"))
    net = Net()
    with Interception(spreading):
        net(torch.randn(4, 6))
    spreading.close()
    assert "Net runs without CUDA graphs: simulated cards have none" in capsys.readouterr().err
