"""What a part of a model costs, measured on one card."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.pipeline import probe
from manycard.pipeline.probe import Probe

ROWS, WIDTH = 16, 32


def _elsewhere_first(tensor: Tensor, device: torch.device) -> bool:
    """Moves a tensor as from another card: what it holds lies elsewhere then."""
    tensor.data = tensor.data.clone()
    return True


@pytest.mark.parametrize("streamed", [False, True])
def test_weights_are_no_activations_wherever_they_were(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "move_to", _elsewhere_first)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    run = partial(model, torch.randn(ROWS, WIDTH))
    made = Probe(model, Card(0, torch.device("cpu")), run, streamed=streamed)
    root = made.calls(1)
    assert root is not None
    kept = made.costs(root.calls, 1)
    assert [kept[place].activation_bytes for place in range(2)] == [ROWS * WIDTH * 4] * 2


@pytest.mark.parametrize("streamed", [False, True])
def test_casts_of_weights_that_come_and_go_are_not_kept(streamed: bool) -> None:
    model, kept = nn.Linear(WIDTH, WIDTH), []

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(torch.is_autocast_cache_enabled())
            return model(torch.ones(ROWS, WIDTH))

    Probe(model, Card(0, torch.device("cpu")), run, streamed=streamed).calls(1)
    assert kept == [not streamed]
    assert torch.is_autocast_cache_enabled()
